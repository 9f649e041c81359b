"""Products of rows and the weights of their experts, of all experts of a layer in one launch.

A program computes a block of outputs for a block of pairs of one expert (`expert_rows.py`), with the activation.
Consecutive programs have the same outputs, and those of one expert share its weights. Many rows are multiplied in large
tiles on tensor cores. For few rows reading the weights is the floor, and small tiles give every processor a program.

Results are rounded where `LoopedExperts` rounds them: plain linears before and after their activation, quantised ones
once if the activation is SiLU. Sums of floats have the order of the tiles, which depends on the number of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from manta.workers.kernels.triton.device_weight import DeviceWeight
from manta.workers.kernels.triton.expert_rows import ExpertBlocks, load_block
from manta.workers.kernels.triton.grouped_sums import (
    gated_columns,
    most_outputs,
    split_gates,
    sum_groups,
    times_sigmoid,
)
from manta.workers.kernels.triton.launch import needs_wide_dot, num_processors, padded_size
from manta.workers.kernels.triton.rounded_rows import RoundedRows
from manta.workers.kernels.triton.rows import times_silu

BLOCK_ROWS = (8, 16, 32, 64, 128)
_LEAST_PLAIN = 16
"""Least rows of a block of plain weights, which come second in products on tensor cores."""
_MOST_ROWS_FLOAT32, _MOST_FLOAT32 = 32, 64
"""Most rows and columns of a block in float32, which tensor cores do not multiply and registers have to hold."""
_BLOCK_OUTPUTS = (256, 128, 64, 32, 16)
_TILE_BYTES = 128
"""Bytes of a row of weights that a program reads at a time: of 32 rows in 4 stages it has 16 KiB on their way."""
_STAGED_BYTES = 160 << 10
"""Most bytes of shared memory that the stages of a program take, of the 227 KiB of an H100."""
_BYTES_AHEAD = 16 << 10


class Activation(NamedTuple):
    """The function that follows the first linear of an expert."""

    name: str
    """A key of `reference.GATES` with gates, else of `reference.ACTIVATIONS`; empty for none."""
    is_gated: bool
    """Whether the first half of the outputs are gates, the second what they let through."""


NONE = Activation("", is_gated=False)


def block_rows(num_pairs: int, num_experts: int, dtype: torch.dtype, are_quantized: bool) -> int:
    """Returns the pairs of a block: as many as hold those of most experts, if the choice is even."""
    expected = max(1.5 * num_pairs / num_experts, 0 if are_quantized else _LEAST_PLAIN)
    size = next((size for size in BLOCK_ROWS if size >= expected), BLOCK_ROWS[-1])
    return min(size, _MOST_ROWS_FLOAT32) if dtype == torch.float32 else size


def multiply(
    x: torch.Tensor,
    blocks: ExpertBlocks,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation,
    pairs_of_row: int,
) -> torch.Tensor:
    """Returns the results [num_pairs, width] of x [num_pairs / pairs_of_row, in_features] times the weights of the
    pairs' experts, [num_experts, out_features, in_features] in the dtype of x, with biases [num_experts, out_features].
    Rows of pairs without an expert are undefined.
    """
    num_experts, out_features, in_features = weight.shape
    width = out_features // 2 if activation.is_gated else out_features
    y = torch.empty((len(x) * pairs_of_row, width), dtype=x.dtype, device=x.device)
    most = _MOST_FLOAT32 if x.dtype == torch.float32 else 256 if blocks.size > 64 else 128
    outputs = _block_outputs(blocks, width, most // (1 + activation.is_gated), x.device)
    tile = min(padded_size(in_features, 16), _TILE_BYTES // x.itemsize)
    staged = tile * x.itemsize * (blocks.size + outputs * (1 + activation.is_gated))
    _multiply_experts[(blocks.num_blocks, triton.cdiv(width, outputs))](
        x, blocks.order, blocks.table, weight, weight if bias is None else bias, y,
        blocks.num_blocks, num_experts, pairs_of_row, width, out_features, in_features,
        IS_SINGLE_ROW=blocks.is_single_row, HAS_BIAS=bias is not None, IS_GATED=activation.is_gated,
        ACTIVATION=activation.name, IS_EVEN=in_features % tile == 0, IS_WIDE=needs_wide_dot(x.dtype),
        ROWS=blocks.size, OUTPUTS=outputs, TILE=tile, num_warps=_num_warps(blocks.size, outputs, activation.is_gated),
        num_stages=max(2, min(5, _STAGED_BYTES // staged)), enable_fp_fusion=False,
    )  # fmt: skip
    return y


def multiply_quantized(
    rows: RoundedRows, blocks: ExpertBlocks, weight: DeviceWeight, activation: Activation, pairs_of_row: int
) -> torch.Tensor:
    """Returns what `multiply` does, for rounded rows and quantised weights, whose tensors have the dimension of the
    experts first.
    """
    form, tensors = weight
    width = form.out_features // 2 if activation.is_gated else form.out_features
    y = torch.empty((rows.num_rows * pairs_of_row, width), dtype=rows.dtype, device=rows.values.device)
    outputs = _block_outputs(blocks, width, most_outputs(blocks.size, activation.is_gated), y.device)
    tile_bytes = form.tile * (blocks.size + outputs)
    _multiply_quantized_experts[(blocks.num_blocks, triton.cdiv(width, outputs))](
        rows.values, rows.scales, rows.shifts, blocks.order, blocks.table, tensors.values, tensors.scales,
        tensors.scales if tensors.offsets is None else tensors.offsets,
        tensors.scales if tensors.bias is None else tensors.bias, y,
        blocks.num_blocks, len(tensors.values), pairs_of_row, rows.scales.shape[1], width, form.out_features,
        form.scale_stride, form.rounding.in_features, form.rounding.num_groups,
        tensors.values.stride(0), tensors.scales.stride(0),
        **form.constants, IS_SINGLE_ROW=blocks.is_single_row, HAS_BIAS=tensors.bias is not None,
        IS_GATED=activation.is_gated, ACTIVATION=activation.name, ROWS=blocks.size, OUTPUTS=outputs,
        num_warps=8 if blocks.size * outputs * (1 + activation.is_gated) >= 64 * 128 else 4,
        num_stages=min(8, max(3, _BYTES_AHEAD // tile_bytes)), enable_fp_fusion=False,
    )  # fmt: skip
    return y


def _block_outputs(blocks: ExpertBlocks, width: int, most: int, device: torch.device) -> int:
    """Returns the largest block of at most so many outputs with which every processor of the device has two programs,
    for as many blocks as there surely are. Few rows wait for memory, which several programs of a processor ask at a
    time.
    """
    least_blocks = blocks.num_blocks if blocks.is_single_row else max(1, blocks.num_blocks // 2)
    for size in _BLOCK_OUTPUTS:
        if size <= most and least_blocks * triton.cdiv(width, size) >= 2 * num_processors(device):
            return size
    return _BLOCK_OUTPUTS[-1]


def _num_warps(rows: int, outputs: int, is_gated: bool) -> int:
    return 8 if rows * outputs * (1 + is_gated) >= 128 * 128 else 4


@triton.jit(do_not_specialize=["num_blocks"])
def _multiply_experts(
    x, order, table, weights, bias, y,
    num_blocks, num_experts, pairs_of_row, width, out_features, in_features,
    IS_SINGLE_ROW: tl.constexpr, HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    IS_EVEN: tl.constexpr, IS_WIDE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Computes the outputs `OUTPUTS` of a block of pairs."""
    expert, pair, is_pair = load_block(order, table, num_blocks, num_experts, IS_SINGLE_ROW, ROWS)
    if expert < 0:
        return
    expert = expert.to(tl.int64)
    output = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    column, is_column = output, output < width
    if IS_GATED:
        column, is_column = gated_columns(width, OUTPUTS)
    COLUMNS: tl.constexpr = 2 * OUTPUTS if IS_GATED else OUTPUTS
    k = tl.arange(0, TILE)
    row_place = x + (pair // pairs_of_row)[:, None] * in_features + k[None, :]
    weight_place = weights + (expert * out_features + column)[None, :] * in_features + k[:, None]
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, in_features, TILE):
        row_mask, weight_mask = is_pair[:, None], is_column[None, :]
        if not IS_EVEN:
            is_input = start + k < in_features
            row_mask, weight_mask = row_mask & is_input[None, :], weight_mask & is_input[:, None]
        inputs = tl.load(row_place + start, mask=row_mask, other=0.0)
        columns = tl.load(weight_place + start, mask=weight_mask, other=0.0)
        sums = _dot(inputs, columns, sums, IS_WIDE)
    DTYPE: tl.constexpr = y.dtype.element_ty
    if HAS_BIAS:
        place = bias + expert * out_features + column
        sums += tl.load(place, mask=is_column, other=0.0).to(tl.float32)[None, :]
    result = sums.to(DTYPE).to(tl.float32)
    if IS_GATED:
        gates, up = split_gates(result, ROWS, OUTPUTS)
        result = gate(gates, up, ACTIVATION)
    else:
        result = activate(result, ACTIVATION)
    place = y + pair[:, None] * width + output[None, :]
    tl.store(place, result.to(DTYPE), mask=is_pair[:, None] & (output < width)[None, :])


@triton.jit
def _dot(inputs, columns, sums, IS_WIDE: tl.constexpr):
    if IS_WIDE:
        inputs, columns = inputs.to(tl.float32), columns.to(tl.float32)
    return tl.dot(inputs, columns, sums, input_precision="ieee")


@triton.jit(do_not_specialize=["num_blocks", "padded_rows"])
def _multiply_quantized_experts(
    values, scales, shifts, order, table, weights, weight_scales, offsets, bias, y,
    num_blocks, num_experts, pairs_of_row, padded_rows, width, out_features, scale_stride, in_features, num_groups,
    expert_values, expert_scales,
    GROUP: tl.constexpr, IS_EVEN: tl.constexpr, IS_PACKED: tl.constexpr, CODEBOOK: tl.constexpr,
    HAS_ONE_SCALE: tl.constexpr, SCALE_ROWS: tl.constexpr, HAS_OFFSETS: tl.constexpr, TILE: tl.constexpr,
    IS_SINGLE_ROW: tl.constexpr, HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Computes the outputs `OUTPUTS` of a block of pairs."""
    expert, pair, is_pair = load_block(order, table, num_blocks, num_experts, IS_SINGLE_ROW, ROWS)
    if expert < 0:
        return
    expert = expert.to(tl.int64)
    row = pair // pairs_of_row
    column = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    is_output = column < width
    weights += expert * expert_values
    weight_scales += expert * expert_scales
    if HAS_OFFSETS:
        offsets += expert * expert_scales
    if HAS_BIAS:
        bias += expert * out_features
    DTYPE: tl.constexpr = y.dtype.element_ty
    if IS_GATED:
        both, is_both = gated_columns(width, OUTPUTS)
        sums = sum_groups(
            values, scales, shifts, weights, weight_scales, offsets, bias, row, both, is_pair, is_both,
            padded_rows, out_features, scale_stride, in_features, num_groups, GROUP, IS_EVEN, IS_PACKED, CODEBOOK,
            HAS_ONE_SCALE, SCALE_ROWS, HAS_OFFSETS, HAS_BIAS, ROWS, 2 * OUTPUTS, TILE,
        )  # fmt: skip
        gates, up = split_gates(sums, ROWS, OUTPUTS)
        if ACTIVATION == "silu":
            result = times_sigmoid(gates) * up
        else:
            result = gate(gates.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32), ACTIVATION)
    else:
        sums = sum_groups(
            values, scales, shifts, weights, weight_scales, offsets, bias, row, column, is_pair, is_output,
            padded_rows, out_features, scale_stride, in_features, num_groups, GROUP, IS_EVEN, IS_PACKED, CODEBOOK,
            HAS_ONE_SCALE, SCALE_ROWS, HAS_OFFSETS, HAS_BIAS, ROWS, OUTPUTS, TILE,
        )  # fmt: skip
        result = activate(sums.to(DTYPE).to(tl.float32), ACTIVATION)
    place = y + pair[:, None] * width + column[None, :]
    tl.store(place, result.to(DTYPE), mask=is_pair[:, None] & is_output[None, :])


_HALF_ROOT, _TANH_ROOT = tl.constexpr(0.7071067811865476), tl.constexpr(0.7978845608028654)


@triton.jit
def gate(gates, up, ACTIVATION: tl.constexpr):
    """The functions of `reference.GATES`, in float32."""
    if ACTIVATION == "silu":
        result = times_silu(gates, up)
    elif ACTIVATION == "gelu":
        result = gates * 0.5 * (1.0 + tl.erf(gates * _HALF_ROOT)) * up
    elif ACTIVATION == "gelu_tanh":
        inner = _TANH_ROOT * (gates + 0.044715 * gates * gates * gates)
        result = 0.5 * gates * (2.0 - 2.0 / (1.0 + tl.exp(2.0 * inner))) * up
    else:
        tl.static_assert(ACTIVATION == "clamped")
        gates = tl.where(gates > 7.0, 7.0, gates)  # NaN stays NaN
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        result = (up + 1.0) * (gates / (1.0 + tl.exp(gates * -1.702)))
    return result


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The functions of `reference.ACTIVATIONS` in float32; x itself if there is none."""
    if ACTIVATION == "relu2":
        x = tl.where(x < 0.0, 0.0, x)
        x = x * x
    elif ACTIVATION == "silu":
        x = x / (1.0 + tl.exp(-x))
    else:
        tl.static_assert(ACTIVATION == "")
    return x
