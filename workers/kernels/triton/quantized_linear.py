"""Quantised linears on a GPU: activations in int8 times weights of 8 or 4 bits in groups.

The results are those of `workers/kernels/quantized_reference.py`, bit for bit, as on a CPU. Sums within a group are
integers and exact, groups are added in order, and every float operation is rounded by itself. So they depend neither on
the sizes of the blocks nor on the other rows. `workers/platforms/cuda.py` makes these linears.

A linear is two kernels. The first rounds the activations. In the second, each program computes a block of outputs for a
block of rows and reads each weight once; consecutive programs share the weights of a block of outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from workers.kernels.attention_metadata import AttentionMetadata
from workers.kernels.quantized_reference import EXP2, EXP2_FIRST, LEAST_LARGEST, LOG2_E, input_group
from workers.kernels.quantized_weight import QuantizedWeight
from workers.kernels.triton.launch import num_processors, padded_size

_LEAST_DOT = 32
"""The least number of inputs in a product of int8 matrices on tensor cores."""
_MOST_TILE = 128
"""The most inputs of a group that a program reads at a time."""
_ROWS_AT_A_TIME = 2048
"""Values that a program of the first kernel rounds, unless a row has one scale and one program."""
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
        self._group = input_group(weight)
        self._num_groups = -(-self.in_features // self._group)
        self._has_one_scale = weight.scales.shape[1] == 1
        self._has_one_input_scale = weight.has_int8_activations
        self._has_offsets = weight.offsets is not None
        self._is_packed = weight.bits == 4 and self._group % 2 == 0 and self.in_features % 2 == 0
        self._gated = gated
        self._device = device
        self._num_processors = num_processors(device)
        values = _pack_nibbles(weight.values) if self._is_packed else weight.values.contiguous()
        self._values = values.to(device, copy=True)
        dtype = torch.float16 if weight.has_half_scales else torch.float32
        self._scales = weight.scales.T.contiguous().to(device, dtype)
        # Arguments that a form of the kernel does not read still need a pointer
        self._offsets = self._scales if weight.offsets is None else weight.offsets.T.contiguous().to(device, dtype)
        self._order = None if weight.input_order is None else weight.input_order.to(device, torch.int32)
        self._bias = bias

    @property
    def num_bytes(self) -> int:
        """The bytes that the weight takes on the device, without the bias."""
        kept = [self._values, self._scales, *([self._offsets] if self._has_offsets else [])]
        return sum(each.nbytes for each in kept)

    def forward(self, x: torch.Tensor, step: AttentionMetadata | None = None) -> torch.Tensor:
        shape, x = x.shape, x.reshape(-1, self.in_features).contiguous()
        num_rows = x.shape[0]
        values, scales, shifts = self._round(x)
        width = self.out_features // 2 if self._gated else self.out_features
        y = x.new_empty((num_rows, width))
        block_rows = next((size for size in _BLOCK_ROWS if size >= num_rows), _BLOCK_ROWS[-1])
        block_outputs = self._block_outputs(triton.cdiv(num_rows, block_rows), width)
        tile = min(_MOST_TILE, max(_LEAST_DOT, padded_size(self._group)))
        tile_bytes = tile * (block_rows + block_outputs // (2 if self._is_packed else 1))
        _multiply[(triton.cdiv(num_rows, block_rows), triton.cdiv(width, block_outputs))](
            values, scales, shifts, self._values, self._scales, self._offsets,
            self._scales if self._bias is None else self._bias, y,
            num_rows, width, self.out_features, self.in_features, self._num_groups,
            GROUP=self._group, IS_EVEN=self._group % tile == 0 and self.in_features % self._group == 0,
            IS_PACKED=self._is_packed, HAS_ONE_SCALE=self._has_one_scale, HAS_OFFSETS=self._has_offsets,
            HAS_BIAS=self._bias is not None, IS_GATED=self._gated,
            ROWS=block_rows, OUTPUTS=block_outputs, TILE=tile,
            num_warps=8 if block_rows * block_outputs >= 64 * 128 else 4,
            num_stages=min(8, max(3, _BYTES_AHEAD // tile_bytes)), enable_fp_fusion=False,
        )  # fmt: skip
        return y.view(*shape[:-1], width)

    def _round(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the activations as int8 [num_rows, in_features], their scales and the scales times the sums of the
        int8, both float32 [num_groups, num_rows].
        """
        num_rows = x.shape[0]
        values = torch.empty((num_rows, self.in_features), dtype=torch.int8, device=x.device)
        scales = torch.empty((self._num_groups, num_rows), device=x.device)
        shifts = torch.empty_like(scales) if self._has_offsets else scales
        padded_group = padded_size(self._group)
        all_groups = padded_size(self._num_groups)
        groups = all_groups if self._has_one_input_scale else min(all_groups, max(1, _ROWS_AT_A_TIME // padded_group))
        _round_rows[(num_rows, triton.cdiv(self._num_groups, groups))](
            x, x if self._order is None else self._order, values, scales, shifts,
            num_rows, self.in_features, self._num_groups, LEAST_LARGEST,
            GROUP=self._group, HAS_ORDER=self._order is not None, HAS_ONE_SCALE=self._has_one_input_scale,
            HAS_SHIFTS=self._has_offsets, GROUPS=groups, COLUMNS=padded_group,
            num_warps=min(16, max(1, groups * padded_group // 512)), enable_fp_fusion=False,
        )  # fmt: skip
        return values, scales, shifts

    def _block_outputs(self, row_blocks: int, width: int) -> int:
        """Returns the largest block of outputs with which every processor of the device has a program."""
        for size in _BLOCK_OUTPUTS[self._gated :]:  # a gate doubles the sums, and the registers would not hold them
            if row_blocks * triton.cdiv(width, size) >= self._num_processors:
                return size
        return _BLOCK_OUTPUTS[-1]


def _pack_nibbles(values: torch.Tensor) -> torch.Tensor:
    """Returns int8 [out_features, in_features // 2]: the even inputs are the low nibbles."""
    return (values[:, ::2] & 15) | (values[:, 1::2] << 4)


@triton.jit
def _round_half_even(x):
    """Rounds |x| < 2^22 to whole numbers by adding and subtracting 1.5 * 2^23, where floats have no fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _round_rows(
    x, order, values, scales, shifts, num_rows, in_features, num_groups, least_largest,
    GROUP: tl.constexpr, HAS_ORDER: tl.constexpr, HAS_ONE_SCALE: tl.constexpr, HAS_SHIFTS: tl.constexpr,
    GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rounds some groups of one row; with `HAS_ONE_SCALE` all of them, by the largest magnitude of the row. A group
    with a value that is not finite gets the scale NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    inside = tl.arange(0, COLUMNS)
    column = group[:, None] * GROUP + inside[None, :]
    mask = (inside[None, :] < GROUP) & (column < in_features)
    source = column
    if HAS_ORDER:
        source = tl.load(order + column, mask=mask, other=0)
    row_values = tl.load(x + row * in_features + source, mask=mask, other=0.0).to(tl.float32)
    is_strange = (row_values - row_values) != 0.0
    largest = tl.max(tl.where(is_strange, 0.0, tl.abs(row_values)), axis=1)
    num_strange = tl.sum(is_strange.to(tl.int32), axis=1)
    if HAS_ONE_SCALE:
        largest = tl.zeros_like(largest) + tl.max(largest, axis=0)
        num_strange = tl.zeros_like(num_strange) + tl.sum(num_strange, axis=0)
    is_rounded = (num_strange == 0) & (largest >= least_largest)
    divisor = tl.where(is_rounded, largest, 1.0)
    inverse = tl.div_rn(tl.full((GROUPS,), 127.0, tl.float32), divisor)
    kept = tl.where(is_rounded[:, None] & mask, row_values, 0.0)
    rounded = _round_half_even(kept * inverse[:, None]).to(tl.int8)
    tl.store(values + row * in_features + column, rounded, mask=mask)
    scale = tl.where(is_rounded, tl.div_rn(divisor, tl.full((GROUPS,), 127.0, tl.float32)), 0.0)
    scale = tl.where(num_strange == 0, scale, float("nan"))
    there = group < num_groups
    tl.store(scales + group * num_rows + row, scale, mask=there)
    if HAS_SHIFTS:
        total = tl.sum(rounded.to(tl.int32), axis=1).to(tl.float32)
        tl.store(shifts + group * num_rows + row, scale * total, mask=there)


@triton.jit
def _multiply(
    values, scales, shifts, weights, weight_scales, offsets, bias, y,
    num_rows, width, out_features, in_features, num_groups,
    GROUP: tl.constexpr, IS_EVEN: tl.constexpr, IS_PACKED: tl.constexpr, HAS_ONE_SCALE: tl.constexpr,
    HAS_OFFSETS: tl.constexpr, HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Computes the outputs `OUTPUTS` of `ROWS` rows, and with `IS_GATED` the gates and what they let through."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    result = _sum_groups(
        values, scales, shifts, weights, weight_scales, offsets, bias, row, column, column < width,
        num_rows, out_features, in_features, num_groups,
        GROUP, IS_EVEN, IS_PACKED, HAS_ONE_SCALE, HAS_OFFSETS, HAS_BIAS, ROWS, OUTPUTS, TILE,
    )  # fmt: skip
    if IS_GATED:
        let_through = _sum_groups(
            values, scales, shifts, weights, weight_scales, offsets, bias, row, column + width, column < width,
            num_rows, out_features, in_features, num_groups,
            GROUP, IS_EVEN, IS_PACKED, HAS_ONE_SCALE, HAS_OFFSETS, HAS_BIAS, ROWS, OUTPUTS, TILE,
        )  # fmt: skip
        result = _times_sigmoid(result) * let_through
    mask = (row < num_rows)[:, None] & (column < width)[None, :]
    place = y + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(place, result.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _sum_groups(
    values, scales, shifts, weights, weight_scales, offsets, bias, row, column, is_output,
    num_rows, out_features, in_features, num_groups,
    GROUP: tl.constexpr, IS_EVEN: tl.constexpr, IS_PACKED: tl.constexpr, HAS_ONE_SCALE: tl.constexpr,
    HAS_OFFSETS: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Returns the products [ROWS, OUTPUTS] of some rows and outputs in float32, the bias added."""
    is_row = row < num_rows
    row_place = values + row.to(tl.int64)[:, None] * in_features
    weight_place = weights + column.to(tl.int64)[:, None] * (in_features // 2 if IS_PACKED else in_features)
    sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for group in range(num_groups):
        first = group * GROUP
        end = tl.minimum(first + GROUP, in_features)
        products = tl.zeros((ROWS, OUTPUTS), tl.int32)
        if GROUP <= TILE:  # then this loop has no other inside, and Triton loads the next group ahead
            inputs, columns = _load_tile(
                row_place, weight_place, is_row, is_output, first, end, IS_EVEN, IS_PACKED, OUTPUTS, TILE
            )
            products = tl.dot(inputs, tl.trans(columns), products, out_dtype=tl.int32)
        else:
            for start in range(0, GROUP, TILE):
                inputs, columns = _load_tile(
                    row_place, weight_place, is_row, is_output, first + start, end, IS_EVEN, IS_PACKED, OUTPUTS, TILE
                )
                products = tl.dot(inputs, tl.trans(columns), products, out_dtype=tl.int32)
        of_weight = 0 if HAS_ONE_SCALE else group
        place = of_weight * out_features + column
        weight_scale = tl.load(weight_scales + place, mask=is_output, other=0.0).to(tl.float32)
        scale = tl.load(scales + group * num_rows + row, mask=is_row, other=0.0)
        sums += products.to(tl.float32) * weight_scale[None, :] * scale[:, None]
        if HAS_OFFSETS:
            offset = tl.load(offsets + place, mask=is_output, other=0.0).to(tl.float32)
            shift = tl.load(shifts + group * num_rows + row, mask=is_row, other=0.0)
            sums += offset[None, :] * shift[:, None]
    if HAS_BIAS:
        sums += tl.load(bias + column, mask=is_output, other=0.0).to(tl.float32)[None, :]
    return sums


@triton.jit
def _load_tile(
    row_place, weight_place, is_row, is_output, first, end,
    IS_EVEN: tl.constexpr, IS_PACKED: tl.constexpr, OUTPUTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Returns inputs `first` to `first + TILE` of rows and of weights, int8 with zeros from input `end` on."""
    k = tl.arange(0, TILE)
    row_mask, weight_mask = is_row[:, None], is_output[:, None]
    if not IS_EVEN:
        row_mask = row_mask & (first + k < end)[None, :]
    inputs = tl.load(row_place + first + k[None, :], mask=row_mask, other=0)
    if IS_PACKED:
        byte = tl.arange(0, TILE // 2)
        if not IS_EVEN:
            weight_mask = weight_mask & (first + 2 * byte < end)[None, :]
        pairs = tl.load(weight_place + first // 2 + byte[None, :], mask=weight_mask, other=0)
        columns = tl.reshape(tl.join((pairs << 4) >> 4, pairs >> 4), (OUTPUTS, TILE))
    else:
        if not IS_EVEN:
            weight_mask = weight_mask & (first + k < end)[None, :]
        columns = tl.load(weight_place + first + k[None, :], mask=weight_mask, other=0)
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
    whole = _round_half_even(exponent)
    fraction = exponent - whole
    result = fraction * _EXP2_FIRST + _EXP2_1
    result = result * fraction + _EXP2_2
    result = result * fraction + _EXP2_3
    result = result * fraction + _EXP2_4
    result = result * fraction + _EXP2_5
    power = ((whole.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.div_rn(x, 1.0 + result * power)
