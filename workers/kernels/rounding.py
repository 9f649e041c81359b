"""Rounds floating-point weights to integers in groups at load, without calibration data.

Eight bits: the scale is the group's largest magnitude / 127. Four bits: the largest magnitude becomes -8, as in
llama.cpp's Q4_0, or -8 / 0.9. Then the scale becomes the one of least squared error for the rounded values. The better
of the two is kept. Scales are rounded to float16 before values are. The host rounds the weights of every
platform: `native/rounding.cpp`, or torch, which computes the same numbers, where nothing can be compiled.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_int, c_void_p

import torch

from manta.workers.kept_weights import group_of
from manta.workers.kernels import build
from manta.workers.kernels.quantized_weight import QuantizedWeight

_CHUNK_ELEMENTS = 1 << 18
"""Elements rounded at a time, so that what lies between two steps stays in the processor's cache."""
_KERNEL_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""The numbers by which the kernel knows the dtypes that it reads."""
_FOUR_BIT_STARTS = (1.0, 0.9)
"""Factors on the scale from which the search starts. Six of them, from 0.8 to 1.05, lower the error by another 1%."""


def rounded_shape(weight: torch.Tensor, bits: int) -> QuantizedWeight:
    """Returns what `round_weight` does, without values: tensors are on the meta device."""
    out_features, in_features = weight.shape
    num_groups = in_features // group_of(in_features, bits)
    values = torch.empty(out_features, in_features, dtype=torch.int8, device="meta")
    scales = torch.empty(out_features, num_groups, device="meta")
    return QuantizedWeight(values, scales, bits, has_half_scales=True)


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = build.load_library()
    if library is not None:
        library.manta_round_weight.argtypes = [c_int, c_void_p, *[c_int] * 4, c_void_p, c_void_p]
        library.manta_round_weight.restype = None
    return library


def round_weight(weight: torch.Tensor, bits: int) -> QuantizedWeight:
    """Rounds a weight [out_features, in_features] in the host's memory to 8 or 4 bits. A value that is not finite fails
    its group: the scale is NaN.
    """
    library = _library()
    if library is None or weight.dtype not in _KERNEL_DTYPES:
        return round_by_torch(weight, bits)
    weight = weight.contiguous()
    out_features, in_features = weight.shape
    group = group_of(in_features, bits)
    values = torch.empty(out_features, in_features, dtype=torch.int8)
    scales = torch.empty(out_features, in_features // group)
    sizes = bits, out_features, in_features, group
    dtype = _KERNEL_DTYPES[weight.dtype]
    library.manta_round_weight(dtype, weight.data_ptr(), *sizes, values.data_ptr(), scales.data_ptr())
    return QuantizedWeight(values, scales, bits, has_half_scales=True)


def round_by_torch(weight: torch.Tensor, bits: int) -> QuantizedWeight:
    """Computes what `round_weight` does, with torch alone."""
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
    return scales.float().half().float()


def _round(groups: torch.Tensor, scales: torch.Tensor, least: int, most: int) -> torch.Tensor:
    """Whole numbers. A scale of zero, of a group that is zero or too small for float16, gives zeros."""
    is_scale = scales.isfinite() & (scales != 0)
    return torch.where(is_scale, groups / scales, 0.0).clamp_(least, most).round_()


def _round_to_8(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = _half(groups.abs().amax(-1, keepdim=True) / 127)
    return _round(groups, scales, -127, 127), scales


def _round_to_4(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    most, least = groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True)
    first = torch.where(most >= -least, most, least) / -8
    (rounded, scales, errors), other = (_search(groups, first, start) for start in _FOUR_BIT_STARTS)
    is_better = other[2] < errors
    return torch.where(is_better, other[0], rounded), torch.where(is_better, other[1], scales)


def _search(groups: torch.Tensor, first: torch.Tensor, start: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rounded values, their scale of least squared error, and that error; sums are of float64."""
    rounded = _round(groups, _half(first * start), -8, 7).double()
    squares = rounded.square().sum(-1, keepdim=True)
    fitted = (groups.double() * rounded).sum(-1, keepdim=True) / squares
    scales = _half(torch.where(squares > 0, fitted.float(), first))
    rounded_again = _round(groups, scales, -8, 7)
    errors = (rounded_again.double() * scales - groups).square_().sum(-1, keepdim=True)
    return rounded_again, scales, errors
