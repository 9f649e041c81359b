"""The CPU's quantised linears: against float64 products of what weights and activations stand for, and bit for bit
against torch, in every form that this processor runs.
"""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F

from manta.workers.kernels import cpu_quantized_linear, rounding
from manta.workers.kernels.cpu_quantized_linear import PackedQuantizedLinear
from manta.workers.kernels.quantized_reference import TorchQuantizedLinear, input_group, round_activations
from manta.workers.kernels.quantized_weight import QuantizedWeight
from tests.workers.cpu_forms import EMULATED, QUANTIZED, QUANTIZED_CASES, in_form, threads

pytestmark = pytest.mark.forms_in_turns

FORMS = pytest.mark.parametrize("form", [*QUANTIZED_CASES, *EMULATED])
DTYPES = (torch.float32, torch.bfloat16)
ROWS = (1, 2, 3, 5, 6, 7, 8, 9, 13, 31, 33, 97, 200)
"""Tiles of each size, more rows than weights of 4 bits are unpacked for, and more rows than a block has."""


def random_weight(
    seed: int,
    out_features: int,
    num_groups: int,
    group: int,
    bits: int = 8,
    has_offsets: bool = False,
    has_half_scales: bool = False,
    has_int8_activations: bool = False,
    is_permuted: bool = False,
    has_codebook: bool = False,
) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)
    in_features, limit = num_groups * group, 1 << (bits - 1)
    values = torch.randint(-limit, limit, (out_features, in_features), generator=generator, dtype=torch.int8)
    codebook = None
    if has_codebook:
        numbers = (torch.randperm(256, generator=generator)[:16] - 128).to(torch.int8)
        values, codebook, bits = numbers[values.int() & 15], tuple(numbers.tolist()), 8
    scales = torch.randn(out_features, num_groups, generator=generator) * 0.01
    offsets = torch.randn(out_features, num_groups, generator=generator) * 0.01 if has_offsets else None
    if has_half_scales:
        scales = scales.half().float()
        offsets = None if offsets is None else offsets.half().float()
    order = torch.randperm(in_features, generator=generator) if is_permuted else None
    return QuantizedWeight(values, scales, bits, offsets, order, has_half_scales, has_int8_activations, codebook)


def random_rows(seed: int, num_rows: int, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of different sizes, with some values far larger than the others, as activations are."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, in_features, generator=generator)
    x[:, torch.randint(0, in_features, (1 + in_features // 100,), generator=generator)] *= 50
    return (x * torch.rand(num_rows, 1, generator=generator).mul(20).exp()).to(dtype)


def pack(
    weight: QuantizedWeight, dtype: torch.dtype, bias: torch.Tensor | None = None, gated: bool = False
) -> PackedQuantizedLinear:
    linear = cpu_quantized_linear.pack(weight, bias, dtype, gated)
    assert linear is not None
    return linear


weights = st.builds(
    random_weight,
    seed=st.integers(0, 2**31),
    out_features=st.sampled_from([32, 64, 96, 160]) | st.integers(1, 200),
    num_groups=st.integers(1, 5),
    group=st.sampled_from([16, 32, 64, 128, 256, 700]) | st.integers(1, 150),
    bits=st.sampled_from([8, 4]),
    has_offsets=st.booleans(),
    has_half_scales=st.booleans(),
    has_int8_activations=st.booleans(),
    is_permuted=st.booleans(),
    has_codebook=st.booleans(),
)


@FORMS
def test_any_weight_gives_torchs_bits_and_the_product(form: str) -> None:
    @hypothesis.settings(max_examples=hypothesis.settings().max_examples if form in QUANTIZED else 40)
    @hypothesis.example(random_weight(0, 32, 1, 1, bits=4, has_offsets=True), 1, torch.float32, False, False, 1)
    @hypothesis.given(
        weights, st.integers(1, 120), st.sampled_from(DTYPES), st.booleans(), st.booleans(), st.integers()
    )
    def check(
        weight: QuantizedWeight, num_rows: int, dtype: torch.dtype, has_bias: bool, gated: bool, seed: int
    ) -> None:
        out_features, in_features = weight.values.shape
        gated = gated and out_features % 32 == 0
        x = random_rows(seed % 2**31, num_rows, in_features, dtype)
        bias = torch.randn(out_features).to(dtype) if has_bias else None
        y = pack(weight, dtype, bias, gated).forward(x)
        assert y.dtype == dtype
        assert torch.equal(y, TorchQuantizedLinear(weight, bias, gated).forward(x))

        inputs = x if weight.input_order is None else x[:, weight.input_order]
        rounded = round_activations(inputs, input_group(weight), weight.has_int8_activations)
        ordered = rounded.dequantized(in_features)
        grouped = weight.values.double().view(*weight.scales.shape, -1) * weight.scales.double()[..., None]
        largest = grouped.abs()  # a value and its offset may be far larger than their sum, which is rounded as they are
        if weight.offsets is not None:
            grouped += weight.offsets.double()[..., None]
            largest += weight.offsets.double().abs()[..., None]
        dense = grouped.flatten(1)
        exact = ordered @ dense.T + (0 if bias is None else bias.double())
        sizes = ordered.abs() @ largest.flatten(1).T + (0 if bias is None else bias.double().abs())
        stray = 2.0**-20 * sizes
        if gated:
            gate, up = exact.chunk(2, dim=-1)
            gate_stray, up_stray = stray.chunk(2, dim=-1)
            exact = F.silu(gate) * up
            stray = 2 * (gate_stray * (1 + up.abs()) + up_stray * (1 + gate.abs())) + 1e-6 * exact.abs()
        rounding = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}[dtype] * exact.abs()
        assert ((y.double() - exact).abs() <= stray + rounding + 1e-30).all()

    with in_form(form):
        check()


@pytest.mark.parametrize(("bits", "has_codebook"), [(8, False), (4, False), (4, True)])
@FORMS
def test_a_row_ignores_other_rows_and_threads(form: str, bits: int, has_codebook: bool) -> None:
    with in_form(form):
        for dtype in DTYPES:
            linear = pack(random_weight(0, 500, 5, 64, bits, has_offsets=True, has_codebook=has_codebook), dtype)
            x = random_rows(1, 200, 320, dtype)
            together = linear.forward(x)
            for num_rows in ROWS if form in QUANTIZED else ROWS[:8]:
                assert torch.equal(linear.forward(x[:num_rows]), together[:num_rows])
            for num_threads in (1, 2, 3, 7) if form in QUANTIZED else ():
                with threads(num_threads):
                    assert torch.equal(linear.forward(x), together)


@pytest.mark.parametrize("form", QUANTIZED_CASES)
def test_inputs_beyond_the_cache_give_torchs_bits(form: str) -> None:
    """Their rows are multiplied in several blocks (`INPUT_BLOCK_BYTES` in quantized_linear.cpp)."""
    with in_form(form):
        weight, bias = random_weight(0, 150, 38, 128, has_half_scales=True), torch.randn(150).bfloat16()
        x = random_rows(1, 300, 4864, torch.bfloat16)
        linear, expected = pack(weight, torch.bfloat16, bias), TorchQuantizedLinear(weight, bias).forward(x)
        for num_threads in (1, 2, 5):
            with threads(num_threads):
                assert torch.equal(linear.forward(x), expected)


@FORMS
def test_outputs_are_rounded_to_the_nearest_bfloat16(form: str) -> None:
    """Ties to even, subnormal numbers, overflow and what is not finite, in vectors of their own and in mixed ones."""
    ties = (torch.arange(16) << 15) + 0x3F800000  # every other one lies between two numbers of bfloat16
    subnormal = torch.arange(16) * 0x7800 + 0x40
    special = [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0x7F7FFFFF, 0xFF7F8000, 0x7F7F7FFF, 0x00800000]
    words = torch.cat([ties, ties + 1, ties - 1, subnormal, torch.tensor(special * 2), torch.tensor(special)])
    mixed = words[torch.randperm(len(words), generator=torch.Generator().manual_seed(0))]
    outputs = torch.cat([words, mixed]).to(torch.int32).view(torch.float32)
    values = torch.tensor([[0, 1]], dtype=torch.int8).expand(len(outputs), 2).contiguous()
    with in_form(form):
        # Activations are rounded to 127 and 1 with a scale of one, so each output is its weight's scale.
        linear = pack(QuantizedWeight(values, outputs[:, None], 8, has_int8_activations=True), torch.bfloat16)
        for num_rows in (1, 9):
            y = linear.forward(torch.tensor([[127.0, 1.0]]).expand(num_rows, 2).bfloat16())
            torch.testing.assert_close(y, outputs.bfloat16().expand(num_rows, -1), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bits", [8, 4])
@FORMS
def test_the_largest_sums_are_not_cut_off(form: str, bits: int) -> None:
    """Every product has the largest magnitude and the same sign."""
    with in_form(form):
        for value in (-(1 << (bits - 1)), (1 << (bits - 1)) - 1):
            for sign in (1.0, -1.0):
                values = torch.full((64, 2048), value, dtype=torch.int8)
                weight = QuantizedWeight(values, torch.ones(64, 1), bits, has_int8_activations=True)
                linear = pack(weight, torch.float32)
                for num_rows in (1, 2, 7, 40):  # each kind of pass over the weights
                    y = linear.forward(torch.full((num_rows, 2048), sign * 127))
                    assert torch.equal(y, torch.full((num_rows, 64), sign * 127.0 * value * 2048))


@FORMS
def test_non_finite_values_fail_their_row_alone(form: str) -> None:
    with in_form(form):
        for gated in (False, True):
            linear = pack(random_weight(0, 64, 3, 32), torch.bfloat16, gated=gated)
            for num_rows in (3, 20, 40):
                x = torch.randn(num_rows, 96).bfloat16()
                x[1, 5], x[2, 7] = float("nan"), float("inf")
                failed = linear.forward(x).isnan().all(-1)
                assert failed.tolist() == [row in (1, 2) for row in range(num_rows)]


@FORMS
def test_zeros_and_tiny_and_huge_activations(form: str) -> None:
    with in_form(form):
        weight = random_weight(0, 64, 3, 32)
        linear = pack(weight, torch.float32)
        x = torch.randn(5, 96) * torch.tensor([0.0, 1e-38, 1e-30, 1e30, 1e36]).unsqueeze(1)
        y = linear.forward(x)
        assert torch.equal(y, TorchQuantizedLinear(weight, None).forward(x))
        assert torch.equal(y[:2], torch.zeros(2, 64))
        assert y.isfinite().all()


@FORMS
def test_a_batch_with_leading_dimensions_and_strides(form: str) -> None:
    with in_form(form):
        linear = pack(random_weight(0, 96, 2, 32), torch.bfloat16)
        x = torch.randn(2, 5, 128).bfloat16()[..., ::2]
        torch.testing.assert_close(linear.forward(x), linear.forward(x.reshape(10, 64)).view(2, 5, 96))
        assert linear.forward(x[:0]).shape == (0, 5, 96)


@FORMS
def test_weights_are_rounded_to_the_bits_of_torch(form: str) -> None:
    """Small weights too, whose scales are subnormal in float16 or zero, and values that are not finite."""
    with in_form(form):
        for bits in (8, 4):
            for in_features in (1, 7, 40, 96, 128, 896):
                weight = random_rows(in_features, 24, in_features, torch.float32) * 1e-4
                weight[3], weight[4, 0], weight[5, 0] = 0, float("nan"), float("inf")
                for dtype in DTYPES:
                    expected = rounding.round_by_torch(weight.to(dtype), bits)
                    found = rounding.round_weight(weight.to(dtype), bits)
                    assert torch.equal(found.values, expected.values)
                    assert torch.equal(found.scales.nan_to_num(-1), expected.scales.nan_to_num(-1))
                    assert found.has_half_scales


@pytest.mark.parametrize("form", QUANTIZED_CASES)
@pytest.mark.parametrize(("bits", "bound"), [(8, 1.02), (4, 0.52)])
def test_packed_weights_are_as_small_as_their_bits(form: str, bits: int, bound: float) -> None:
    """A byte or half a byte each, and two bytes for the scale of a group of 128."""
    with in_form(form):
        linear = pack(random_weight(0, 640, 7, 128, bits, has_half_scales=True), torch.bfloat16)
        assert linear.packed.nbytes <= bound * 640 * 7 * 128


def test_unsupported_shapes_are_left_to_others() -> None:
    assert cpu_quantized_linear.pack(random_weight(0, 64, 1, 40), None, torch.float16) is None
    assert cpu_quantized_linear.pack(random_weight(0, 80, 1, 64), None, torch.bfloat16, gated=True) is None


def test_smaller_activation_groups_are_more_exact() -> None:
    """Groups of activations hold an outlier's damage to its own group."""
    x = random_rows(0, 50, 512, torch.float32)
    errors = {}
    for group in (512, 128, 32):
        rounded = round_activations(x, group, one_scale=False).dequantized(512)
        errors[group] = float((rounded - x.double()).norm() / x.double().norm())
    assert errors[32] < errors[128] < errors[512] < 0.05
