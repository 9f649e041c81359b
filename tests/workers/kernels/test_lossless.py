"""Weights that are kept without loss, in every form that this processor runs: a kernel multiplies by what it was given.
Rows of the identity matrix show each weight: its product is the weight, and zeros are added to it.
"""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from manta.workers.kernels import cpu_linear
from manta.workers.kernels.cpu_linear import PackedLinear
from tests.workers.cpu_forms import COMPILED, EMULATED, in_form, threads

pytestmark = pytest.mark.forms_in_turns

ROWS = (1, 4, 5, 6, 7, 13, 16, 17, 32, 33, 140, 400)
"""One row, blocks of few, whole and partial tiles, and enough to be shared out."""


@pytest.fixture(scope="module", params=[*COMPILED, *EMULATED])
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    with in_form(request.param):
        yield request.param


def kept(weight: torch.Tensor, gate: str | None = None, bias: torch.Tensor | None = None) -> PackedLinear:
    linear = cpu_linear.pack(weight, bias, gate, lossless=True)
    assert linear is not None
    return linear


def of_bits(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int16).view(torch.bfloat16)


def odd_weights() -> torch.Tensor:
    """Weights [96, 160] of a trained model's size, and among them all that a code cannot express, or only as itself."""
    weight = (torch.randn(96, 160, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    weight[0], weight[1, ::2], weight[2, 5] = 0, -0.0, 1e-30
    weight[3, :20] = of_bits(torch.arange(20))  # subnormal, but for zero
    weight[4, ::3], weight[5, 100], weight[6] = 3e38, -1e38, weight[6] * 1e-20
    weight[7, :32] = torch.tensor([2.0**-power for power in range(32)])
    return weight


def weights_seen(linear: PackedLinear, num_rows: int) -> torch.Tensor:
    """Returns the weights [out_features, in_features] that so many rows at once are multiplied by."""
    ones = torch.eye(linear.in_features).bfloat16()
    return torch.cat([linear.forward(rows) for rows in ones.split(num_rows)]).T


@pytest.mark.parametrize("num_rows", [1, 6, 16, 40, 160])
def test_every_weight_is_what_it_was(form: str, num_rows: int) -> None:
    weight = odd_weights()
    seen = weights_seen(kept(weight), num_rows)
    has_subnormals = form not in ("avx512_bf16", "amx")  # whose instructions take them for zero
    expected = weight if has_subnormals else torch.where(weight.abs() < 2.0**-126, 0.0, weight)
    assert torch.equal(seen, expected)


@pytest.mark.parametrize("name", COMPILED)
def test_random_bits(name: str) -> None:
    """Of any exponents, and of so many that nearly every weight is an exception."""

    @hypothesis.settings(max_examples=min(8, hypothesis.settings().max_examples))
    @hypothesis.given(
        out_features=st.integers(1, 150), in_features=st.integers(1, 130), span=st.integers(1, 253), seed=st.integers(0)
    )
    def check(out_features: int, in_features: int, span: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed % 2**31)
        shape = out_features, in_features
        exponents = torch.randint(254 - span, 255, shape, generator=generator).clamp(min=1)
        rest = torch.randint(0, 256, shape, generator=generator)
        weight = of_bits((rest & 0x80) << 8 | exponents << 7 | (rest & 0x7F))
        assert torch.equal(weights_seen(kept(weight), 8), weight)

    with in_form(name):
        check()


@pytest.mark.axes_in_turns
@pytest.mark.parametrize(("out_features", "in_features"), [(64, 64), (200, 96), (70, 608), (33, 40)])
@pytest.mark.parametrize("gate", [None, "silu", "gelu_tanh"])
def test_products_have_the_bits_of_plain_weights(
    form: str, out_features: int, in_features: int, gate: str | None
) -> None:
    generator = torch.Generator().manual_seed(1)
    if gate is not None:
        out_features = -(-out_features // 32) * 32
    weight = (torch.randn(out_features, in_features, generator=generator) * 0.02).bfloat16()
    weight[::7, ::5] *= 1e-6
    bias = torch.randn(out_features, generator=generator).bfloat16()
    plain = cpu_linear.pack(weight, bias, gate)
    assert plain is not None
    lossless = kept(weight, gate, bias)
    x = torch.randn(max(ROWS), in_features, generator=generator).bfloat16()
    for num_rows in ROWS if form in COMPILED else ROWS[:-1]:
        assert torch.equal(lossless.forward(x[:num_rows]), plain.forward(x[:num_rows])), num_rows


@pytest.mark.parametrize("name", COMPILED)
def test_any_number_of_threads_gives_the_same_bits(name: str) -> None:
    with in_form(name):
        linear = kept(torch.randn(300, 96).bfloat16())
        for num_rows in (1, 9, 40, 400):
            x = torch.randn(num_rows, 96).bfloat16()
            results = []
            for num_threads in (1, 2, 7):
                with threads(num_threads):
                    results.append(linear.forward(x))
            assert all(torch.equal(results[0], each) for each in results)


def test_normally_distributed_weights_take_three_quarters() -> None:
    weight = torch.randn(512, 1024).bfloat16()
    plain = cpu_linear.pack(weight, None)
    assert plain is not None
    assert kept(weight).num_bytes < 0.755 * plain.num_bytes


def test_not_finite_weights_stay() -> None:
    weight = torch.randn(64, 64).bfloat16()
    weight[3, 7], weight[4, 8], weight[5, 9] = float("inf"), float("-inf"), float("nan")
    y = kept(weight).forward(torch.ones(3, 64).bfloat16())
    assert torch.isposinf(y[:, 3]).all()
    assert torch.isneginf(y[:, 4]).all()
    assert y[:, 5].isnan().all()
    assert y[:, 6:].isfinite().all()


def test_other_dtypes_are_not_kept_so() -> None:
    assert cpu_linear.pack(torch.zeros(64, 64), None, lossless=True) is None
