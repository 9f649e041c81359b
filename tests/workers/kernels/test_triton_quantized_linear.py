"""The GPU's quantised linears give the bits of torch's, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from manta.workers.kernels.quantized_reference import TorchQuantizedLinear
from manta.workers.kernels.quantized_weight import QuantizedWeight
from manta.workers.kernels.triton.launch import INTERPRETED
from manta.workers.kernels.triton.quantized_linear import TritonQuantizedLinear
from tests.workers.kernels.test_quantized_linear import random_rows, random_weight, weights
from tests.workers.triton_device import DEVICE, THOROUGH

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check(weight: QuantizedWeight, x: torch.Tensor, has_bias: bool = False, gated: bool = False) -> torch.Tensor:
    """Returns the result after comparing it with torch's, NaN with NaN."""
    bias = torch.randn(weight.values.shape[0]).to(x.dtype) if has_bias else None
    on_device = None if bias is None else bias.to(DEVICE)
    y = TritonQuantizedLinear.of(weight, on_device, DEVICE, gated).forward(x.to(DEVICE)).cpu()
    expected = TorchQuantizedLinear(weight, bias, gated).forward(x)
    assert y.dtype == expected.dtype == x.dtype
    # Triton's interpreter cuts bfloat16 off where a GPU rounds it
    stray = 2.0**-7 if INTERPRETED and x.dtype == torch.bfloat16 else 0
    torch.testing.assert_close(y, expected, atol=0, rtol=stray, equal_nan=True)
    return y


@settings(max_examples=100 if THOROUGH else 12)
@given(weights, st.integers(1, 40), st.sampled_from(DTYPES), st.booleans(), st.booleans(), st.integers(0, 2**31))
def test_any_weight_gives_the_bits_of_torch(
    weight: QuantizedWeight, num_rows: int, dtype: torch.dtype, has_bias: bool, gated: bool, seed: int
) -> None:
    out_features, in_features = weight.values.shape
    x = random_rows(seed, num_rows, in_features, torch.float32).clamp(-60_000, 60_000).to(dtype)
    check(weight, x, has_bias, gated and out_features % 2 == 0)


@pytest.mark.few(2)
@pytest.mark.parametrize("num_rows", [17, 130])
@pytest.mark.parametrize("bits", [8, 4])
def test_rows_do_not_depend_on_block_size(bits: int, num_rows: int) -> None:
    weight = random_weight(0, 160, 5, 64, bits, has_offsets=True)
    x = random_rows(1, num_rows, 320, torch.bfloat16)
    together = check(weight, x, gated=True)
    linear = TritonQuantizedLinear.of(weight, None, DEVICE, gated=True)
    for rows in (x[:1], x[-1:], x[3:9]):
        where = torch.cat([(x == row).all(1).nonzero()[0] for row in rows])
        assert torch.equal(linear.forward(rows.to(DEVICE)).cpu(), together[where])


@pytest.mark.parametrize("one_scale", [True, False])
def test_an_infinite_value_fails_its_row_alone(one_scale: bool) -> None:
    weight = random_weight(0, 64, 3, 32, has_int8_activations=one_scale)
    for strange in (float("nan"), float("inf")):
        x = random_rows(2, 5, 96, torch.float32)
        x[3, 40] = strange
        y = check(weight, x)
        assert y[3].isnan().all()
        assert y[[0, 1, 2, 4]].isfinite().all()


def test_a_weight_takes_half_a_byte() -> None:
    linear = TritonQuantizedLinear.of(random_weight(0, 64, 4, 32, bits=4, has_half_scales=True), None, DEVICE)
    assert linear.weight.tensors.num_bytes == 64 * 128 // 2 + 64 * 4 * 2
