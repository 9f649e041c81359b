"""Reads E4M3 weights with a scale for each tensor, output or block.

A platform that multiplies by E4M3 gets them as they are. Otherwise the result has the activations' dtype, because they
are not integers.
"""

from __future__ import annotations

import torch

from manta.workers.checkpoints.formats.stored_part import EXPONENT_BIAS, EXPONENTS, StoredPart
from manta.workers.kernels.quantized_weight import QuantizedWeight

_ROWS_AT_A_TIME = 1024
"""Number of rows that are converted to float32 at a time."""


def read_float8(part: StoredPart) -> QuantizedWeight | torch.Tensor:
    """Reads `weight` float8 [out, in] and its factors `weight_scale` or `weight_scale_inv`: one number, one for each
    output, or one for each block of outputs and inputs.
    """
    stored = part.stored("weight", (part.out_features, part.in_features), torch.float8_e4m3fn)
    scales = _scales(part)
    part.skip("input_scale", "activation_scale", "weight_zero_point")
    if part.keeps_float8 and part.format.has_float8_activations and _divides_inputs(part):
        return QuantizedWeight(stored, _by_output(scales, part, slice(0, part.out_features)).contiguous())
    if stored.is_meta:
        return torch.empty(stored.shape, dtype=part.dtype, device="meta")
    weight = torch.empty(stored.shape, dtype=part.dtype)
    for start in range(0, part.out_features, _ROWS_AT_A_TIME):
        rows = slice(start, min(start + _ROWS_AT_A_TIME, part.out_features))
        weight[rows] = stored[rows].float() * _spread(scales, part, rows)
    return weight


def _scales(part: StoredPart) -> torch.Tensor:
    """Returns the scales, float32 [out_features, 1], or for blocks [num_blocks_of_rows, num_blocks_of_columns], which
    may be stored as powers of two. The weight is multiplied by them under either name.
    """
    suffix = "weight_scale_inv" if part.has("weight_scale_inv") else "weight_scale"
    if part.format.block is None:
        return part.grouped(suffix)
    height, width = part.format.block
    shape = (-(-part.out_features // height), -(-part.in_features // width))
    if part.kind_of(suffix) in EXPONENTS:
        return torch.exp2(part.stored(suffix, shape, torch.uint8).float() - EXPONENT_BIAS)
    return part.stored(suffix, shape, torch.float32)


def _divides_inputs(part: StoredPart) -> bool:
    """Returns whether every block has all its inputs, as groups of a `QuantizedWeight` do."""
    return part.format.block is None or part.in_features % part.format.block[1] == 0


def _by_output(scales: torch.Tensor, part: StoredPart, rows: slice) -> torch.Tensor:
    """Returns the scales of some rows, float32 [num_rows, 1], or for blocks [num_rows, num_blocks_of_columns]."""
    if part.format.block is None:
        return scales[rows].float()
    return scales[torch.arange(rows.start, rows.stop) // part.format.block[0]].float()


def _spread(scales: torch.Tensor, part: StoredPart, rows: slice) -> torch.Tensor:
    """Returns the scales of some rows, float32 [num_rows, 1], or for blocks [num_rows, in_features]."""
    by_output = _by_output(scales, part, rows)
    if part.format.block is None:
        return by_output
    return by_output.repeat_interleave(part.format.block[1], dim=1)[:, : part.in_features]
