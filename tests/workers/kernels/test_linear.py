"""The CPU's packed linears against float64 products, in every form that this processor runs."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from manta.workers.kernels import cpu_linear, processor, reference
from manta.workers.platforms import cpu_linears
from manta.workers.platforms.cpu import CpuPlatform
from manta.workers.platforms.cpu_linears import make_cpu_gated_linear, make_cpu_linear
from tests.workers.cpu_forms import COMPILED, EMULATED, FORMS, TORCH, in_form, threads

pytestmark = pytest.mark.forms_in_turns

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
UNIT = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
"""Largest relative error of one rounding."""
ROWS = (0, 1, 2, 3, 5, 6, 7, 12, 13, 16, 17, 31, 32, 33, 48, 97, 140, 512, 600)
"""One row, blocks of few, whole and partial tiles, more rows than a block has, and enough to be shared out."""


@pytest.fixture(scope="module", params=[*FORMS, *EMULATED])
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    with in_form(request.param):
        yield request.param


def random_weight(seed: int, out_features: int, in_features: int, dtype: torch.dtype, bias: bool) -> tuple:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    return weight, torch.randn(out_features, generator=generator).to(dtype) if bias else None, generator


def rows_of(form: str) -> tuple[int, ...]:
    """Fewer if each instruction is emulated."""
    return ROWS if form in FORMS else tuple(rows for rows in ROWS if rows <= 140)


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.double() @ weight.double().T + (0 if bias is None else bias.double())


def assert_rounded(y: torch.Tensor, expected: torch.Tensor, in_features: int) -> None:
    """Within a rounding of the result, and what a float32 sum of `in_features` products of size 1 may stray."""
    stray = 8 * UNIT[torch.float32] * in_features + 4e-6
    error = (y.double() - expected).abs()
    bound = UNIT[y.dtype] * expected.abs() + stray
    assert (error <= bound).all(), f"{(error / bound).max():.2f} times what rounding explains"


@pytest.mark.axes_in_turns
@DTYPES
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(
    ("out_features", "in_features"), [(64, 64), (200, 96), (1152, 896), (50, 2048), (70, 4864), (33, 40), (1, 1)]
)
def test_products_of_any_number_of_rows(
    form: str, out_features: int, in_features: int, bias: bool, dtype: torch.dtype
) -> None:
    weight, offset, generator = random_weight(0, out_features, in_features, dtype, bias)
    linear = make_cpu_linear(weight, offset)
    x = torch.randn(600, in_features, generator=generator).to(dtype)
    expected = exact(x, weight, offset)
    for num_rows in rows_of(form):
        y = linear.forward(x[:num_rows])
        assert y.dtype == dtype
        assert y.shape == (num_rows, out_features)
        assert_rounded(y, expected[:num_rows], in_features)


@pytest.mark.parametrize("name", [*COMPILED, *EMULATED])
@DTYPES
def test_random_shapes(name: str, dtype: torch.dtype) -> None:
    """Widths that are no multiple of a vector, inputs that are none of a pair, gates, biases."""

    @hypothesis.settings(max_examples=hypothesis.settings().max_examples if name in COMPILED else 30)
    @hypothesis.given(
        out_features=st.integers(1, 300),
        in_features=st.integers(1, 700),
        num_rows=st.integers(1, 512),
        bias=st.booleans(),
        activation=st.sampled_from([None, "silu", "gelu_tanh"]),
        seed=st.integers(0, 2**31),
    )
    def check(
        out_features: int, in_features: int, num_rows: int, bias: bool, activation: str | None, seed: int
    ) -> None:
        num_halves = 1 if activation is None else 2
        weight, offset, generator = random_weight(seed, out_features * num_halves, in_features, dtype, bias)
        x = torch.randn(num_rows, in_features, generator=generator).to(dtype)
        expected = exact(x, weight, offset)
        if activation is not None:
            y = make_cpu_gated_linear(weight, offset, activation=activation).forward(x)
            gate, up = expected.chunk(2, dim=-1)
            # Each factor may stray like a product, and those that are not gated by the kernel itself are rounded too
            scale = (1 + gate.abs()) * (1 + up.abs())
            error = (y.double() - reference.GATES[activation](gate, up)).abs() / scale
            assert error.max() <= 3 * UNIT[dtype] + 8 * UNIT[torch.float32] * in_features + 1e-6
        else:
            assert_rounded(make_cpu_linear(weight, offset).forward(x), expected, in_features)

    with in_form(name):
        check()


@pytest.mark.axes_in_turns
@pytest.mark.parametrize(
    ("out_features", "in_features"),
    [(32, 64), (80, 96), (1216, 896), pytest.param(4864, 896, marks=pytest.mark.prove), (10, 64), (48, 40)],
)
@pytest.mark.parametrize(("bias", "activation"), [(False, "gelu_tanh"), (True, "silu")])
@DTYPES
def test_gated_products_of_any_number_of_rows(
    form: str, out_features: int, in_features: int, bias: bool, activation: str, dtype: torch.dtype
) -> None:
    """Whole and partial panels, and sizes that the kernel leaves to a linear and a separate gate."""
    weight, offset, generator = random_weight(0, 2 * out_features, in_features, dtype, bias)
    gated = make_cpu_gated_linear(weight, offset, activation=activation)
    x = torch.randn(530, in_features, generator=generator).to(dtype)
    gate, up = exact(x, weight, offset).chunk(2, dim=-1)
    expected = reference.GATES[activation](gate, up)
    for num_rows in (0, 1, 3, 6, 7, 16, 17, 33, 100, 150, 530):
        y = gated.forward(x[:num_rows])
        assert y.dtype == dtype
        assert y.shape == (num_rows, out_features)
        # Of a separate gate both factors are rounded too
        rtol, atol = (3 * 2**-8, 5e-2) if dtype == torch.bfloat16 else (1e-4, 1e-2)
        torch.testing.assert_close(y.double(), expected[:num_rows], rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", COMPILED)
def test_a_float32_row_ignores_the_other_rows(name: str) -> None:
    with in_form(name):
        linear = make_cpu_linear(torch.randn(200, 500), torch.randn(200))
        x = torch.randn(600, 500)
        together = linear.forward(x)
        for num_rows in ROWS:
            assert torch.equal(linear.forward(x[:num_rows]), together[:num_rows])


@pytest.mark.parametrize("name", [name for name in COMPILED if name != "amx"])
def test_a_bfloat16_row_without_tiles_does_too(name: str) -> None:
    with in_form(name):
        linear = make_cpu_linear(torch.randn(200, 512).bfloat16(), None)
        x = torch.randn(600, 512).bfloat16()
        together = linear.forward(x)
        for num_rows in ROWS:
            assert torch.equal(linear.forward(x[:num_rows]), together[:num_rows])


@pytest.mark.parametrize("name", COMPILED)
def test_any_number_of_threads_gives_the_same_bits(name: str) -> None:
    with in_form(name):
        for dtype in (torch.bfloat16, torch.float32):
            linear = make_cpu_linear(torch.randn(500, 320).to(dtype), None)
            for num_rows in (1, 9, 40, 700):
                x = torch.randn(num_rows, 320).to(dtype)
                results = []
                for num_threads in (1, 2, 3, 7):
                    with threads(num_threads):
                        results.append(linear.forward(x))
                assert all(torch.equal(results[0], each) for each in results)


def test_extreme_gates_are_finite_and_nan_stays(form: str) -> None:
    gated = make_cpu_gated_linear(torch.randn(64, 32).bfloat16(), None)
    for num_rows in (3, 20, 40):
        x = torch.randn(num_rows, 32).bfloat16()
        x[0] *= 1e9
        x[1, 5] = float("nan")
        y = gated.forward(x)
        assert y.isnan().any(-1).tolist() == [row == 1 for row in range(num_rows)]
        assert y[0].isfinite().all()


def test_the_weight_may_be_overwritten_after_packing(form: str) -> None:
    weight = torch.randn(128, 64).bfloat16()
    x = torch.randn(3, 64).bfloat16()
    linear = make_cpu_linear(weight, None)
    before = linear.forward(x)
    weight.zero_()
    torch.testing.assert_close(linear.forward(x), before)


def test_a_batch_with_leading_dimensions_and_strides(form: str) -> None:
    weight = torch.randn(96, 64).bfloat16()
    linear = make_cpu_linear(weight, None)
    x = torch.randn(2, 5, 128).bfloat16()[..., ::2]
    torch.testing.assert_close(linear.forward(x), linear.forward(x.reshape(10, 64)).view(2, 5, 96))


def test_not_a_number_stays_in_its_row(form: str) -> None:
    linear = make_cpu_linear(torch.randn(96, 64).bfloat16(), None)
    for num_rows in (3, 20, 40):
        x = torch.randn(num_rows, 64).bfloat16()
        x[1, 5] = float("nan")
        failed = linear.forward(x).isnan().any(-1)
        assert failed.tolist() == [row == 1 for row in range(num_rows)]


def test_other_shapes_are_left_to_torch() -> None:
    assert cpu_linear.pack(torch.zeros(64, 40, dtype=torch.float16), None) is None
    assert cpu_linear.pack(torch.zeros(80, 64), None, gate="silu") is None


def without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor is one without AVX-512, and oneDNN refuses bfloat16 as it does there."""
    reorder = torch.ops.mkldnn._reorder_linear_weight

    def refuse(weight: torch.Tensor, rows: int) -> torch.Tensor:
        if weight.dtype == torch.bfloat16:
            raise RuntimeError(
                "mkldnn_reorder_linear_weight: bf16 path needs the cpu support avx_ne_convert or avx512bw"
            )
        return reorder(weight, rows)

    monkeypatch.setattr(cpu_linears, "_reorder", refuse)
    monkeypatch.delenv(processor.VARIABLE, raising=False)
    monkeypatch.setattr(processor, "capabilities", lambda: frozenset({"avx2", "fma3"}))


def test_torch_serves_where_onednn_refuses_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    with in_form(TORCH):
        without_bfloat16(monkeypatch)
        weight = torch.randn(96, 64).bfloat16()
        x = torch.randn(5, 64).bfloat16()
        y = make_cpu_linear(weight, None).forward(x)
        assert y.dtype == torch.bfloat16
        assert_rounded(y, exact(x, weight, None), 64)


def test_torch_alone_uses_its_fast_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    with in_form(TORCH):
        without_bfloat16(monkeypatch)
        platform = CpuPlatform(None)
        assert platform.resolve_dtype("auto", "bfloat16") == "float32"
        assert platform.resolve_dtype("bfloat16", "bfloat16") == "bfloat16"  # as told
        monkeypatch.setattr(processor, "capabilities", lambda: processor.FORMS[0].needs)
        assert platform.resolve_dtype("auto", "bfloat16") == "bfloat16"
    with in_form(COMPILED[-1]):  # compiled, every processor keeps bfloat16
        assert CpuPlatform(None).resolve_dtype("auto", "float16") == "bfloat16"
