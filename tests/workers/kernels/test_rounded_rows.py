"""Rows that kernels round to 8 bits: the bits of torch's rounding, alone or in the pass that makes the rows."""

from __future__ import annotations

import pytest
import torch

from manta.workers.kernels.quantized_reference import RoundedActivations, round_activations, round_to_float8
from manta.workers.kernels.triton import rows
from manta.workers.kernels.triton.rounded_rows import RoundedRows, RowRounding, round_normed, round_rows
from tests.workers.kernels.test_quantized_linear import random_rows
from tests.workers.triton_device import DEVICE

FLOAT8 = torch.float8_e4m3fn
ROUNDINGS = [
    RowRounding(FLOAT8, 200, 200, False, False),
    RowRounding(FLOAT8, 320, 64, False, False),
    RowRounding(torch.int8, 200, 200, True, False),
    RowRounding(torch.int8, 300, 128, False, False),  # the last group is smaller
    RowRounding(torch.int8, 320, 32, True, True),
]


def assert_same(rounded: RoundedRows, expected: RoundedActivations, rounding: RowRounding) -> None:
    num_rows = rounded.num_rows
    values = rounded.values[:num_rows].float().cpu()
    assert torch.equal(values, expected.values.flatten(1)[:, : rounding.in_features])
    scales = rounded.scales[:, :num_rows].T.cpu()
    torch.testing.assert_close(scales, expected.scales, atol=0, rtol=0, equal_nan=True)
    if rounding.has_shifts:
        shifts = expected.scales * expected.values.sum(-1)
        torch.testing.assert_close(rounded.shifts[:, :num_rows].T.cpu(), shifts, atol=0, rtol=0, equal_nan=True)


def expected_rows(x: torch.Tensor, rounding: RowRounding) -> RoundedActivations:
    if rounding.dtype == FLOAT8:
        return round_to_float8(x.cpu(), rounding.group)
    return round_activations(x.cpu(), rounding.group, rounding.has_one_scale)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_rows_are_rounded_to_torchs_bits(rounding: RowRounding) -> None:
    for num_rows in (1, 5, 8):
        x = random_rows(num_rows, num_rows, rounding.in_features, torch.float32)
        x[0, 3:9] = 0
        x[-1, 7] = float("nan") if num_rows == 5 else float("inf") if num_rows == 8 else 1e-31
        assert_same(round_rows(x.to(DEVICE), rounding), expected_rows(x, rounding), rounding)


def test_every_magnitude_rounds_to_its_float8() -> None:
    """Magnitudes from below E4M3's least number to its most, and the middles between its numbers."""
    numbers = torch.arange(127, dtype=torch.uint8).view(FLOAT8).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    beside = [torch.nextafter(middles, torch.full_like(middles, to)) for to in (0.0, 1e9)]
    x = torch.cat([numbers, middles, *beside])
    x = torch.cat([x, -x])[None]
    rounding = RowRounding(FLOAT8, x.shape[1], x.shape[1], False, False)
    assert torch.equal(round_rows(x.to(DEVICE), rounding).values.float().cpu(), x.to(FLOAT8).float())


@pytest.mark.parametrize("rounding", [each for each in ROUNDINGS if each.fits_norm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_rounds_what_it_would_store(rounding: RowRounding, dtype: torch.dtype) -> None:
    hidden, eps = rounding.in_features, 1e-5
    x, residual, weight = (random_rows(seed, 5, hidden, dtype).to(DEVICE) for seed in range(3))
    residual = torch.cat([residual, residual], dim=1)[:, :hidden]  # rows that are not one after the other
    weight, own = weight[0], residual.clone()
    pairs = [
        (round_normed(x, residual, weight, eps, rounding), rows.add_rms_norm(x, own, weight, eps)),
        (round_normed(x, None, weight, eps, rounding), rows.rms_norm(x, weight, eps)),
    ]
    assert torch.equal(residual, own)
    for rounded, normed in pairs:
        assert rounded.dtype == dtype
        assert_same(rounded, expected_rows(normed, rounding), rounding)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_gate_rounds_what_it_would_store(rounding: RowRounding) -> None:
    gate_up = random_rows(4, 5, 2 * rounding.in_features, torch.bfloat16).clamp(-1000, 1000).to(DEVICE)
    rounded = round_rows(gate_up, rounding, is_gated=True)
    assert_same(rounded, expected_rows(rows.silu_and_mul(gate_up), rounding), rounding)


def test_groups_that_a_norms_program_cannot_divide() -> None:
    assert not RowRounding(torch.int8, 300, 100, False, False).fits_norm
    assert RowRounding(torch.int8, 300, 300, False, False).fits_norm
