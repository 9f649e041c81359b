"""Rounds rows of activations to int8 or E4M3 for quantised linears, alone or in the pass that makes the rows.

The passes are the RMS norm with or without the residual, and SiLU-and-mul. Each rounds what it would otherwise store,
so the numbers are those of two passes. `workers/kernels/quantized_reference.py` defines the results.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from manta.workers.kernels.quantized_reference import LEAST_LARGEST, MOST_FLOAT8, MOST_INT8, input_group
from manta.workers.kernels.quantized_weight import QuantizedWeight
from manta.workers.kernels.triton.launch import INTERPRETED, padded_size
from manta.workers.kernels.triton.rows import norm_row, num_warps, times_silu

_VALUES_AT_A_TIME = 2048
"""Values that a program rounds, unless a row has one scale and one program."""
_SCALE_COLUMN = 4
"""Multiple of rows for which each group's scales begin at 16 bytes, as cuBLAS may read them."""


class RowRounding(NamedTuple):
    """The form in which a linear reads its rows."""

    dtype: torch.dtype
    """int8, or float8_e4m3fn."""
    in_features: int
    group: int
    """Inputs that share a scale."""
    has_one_scale: bool
    """Whether all groups of a row are rounded by the row's largest magnitude."""
    has_shifts: bool
    """Whether the linear needs `RoundedRows.shifts`."""

    @classmethod
    def of(cls, weight: QuantizedWeight) -> RowRounding:
        dtype = torch.float8_e4m3fn if weight.is_float8 else torch.int8
        in_features, has_shifts = weight.values.shape[1], weight.offsets is not None
        return cls(dtype, in_features, input_group(weight), weight.has_int8_activations, has_shifts)

    @property
    def num_groups(self) -> int:
        return -(-self.in_features // self.group)

    @property
    def fits_norm(self) -> bool:
        """Whether the norm's program, which has a row of a power of two, can divide it into the groups."""
        return self.num_groups == 1 or self.group == padded_size(self.group)

    def empty(self, x: torch.Tensor) -> RoundedRows:
        """Returns memory for the rounded rows of x [num_rows, ...]."""
        has_scale_columns = self.dtype == torch.float8_e4m3fn and self.num_groups > 1
        padded = -(-x.shape[0] // _SCALE_COLUMN) * _SCALE_COLUMN if has_scale_columns else x.shape[0]
        values = torch.empty((padded, self.in_features), dtype=self.dtype, device=x.device)
        scales = torch.empty((self.num_groups, padded), device=x.device)
        shifts = torch.empty_like(scales) if self.has_shifts else scales
        return RoundedRows(values, scales, shifts, x.shape[0], x.dtype)


class RoundedRows(NamedTuple):
    """`padded_rows` is `num_rows`, or up to three more rows that hold nothing."""

    values: torch.Tensor
    """int8 or E4M3 [padded_rows, in_features]."""
    scales: torch.Tensor
    """float32 [num_groups, padded_rows]; NaN where a value is not finite."""
    shifts: torch.Tensor
    """float32 [num_groups, padded_rows]: scales times the sums of the values; undefined without `has_shifts`."""
    num_rows: int
    dtype: torch.dtype
    """The dtype before rounding, which the linear's outputs have."""


def round_rows(
    x: torch.Tensor, rounding: RowRounding, order: torch.Tensor | None = None, is_gated: bool = False
) -> RoundedRows:
    """Rounds x [num_rows, in_features], whose column i is taken from column `order[i]`, int32. With `is_gated` x
    [num_rows, 2 * in_features] has gates before what they let through, and SiLU-and-mul comes first.
    """
    x = x.contiguous()
    rounded = rounding.empty(x)
    padded_group, all_groups = padded_size(rounding.group), padded_size(rounding.num_groups)
    groups = all_groups if rounding.has_one_scale else min(all_groups, max(1, _VALUES_AT_A_TIME // padded_group))
    _round_rows[(x.shape[0], triton.cdiv(rounding.num_groups, groups))](
        x, x if order is None else order, *rounded[:3],
        rounded.scales.shape[1], rounding.in_features, rounding.num_groups, LEAST_LARGEST,
        GROUP=rounding.group, HAS_ORDER=order is not None, IS_GATED=is_gated, HAS_ONE_SCALE=rounding.has_one_scale,
        HAS_SHIFTS=rounding.has_shifts, GROUPS=groups, COLUMNS=padded_group, CASTS=not INTERPRETED,
        num_warps=min(16, max(1, groups * padded_group // 512)), enable_fp_fusion=False,
    )  # fmt: skip
    return rounded


def round_normed(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, rounding: RowRounding
) -> RoundedRows:
    """Rounds the RMS norm of x [num_rows, hidden], or of the sum of x and the residual, which becomes this sum."""
    x = x.contiguous()
    rounded, columns = rounding.empty(x), padded_size(rounding.in_features)
    to = x if residual is None else residual
    _round_normed[(x.shape[0],)](
        x, to, weight, *rounded[:3],
        rounded.scales.shape[1], rounding.in_features, to.stride(0), rounding.num_groups, eps, LEAST_LARGEST,
        ADD=residual is not None, GROUP=rounding.group, HAS_ONE_SCALE=rounding.has_one_scale,
        HAS_SHIFTS=rounding.has_shifts, GROUPS=1 if rounding.num_groups == 1 else columns // rounding.group,
        COLUMNS=columns, CASTS=not INTERPRETED, num_warps=num_warps(columns), enable_fp_fusion=False,
    )  # fmt: skip
    return rounded


@triton.jit
def _round_rows(
    x, order, values, scales, shifts, padded_rows, in_features, num_groups, least_largest,
    GROUP: tl.constexpr, HAS_ORDER: tl.constexpr, IS_GATED: tl.constexpr, HAS_ONE_SCALE: tl.constexpr,
    HAS_SHIFTS: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, CASTS: tl.constexpr,
):  # fmt: skip
    """Rounds some groups of one row; with `HAS_ONE_SCALE` all of them."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    inside = tl.arange(0, COLUMNS)
    column = group[:, None] * GROUP + inside[None, :]
    mask = (inside[None, :] < GROUP) & (column < in_features)
    source = column
    if HAS_ORDER:
        source = tl.load(order + column, mask=mask, other=0)
    if IS_GATED:
        place = x + row * 2 * in_features + source
        gate = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(place + in_features, mask=mask, other=0.0).to(tl.float32)
        row_values = times_silu(gate, up).to(x.dtype.element_ty).to(tl.float32)
    else:
        row_values = tl.load(x + row * in_features + source, mask=mask, other=0.0).to(tl.float32)
    _store_rounded(
        row_values, mask, row, group, column, values, scales, shifts, padded_rows, in_features, num_groups,
        least_largest, HAS_ONE_SCALE, HAS_SHIFTS, GROUPS, CASTS,
    )  # fmt: skip


@triton.jit
def _round_normed(
    x, residual, weight, values, scales, shifts, padded_rows, hidden, residual_stride, num_groups, eps, least_largest,
    ADD: tl.constexpr, GROUP: tl.constexpr, HAS_ONE_SCALE: tl.constexpr, HAS_SHIFTS: tl.constexpr,
    GROUPS: tl.constexpr, COLUMNS: tl.constexpr, CASTS: tl.constexpr,
):  # fmt: skip
    """Normalises and rounds one row in each program, as `rows.py` and then `_round_rows` do."""
    row = tl.program_id(0).to(tl.int64)
    normed = norm_row(x, residual, weight, row, hidden, residual_stride, eps, ADD, COLUMNS)
    row_values = tl.reshape(normed.to(x.dtype.element_ty).to(tl.float32), (GROUPS, COLUMNS // GROUPS))
    group = tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, COLUMNS // GROUPS)[None, :]
    _store_rounded(
        row_values, column < hidden, row, group, column, values, scales, shifts, padded_rows, hidden, num_groups,
        least_largest, HAS_ONE_SCALE, HAS_SHIFTS, GROUPS, CASTS,
    )  # fmt: skip


_MOST_INT8, _MOST_FLOAT8 = tl.constexpr(MOST_INT8), tl.constexpr(MOST_FLOAT8)


@triton.jit
def _store_rounded(
    row_values, mask, row, group, column, values, scales, shifts, padded_rows, in_features, num_groups, least_largest,
    HAS_ONE_SCALE: tl.constexpr, HAS_SHIFTS: tl.constexpr, GROUPS: tl.constexpr, CASTS: tl.constexpr,
):  # fmt: skip
    """Rounds groups [GROUPS, COLUMNS] of a row by their largest magnitudes, or by the row's. A group with a value that
    is not finite gets the scale NaN.
    """
    IS_FLOAT: tl.constexpr = values.dtype.element_ty == tl.float8e4nv
    MOST: tl.constexpr = _MOST_FLOAT8 if IS_FLOAT else _MOST_INT8
    is_strange = (row_values - row_values) != 0.0
    largest = tl.max(tl.where(is_strange, 0.0, tl.abs(row_values)), axis=1)
    num_strange = tl.sum(is_strange.to(tl.int32), axis=1)
    if HAS_ONE_SCALE:
        largest = tl.zeros_like(largest) + tl.max(largest, axis=0)
        num_strange = tl.zeros_like(num_strange) + tl.sum(num_strange, axis=0)
    is_rounded = (num_strange == 0) & (largest >= least_largest)
    divisor = tl.where(is_rounded, largest, 1.0)
    most = tl.full((GROUPS,), MOST, tl.float32)
    inverse = tl.div_rn(most, divisor)
    scaled = tl.where(is_rounded[:, None] & mask, row_values, 0.0) * inverse[:, None]
    place = values + row * in_features + column
    if IS_FLOAT:
        if not CASTS:  # the interpreter's cast does not round
            scaled = _round_to_float8(scaled)
        tl.store(place, scaled.to(tl.float8e4nv), mask=mask)
    else:
        rounded = round_half_even(scaled).to(tl.int8)
        tl.store(place, rounded, mask=mask)
    scale = tl.where(is_rounded, tl.div_rn(divisor, most), 0.0)
    scale = tl.where(num_strange == 0, scale, float("nan"))
    there = group < num_groups
    tl.store(scales + group * padded_rows + row, scale, mask=there)
    if HAS_SHIFTS:
        total = tl.sum(rounded.to(tl.int32), axis=1).to(tl.float32)
        tl.store(shifts + group * padded_rows + row, scale * total, mask=there)


@triton.jit
def round_half_even(x):
    """Rounds |x| < 2^22 to whole numbers by adding and subtracting 1.5 * 2^23, where floats have no fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _round_to_float8(x):
    """Rounds |x| < 464 to numbers that E4M3 has, ties to even: three bits after the first one, and below 2^-6 multiples
    of 2^-9.
    """
    small = (x + 24576.0) - 24576.0
    bits = x.to(tl.int32, bitcast=True)
    kept = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    return tl.where(tl.abs(x) < 0.015625, small, kept.to(tl.float32, bitcast=True))
