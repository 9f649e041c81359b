"""The gates and norms of recurrent layers in Triton, one kernel each; `workers/kernels/recurrent_layer.py` defines the
results. A row of an input may lie anywhere, so that parts of one linear's results need no copies.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from manta.workers.kernels.triton.launch import padded_size
from manta.workers.kernels.triton.recurrence import in_rows

_NUMBERS = 1024
"""Numbers of a program."""


def unit_heads(x: torch.Tensor, scale: float, eps: float) -> torch.Tensor:
    x = in_rows(x)
    num_tokens, num_heads, size = x.shape
    output = x.new_empty((num_tokens, num_heads, size))
    columns = padded_size(size)
    heads = min(padded_size(num_heads), max(1, _NUMBERS // columns))
    _unit_heads[(num_tokens, triton.cdiv(num_heads, heads))](
        x, output, x.stride(0), scale, eps, NUM_HEADS=num_heads, SIZE=size, HEADS=heads, COLUMNS=columns,
        num_warps=_num_warps(heads * columns),
    )  # fmt: skip
    return output


def gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    has_sigmoid: bool = False,
    gates_first: bool = False,
) -> torch.Tensor:
    x, gate = in_rows(x), in_rows(gate)
    num_tokens, num_groups, size = x.shape
    output = x.new_empty((num_tokens, num_groups * size))
    columns = padded_size(size)
    groups = min(padded_size(num_groups), max(1, _NUMBERS // columns))
    _gated_norm[(num_tokens, triton.cdiv(num_groups, groups))](
        x,
        gate,
        weight,
        output,
        x.stride(0),
        gate.stride(0),
        eps,
        NUM_GROUPS=num_groups,
        SIZE=size,
        HAS_WIDE_WEIGHT=weight.numel() != size,
        HAS_SIGMOID=has_sigmoid,
        GATES_FIRST=gates_first,
        GROUPS=groups,
        COLUMNS=columns,
        num_warps=_num_warps(groups * columns),
    )
    return output


def softplus(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return _of_each(x, bias)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return _of_each(x, None)


def _of_each(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns the softplus of x [num_tokens, ...] plus a bias, or the sigmoid of x."""
    x = in_rows(x)
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = math.prod(x.shape[1:])
    columns = min(_NUMBERS, padded_size(width))
    _gate_each[(x.shape[0], triton.cdiv(width, columns))](
        x, x if bias is None else bias, output, x.stride(0), width, IS_SOFTPLUS=bias is not None, COLUMNS=columns,
        num_warps=_num_warps(columns),
    )  # fmt: skip
    return output


def _num_warps(numbers: int) -> int:
    return min(8, max(1, numbers // 256))


@triton.jit
def _unit_heads(
    x, output, stride, scale, eps,
    NUM_HEADS: tl.constexpr, SIZE: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Scales `HEADS` heads of one token in each program."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    exists = (head < NUM_HEADS) & (column < SIZE)
    place = head * SIZE + column
    values = tl.load(x + row * stride + place, mask=exists, other=0.0)
    factor = scale / tl.sqrt(tl.sum(values * values, axis=1) + eps)
    tl.store(output + row * (NUM_HEADS * SIZE) + place, values * factor[:, None], mask=exists)


@triton.jit
def _gated_norm(
    x,
    gate,
    weight,
    output,
    stride,
    gate_stride,
    eps,
    NUM_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    HAS_WIDE_WEIGHT: tl.constexpr,
    HAS_SIGMOID: tl.constexpr,
    GATES_FIRST: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Normalises `GROUPS` groups of one token in each program."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    exists = (group < NUM_GROUPS) & (column < SIZE)
    place = group * SIZE + column
    values = tl.load(x + row * stride + place, mask=exists, other=0.0)
    gates = tl.load(gate + row * gate_stride + place, mask=exists, other=0.0)
    factor = 1.0 / (1.0 + tl.exp(-gates))
    if not HAS_SIGMOID:
        factor = factor * gates
    if GATES_FIRST:
        values = values * factor
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=1) / SIZE + eps)
    if HAS_WIDE_WEIGHT:
        factors = tl.load(weight + place, mask=exists, other=0.0)
    else:
        factors = tl.load(weight + column + group * 0, mask=exists, other=0.0)
    values = values * scale[:, None] * factors
    if not GATES_FIRST:
        values = values * factor
    tl.store(output + row * (NUM_GROUPS * SIZE) + place, values, mask=exists)


@triton.jit
def _gate_each(x, bias, output, stride, width, IS_SOFTPLUS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < width
    values = tl.load(x + row * stride + column, mask=mask, other=0.0)
    if IS_SOFTPLUS:
        values = values + tl.load(bias + column, mask=mask, other=0.0)
        # max(x, 0) + log(1 + e^-|x|), whose second part is twice the series of atanh: it loses no small numbers
        small = tl.exp(-tl.abs(values))
        ratio = small / (2.0 + small)
        square = ratio * ratio
        series = 1.0 / 15 + square * 0.0
        for odd in tl.static_range(13, 0, -2):
            series = series * square + 1.0 / odd
        result = tl.maximum(values, 0.0) + 2.0 * ratio * series
        result = tl.where(values == values, result, values)  # NaN stays
    else:
        result = 1.0 / (1.0 + tl.exp(-values))
    tl.store(output + row * width + column, result, mask=mask)
