"""Rounds floating-point weights to integers in groups at load, without calibration data.

Eight bits: the scale is the group's largest magnitude / 127. Four bits: the largest magnitude becomes -8, as in
llama.cpp's Q4_0, or -8 / 0.9; then the scale becomes the one of least squared error for the rounded values, and the
better of the two is kept. Scales are rounded to float16 before values are. `workers/platforms/cpu_linears.py` calls it.
"""

from __future__ import annotations

import torch

from workers.kept_weights import group_of
from workers.kernels.quantized_weight import QuantizedWeight

_CHUNK_ELEMENTS = 1 << 18
"""Elements rounded at a time, so that what lies between two steps stays in the processor's cache."""
_FOUR_BIT_STARTS = (1.0, 0.9)
"""Factors on the scale from which the search starts. Six of them, from 0.8 to 1.05, lower the error by another 1%."""


def rounded_shape(weight: torch.Tensor, bits: int) -> QuantizedWeight:
    """Returns what `round_weight` does, without values: tensors are on the meta device."""
    out_features, in_features = weight.shape
    num_groups = in_features // group_of(in_features, bits)
    values = torch.empty(out_features, in_features, dtype=torch.int8, device="meta")
    scales = torch.empty(out_features, num_groups, device="meta")
    return QuantizedWeight(values, scales, bits, has_half_scales=True)


def round_weight(weight: torch.Tensor, bits: int) -> QuantizedWeight:
    """Rounds a weight [out_features, in_features] to 8 or 4 bits. A value that is not finite fails its group: the scale
    is NaN.
    """
    out_features, in_features = weight.shape
    group = group_of(in_features, bits)
    values = torch.empty(out_features, in_features, dtype=torch.int8)
    scales = torch.empty(out_features, in_features // group)
    rows = max(1, _CHUNK_ELEMENTS // in_features)
    round_groups = {8: _round_to_8, 4: _round_to_4}[bits]
    for first in range(0, out_features, rows):
        part = slice(first, first + rows)
        groups = weight[part].float().view(-1, group)
        rounded, scale = round_groups(groups)
        values[part] = rounded.view(-1, in_features)
        scales[part] = scale.view(-1, in_features // group)
    return QuantizedWeight(values, scales, bits, has_half_scales=True)


def _half(scales: torch.Tensor) -> torch.Tensor:
    return scales.half().float()


def _round(groups: torch.Tensor, scales: torch.Tensor, least: int, most: int) -> torch.Tensor:
    """Whole numbers. A scale of zero, of a group that is zero or too small for float16, gives zeros."""
    return (groups / scales).nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(least, most)


def _round_to_8(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = _half(groups.abs().amax(-1, keepdim=True) / 127)
    return _round(groups, scales, -127, 127), scales


def _round_to_4(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -8
    best = best_scales = best_error = None
    for start in _FOUR_BIT_STARTS:
        rounded = _round(groups, _half(largest * start), -8, 7)
        fitted = (groups * rounded).sum(-1, keepdim=True) / rounded.square().sum(-1, keepdim=True)
        scales = _half(torch.where(fitted.isnan(), largest, fitted))
        rounded = _round(groups, scales, -8, 7)
        error = (rounded * scales - groups).square_().sum(-1, keepdim=True)
        if best is None or best_scales is None or best_error is None:
            best, best_scales, best_error = rounded, scales, error
        else:
            is_better = error < best_error
            best, best_scales = torch.where(is_better, rounded, best), torch.where(is_better, scales, best_scales)
    assert best is not None
    assert best_scales is not None
    return best, best_scales
