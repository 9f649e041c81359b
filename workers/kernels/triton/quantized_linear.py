"""Quantised linears on a GPU: rounded activations times weights of int8, of 4 bits or of E4M3, in groups.

The results of integers are those of `workers/kernels/quantized_reference.py`, bit for bit, as on a CPU. Sums within a
group are integers and exact, groups are added in order, and every float operation is rounded by itself. So they depend
neither on the sizes of the blocks nor on the other rows. Sums of E4M3 are floats, whose order a GPU chooses.
`workers/platforms/cuda.py` makes these linears.

`rounded_rows.py` rounds the activations. In the kernel here, each program computes a block of outputs for a block of
rows and reads each weight once; consecutive programs share the weights of a block of outputs. Many rows are multiplied
by cuBLAS instead where `library_products.py` says so.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.quantized_reference import EXP2, EXP2_FIRST, LOG2_E
from manta.workers.kernels.quantized_weight import QuantizedWeight
from manta.workers.kernels.triton.launch import num_processors, padded_size
from manta.workers.kernels.triton.library_products import FLOAT8_BLOCK, choose_product
from manta.workers.kernels.triton.rounded_rows import RoundedRows, RowRounding, round_half_even, round_rows
from manta.workers.kernels.triton.rows import silu_and_mul

_LEAST_DOT = 32
"""The least number of inputs in a product of matrices of bytes on tensor cores."""
_MOST_TILE = 128
"""The most inputs of a group that a program reads at a time."""
_BLOCK_ROWS = (16, 32, 64, 128)
_BLOCK_OUTPUTS = (128, 64, 32, 16)
_BYTES_AHEAD = 16 << 10
"""Bytes of rows and weights that a program has on their way to hide the latency of memory (an estimate: no GPU has run
this yet).
"""


class TritonQuantizedLinear:
    """`x @ weight.T + bias` for x [..., in_features] in float32, bfloat16 or float16.

    With `gated`, the result is `silu` of the first half of the outputs times the second half. The device holds a weight
    of 4 bits in half a byte, if its groups have an even number of inputs.
    """

    def __init__(
        self, weight: QuantizedWeight, bias: torch.Tensor | None, device: torch.device, gated: bool = False
    ) -> None:
        self.out_features, self.in_features = weight.values.shape
        self.rounding = RowRounding.of(weight)
        """The form of the rows that `multiply` takes, in the order of the weight's columns."""
        self.has_order = weight.input_order is not None
        self._has_one_scale = weight.scales.shape[1] == 1
        self._has_offsets = weight.offsets is not None
        self._is_packed = weight.bits == 4 and self.rounding.group % 2 == 0 and self.in_features % 2 == 0
        self._gated = gated
        self._num_processors = num_processors(device)
        values = _pack_nibbles(weight.values) if self._is_packed else weight.values.contiguous()
        self.values = values.to(device, copy=True)
        """int8 or E4M3 [out_features, in_features]; of 4 bits two in a byte."""
        dtype = torch.float16 if weight.has_half_scales else torch.float32
        self._scale_rows = _outputs_of_scale(weight)
        self._scales = weight.scales[:: self._scale_rows].T.contiguous().to(device, dtype)
        # Arguments that a form of the kernel does not read still need a pointer
        self._offsets = self._scales if weight.offsets is None else weight.offsets.T.contiguous().to(device, dtype)
        self._order = None if weight.input_order is None else weight.input_order.to(device, torch.int32)
        self._bias = bias
        self.library = choose_product(self.values, self._scales, bias)
        """The product of cuBLAS for many rows; None if there is none."""

    @property
    def num_bytes(self) -> int:
        """The bytes that the weight takes on the device, without the bias."""
        kept = [self.values, self._scales, *([self._offsets] if self._has_offsets else [])]
        return sum(each.nbytes for each in kept)

    def forward(self, x: torch.Tensor, step: AttentionMetadata | None = None) -> torch.Tensor:
        rows = round_rows(x.reshape(-1, self.in_features), self.rounding, self._order)
        y = self.multiply(rows)
        return y.view(*x.shape[:-1], y.shape[-1])

    def multiply(self, rows: RoundedRows) -> torch.Tensor:
        """Returns the outputs [num_rows, width] of rows that were rounded by `rounding`."""
        if self.library is not None and self.library.takes(rows):
            product = self.library.multiply(rows)
            return silu_and_mul(product) if self._gated else product
        return self.multiply_by_triton(rows)

    def multiply_and_round(self, rows: RoundedRows, rounding: RowRounding) -> RoundedRows:
        """Returns the outputs of `multiply` rounded for the next linear."""
        if self._gated and self.library is not None and self.library.takes(rows):
            return round_rows(self.library.multiply(rows), rounding, is_gated=True)
        return round_rows(self.multiply(rows), rounding)

    def multiply_by_triton(self, rows: RoundedRows) -> torch.Tensor:
        """Returns what `multiply` does, whatever a library could multiply."""
        num_rows = rows.num_rows
        width = self.out_features // 2 if self._gated else self.out_features
        y = torch.empty((num_rows, width), dtype=rows.dtype, device=rows.values.device)
        block_rows = next((size for size in _BLOCK_ROWS if size >= num_rows), _BLOCK_ROWS[-1])
        block_outputs = self._block_outputs(triton.cdiv(num_rows, block_rows), width)
        group = self.rounding.group
        tile = min(_MOST_TILE, max(_LEAST_DOT, padded_size(group)))
        tile_bytes = tile * (block_rows + block_outputs // (2 if self._is_packed else 1))
        _multiply[(triton.cdiv(num_rows, block_rows), triton.cdiv(width, block_outputs))](
            rows.values, rows.scales, rows.shifts, self.values, self._scales, self._offsets,
            self._scales if self._bias is None else self._bias, y,
            num_rows, rows.scales.shape[1], width, self._scales.shape[1], self.in_features, self.rounding.num_groups,
            GROUP=group, IS_EVEN=group % tile == 0 and self.in_features % group == 0,
            IS_PACKED=self._is_packed, HAS_ONE_SCALE=self._has_one_scale, SCALE_ROWS=self._scale_rows,
            HAS_OFFSETS=self._has_offsets, HAS_BIAS=self._bias is not None, IS_GATED=self._gated,
            ROWS=block_rows, OUTPUTS=block_outputs, TILE=tile,
            num_warps=8 if block_rows * block_outputs >= 64 * 128 else 4,
            num_stages=min(8, max(3, _BYTES_AHEAD // tile_bytes)), enable_fp_fusion=False,
        )  # fmt: skip
        return y

    def _block_outputs(self, row_blocks: int, width: int) -> int:
        """Returns the largest block of outputs with which every processor of the device has a program."""
        for size in _BLOCK_OUTPUTS[self._gated :]:  # a gate doubles the sums, and the registers would not hold them
            if row_blocks * triton.cdiv(width, size) >= self._num_processors:
                return size
        return _BLOCK_OUTPUTS[-1]


def _pack_nibbles(values: torch.Tensor) -> torch.Tensor:
    """Returns int8 [out_features, in_features // 2]: the even inputs are the low nibbles."""
    return (values[:, ::2] & 15) | (values[:, 1::2] << 4)


def _outputs_of_scale(weight: QuantizedWeight) -> int:
    """Returns how many consecutive outputs share their scales: `FLOAT8_BLOCK` in E4M3 of such blocks, else 1."""
    out_features, num_groups = weight.scales.shape
    if not weight.is_float8 or num_groups == 1 or out_features % FLOAT8_BLOCK:
        return 1
    blocks = weight.scales.view(-1, FLOAT8_BLOCK, num_groups)
    return FLOAT8_BLOCK if torch.equal(blocks, blocks[:, :1].expand_as(blocks)) else 1


@triton.jit
def _multiply(
    values, scales, shifts, weights, weight_scales, offsets, bias, y,
    num_rows, padded_rows, width, scale_stride, in_features, num_groups,
    GROUP: tl.constexpr, IS_EVEN: tl.constexpr, IS_PACKED: tl.constexpr, HAS_ONE_SCALE: tl.constexpr,
    SCALE_ROWS: tl.constexpr, HAS_OFFSETS: tl.constexpr, HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Computes the outputs `OUTPUTS` of `ROWS` rows, and with `IS_GATED` the gates and what they let through."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    result = _sum_groups(
        values, scales, shifts, weights, weight_scales, offsets, bias, row, column, column < width,
        num_rows, padded_rows, scale_stride, in_features, num_groups,
        GROUP, IS_EVEN, IS_PACKED, HAS_ONE_SCALE, SCALE_ROWS, HAS_OFFSETS, HAS_BIAS, ROWS, OUTPUTS, TILE,
    )  # fmt: skip
    if IS_GATED:
        let_through = _sum_groups(
            values, scales, shifts, weights, weight_scales, offsets, bias, row, column + width, column < width,
            num_rows, padded_rows, scale_stride, in_features, num_groups,
            GROUP, IS_EVEN, IS_PACKED, HAS_ONE_SCALE, SCALE_ROWS, HAS_OFFSETS, HAS_BIAS, ROWS, OUTPUTS, TILE,
        )  # fmt: skip
        result = _times_sigmoid(result) * let_through
    mask = (row < num_rows)[:, None] & (column < width)[None, :]
    place = y + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(place, result.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _sum_groups(
    values, scales, shifts, weights, weight_scales, offsets, bias, row, column, is_output,
    num_rows, padded_rows, scale_stride, in_features, num_groups,
    GROUP: tl.constexpr, IS_EVEN: tl.constexpr, IS_PACKED: tl.constexpr, HAS_ONE_SCALE: tl.constexpr,
    SCALE_ROWS: tl.constexpr, HAS_OFFSETS: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Returns the products [ROWS, OUTPUTS] of some rows and outputs in float32, the bias added."""
    is_row = row < num_rows
    row_place = values + row.to(tl.int64)[:, None] * in_features
    weight_place = weights + column.to(tl.int64)[:, None] * (in_features // 2 if IS_PACKED else in_features)
    PRODUCT: tl.constexpr = tl.float32 if weights.dtype.element_ty == tl.float8e4nv else tl.int32
    sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for group in range(num_groups):
        first = group * GROUP
        end = tl.minimum(first + GROUP, in_features)
        products = tl.zeros((ROWS, OUTPUTS), PRODUCT)
        if GROUP <= TILE:  # then this loop has no other inside, and Triton loads the next group ahead
            inputs, columns = _load_tile(
                row_place, weight_place, is_row, is_output, first, end, IS_EVEN, IS_PACKED, OUTPUTS, TILE
            )
            products = _dot_tile(inputs, columns, products, TILE)
        else:
            for start in range(0, GROUP, TILE):
                inputs, columns = _load_tile(
                    row_place, weight_place, is_row, is_output, first + start, end, IS_EVEN, IS_PACKED, OUTPUTS, TILE
                )
                products = _dot_tile(inputs, columns, products, TILE)
        of_weight = 0 if HAS_ONE_SCALE else group
        place = of_weight * scale_stride + column // SCALE_ROWS
        weight_scale = tl.load(weight_scales + place, mask=is_output, other=0.0).to(tl.float32)
        scale = tl.load(scales + group * padded_rows + row, mask=is_row, other=0.0)
        sums += products.to(tl.float32) * weight_scale[None, :] * scale[:, None]
        if HAS_OFFSETS:
            offset = tl.load(offsets + place, mask=is_output, other=0.0).to(tl.float32)
            shift = tl.load(shifts + group * padded_rows + row, mask=is_row, other=0.0)
            sums += offset[None, :] * shift[:, None]
    if HAS_BIAS:
        sums += tl.load(bias + column, mask=is_output, other=0.0).to(tl.float32)[None, :]
    return sums


@triton.jit
def _dot_tile(inputs, columns, products, TILE: tl.constexpr):
    """Adds the products of a tile of rows and of weights. Tensor cores add E4M3 with less than float32's precision, so
    each tile's sum is added by itself.
    """
    return tl.dot(inputs, tl.trans(columns), products, max_num_imprecise_acc=TILE, out_dtype=products.dtype)


@triton.jit
def _load_tile(
    row_place, weight_place, is_row, is_output, first, end,
    IS_EVEN: tl.constexpr, IS_PACKED: tl.constexpr, OUTPUTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Returns inputs `first` to `first + TILE` of rows and of weights, bytes with zeros from input `end` on."""
    k = tl.arange(0, TILE)
    row_mask, weight_mask = is_row[:, None], is_output[:, None]
    if not IS_EVEN:
        row_mask = row_mask & (first + k < end)[None, :]
    inputs = tl.load(row_place + first + k[None, :], mask=row_mask, other=0.0)
    if IS_PACKED:
        byte = tl.arange(0, TILE // 2)
        if not IS_EVEN:
            weight_mask = weight_mask & (first + 2 * byte < end)[None, :]
        pairs = tl.load(weight_place + first // 2 + byte[None, :], mask=weight_mask, other=0)
        columns = tl.reshape(tl.join((pairs << 4) >> 4, pairs >> 4), (OUTPUTS, TILE))
    else:
        if not IS_EVEN:
            weight_mask = weight_mask & (first + k < end)[None, :]
        columns = tl.load(weight_place + first + k[None, :], mask=weight_mask, other=0.0)
    return inputs, columns


_LOG2_E = tl.constexpr(LOG2_E)
_EXP2_FIRST = tl.constexpr(EXP2_FIRST)
_EXP2_1, _EXP2_2, _EXP2_3, _EXP2_4, _EXP2_5 = map(tl.constexpr, EXP2)


@triton.jit
def _times_sigmoid(x):
    """x * sigmoid(x), by the operations of `quantized_reference.py`. NaN stays NaN."""
    scaled = x * _LOG2_E
    clamped = tl.where(scaled < -126.0, -126.0, tl.where(scaled > 126.0, 126.0, scaled))
    exponent = -tl.where(x == x, clamped, 0.0)
    whole = round_half_even(exponent)
    fraction = exponent - whole
    result = fraction * _EXP2_FIRST + _EXP2_1
    result = result * fraction + _EXP2_2
    result = result * fraction + _EXP2_3
    result = result * fraction + _EXP2_4
    result = result * fraction + _EXP2_5
    power = ((whole.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.div_rn(x, 1.0 + result * power)
