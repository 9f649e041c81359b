"""Products of rounded rows and quantised weights inside a kernel: integers or E4M3, summed group by group.

`quantized_linear.py` and `expert_products.py` call these functions from their kernels. Sums within a group are integers
and exact, and groups are added in order, so results depend neither on the sizes of blocks nor on the other rows.

Weights of 4 bits lie in tiles, [num_tiles, out_features, TILE] bytes (`pack_tiles`): the low nibbles of a tile are
`TILE` inputs, the high nibbles the next ones. A program reads the tile of its outputs as one piece of memory, and needs
no shuffle to unpack it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from manta.workers.kernels.quantized_reference import EXP2, EXP2_FIRST, LOG2_E
from manta.workers.kernels.triton.launch import INTERPRETED, padded_size
from manta.workers.kernels.triton.rounded_rows import round_half_even

_INTERPRETED = tl.constexpr(INTERPRETED)
"""Whether nibbles are unpacked by Triton's operations, because its interpreter has no instructions of a GPU."""
_LEAST_DOT = 32
"""The least number of inputs in a product of matrices of bytes on tensor cores."""
_MOST_TILE = 128
"""The most inputs of a group that a program reads at a time."""


def tile_of(group: int) -> int:
    """Returns the inputs of a group that a program reads at a time."""
    return min(_MOST_TILE, max(_LEAST_DOT, padded_size(group)))


def most_outputs(block_rows: int, is_gated: bool) -> int:
    """Returns the most outputs of a program, whose registers hold the sums of a block of rows."""
    columns = 64 if block_rows > 64 else 128
    return columns // 2 if is_gated else columns


def pack_tiles(codes: torch.Tensor, group: int) -> torch.Tensor:
    """Returns int8 [num_tiles, out_features, tile_of(group)] for 4-bit codes, int8 [out_features, in_features]. A tile
    has two groups, the second one in the high nibbles, or two pieces of a longer group. What is missing is zero.
    """
    out_features, in_features = codes.shape
    tile = tile_of(group)
    num_groups = -(-in_features // group)
    padded_group = tile if group <= tile else -(-group // (2 * tile)) * 2 * tile
    grouped = F.pad(codes, (0, num_groups * group - in_features)).view(out_features, num_groups, group)
    padded = F.pad(grouped, (0, padded_group - group)).view(out_features, -1, tile)
    pairs = F.pad(padded, (0, 0, 0, padded.shape[1] % 2)).view(out_features, -1, 2, tile)
    packed = (pairs[:, :, 0] & 15) | (pairs[:, :, 1] << 4)
    return packed.transpose(0, 1).contiguous()


def codebook_number(codebook: tuple[int, ...] | None) -> int:
    """Returns the 16 signed bytes of a codebook as one number, the first in the lowest bits; 0 for None."""
    return sum((number & 0xFF) << (8 * code) for code, number in enumerate(codebook or ()))


def codes_of(values: torch.Tensor, codebook: tuple[int, ...]) -> torch.Tensor:
    """Returns the place of each of the values, int8, in the codebook."""
    places = torch.zeros(256, dtype=torch.int8)
    for code, number in reversed(list(enumerate(codebook))):
        places[number + 128] = code
    return places.to(values.device)[values.int() + 128]


@triton.jit
def sum_groups(
    values, scales, shifts, weights, weight_scales, offsets, bias, row, column, is_row, is_output,
    padded_rows, out_features, scale_stride, in_features, num_groups,
    GROUP: tl.constexpr, IS_EVEN: tl.constexpr, IS_PACKED: tl.constexpr, CODEBOOK: tl.constexpr,
    HAS_ONE_SCALE: tl.constexpr, SCALE_ROWS: tl.constexpr, HAS_OFFSETS: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Returns the products [ROWS, OUTPUTS] of some rows and outputs in float32, the bias added.

    `row` is int64 [ROWS], and `column` int64 [OUTPUTS]. The groups of weights of 4 bits that IS_PACKED lie in tiles.
    """
    row_place = values + row[:, None] * in_features
    PRODUCT: tl.constexpr = tl.float32 if weights.dtype.element_ty == tl.float8e4nv else tl.int32
    SCALED: tl.constexpr = 0.0625 if IS_PACKED and CODEBOOK == 0 else 1.0  # nibbles are 16 times as large
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    # Scales of few rows are loaded a tile ahead, as Triton does with what products take; for many registers are scarce
    AHEAD: tl.constexpr = ROWS <= 32
    weight_scale, scale, offset, shift = _load_scales(
        scales, shifts, weight_scales, offsets, row, column, is_row, is_output, padded_rows, scale_stride,
        0, num_groups, SCALED, HAS_ONE_SCALE, SCALE_ROWS, HAS_OFFSETS,
    )  # fmt: skip
    if IS_PACKED and GROUP <= TILE:  # two groups in a tile, and no loop inside
        second_weight_scale, second_scale, second_offset, second_shift = weight_scale, scale, offset, shift
        if AHEAD:
            second_weight_scale, second_scale, second_offset, second_shift = _load_scales(
                scales, shifts, weight_scales, offsets, row, column, is_row, is_output, padded_rows, scale_stride,
                1, num_groups, SCALED, HAS_ONE_SCALE, SCALE_ROWS, HAS_OFFSETS,
            )  # fmt: skip
        weight_place = weights + column[:, None] * TILE + tl.arange(0, TILE)[None, :]
        for tile in range((num_groups + 1) // 2):
            pairs = tl.load(weight_place, mask=is_output[:, None], other=0)
            weight_place += out_features * TILE
            inputs = _load_inputs(row_place, is_row, 2 * tile, 0, GROUP, in_features, IS_EVEN, TILE)
            second_inputs = _load_inputs(row_place, is_row, 2 * tile + 1, 0, GROUP, in_features, False, TILE)
            first = 2 * tile + 2 if AHEAD else 2 * tile
            next_weight_scale, next_scale, next_offset, next_shift = _load_scales(
                scales, shifts, weight_scales, offsets, row, column, is_row, is_output, padded_rows, scale_stride,
                first, num_groups, SCALED, HAS_ONE_SCALE, SCALE_ROWS, HAS_OFFSETS,
            )  # fmt: skip
            if not AHEAD:
                weight_scale, scale, offset, shift = next_weight_scale, next_scale, next_offset, next_shift
            low, high = unpack(pairs, CODEBOOK)
            products = _dot_tile(low, inputs, tl.zeros((OUTPUTS, ROWS), PRODUCT), TILE)
            sums = _add_group(sums, products, weight_scale, scale, offset, shift, HAS_OFFSETS)
            last_weight_scale, last_scale, last_offset, last_shift = _load_scales(
                scales, shifts, weight_scales, offsets, row, column, is_row, is_output, padded_rows, scale_stride,
                first + 1, num_groups, SCALED, HAS_ONE_SCALE, SCALE_ROWS, HAS_OFFSETS,
            )  # fmt: skip
            if not AHEAD:
                second_weight_scale, second_scale = last_weight_scale, last_scale
                second_offset, second_shift = last_offset, last_shift
            products = _dot_tile(high, second_inputs, tl.zeros((OUTPUTS, ROWS), PRODUCT), TILE)
            sums = _add_group(
                sums, products, second_weight_scale, second_scale, second_offset, second_shift, HAS_OFFSETS
            )
            if AHEAD:
                weight_scale, scale, offset, shift = next_weight_scale, next_scale, next_offset, next_shift
                second_weight_scale, second_scale = last_weight_scale, last_scale
                second_offset, second_shift = last_offset, last_shift
    else:
        if IS_PACKED:
            weight_place = weights + column[:, None] * TILE + tl.arange(0, TILE)[None, :]
        else:
            weight_place = weights + column[:, None] * in_features
        for group in range(num_groups):
            if AHEAD:
                next_weight_scale, next_scale, next_offset, next_shift = _load_scales(
                    scales, shifts, weight_scales, offsets, row, column, is_row, is_output, padded_rows, scale_stride,
                    group + 1, num_groups, SCALED, HAS_ONE_SCALE, SCALE_ROWS, HAS_OFFSETS,
                )  # fmt: skip
            products = tl.zeros((OUTPUTS, ROWS), PRODUCT)
            if IS_PACKED:
                for start in range(0, GROUP, 2 * TILE):
                    pairs = tl.load(weight_place, mask=is_output[:, None], other=0)
                    weight_place += out_features * TILE
                    low, high = unpack(pairs, CODEBOOK)
                    inputs = _load_inputs(row_place, is_row, group, start, GROUP, in_features, False, TILE)
                    products = _dot_tile(low, inputs, products, TILE)
                    inputs = _load_inputs(row_place, is_row, group, start + TILE, GROUP, in_features, False, TILE)
                    products = _dot_tile(high, inputs, products, TILE)
            elif GROUP <= TILE:  # then this loop has no other inside, and Triton loads the next group ahead
                inputs = _load_inputs(row_place, is_row, group, 0, GROUP, in_features, IS_EVEN, TILE)
                columns = _load_inputs(weight_place, is_output, group, 0, GROUP, in_features, IS_EVEN, TILE)
                products = _dot_tile(columns, inputs, products, TILE)
            else:
                for start in range(0, GROUP, TILE):
                    inputs = _load_inputs(row_place, is_row, group, start, GROUP, in_features, IS_EVEN, TILE)
                    columns = _load_inputs(weight_place, is_output, group, start, GROUP, in_features, IS_EVEN, TILE)
                    products = _dot_tile(columns, inputs, products, TILE)
            if not AHEAD:
                weight_scale, scale, offset, shift = _load_scales(
                    scales, shifts, weight_scales, offsets, row, column, is_row, is_output, padded_rows, scale_stride,
                    group, num_groups, SCALED, HAS_ONE_SCALE, SCALE_ROWS, HAS_OFFSETS,
                )  # fmt: skip
            sums = _add_group(sums, products, weight_scale, scale, offset, shift, HAS_OFFSETS)
            if AHEAD:
                weight_scale, scale, offset, shift = next_weight_scale, next_scale, next_offset, next_shift
    if HAS_BIAS:
        sums += tl.load(bias + column, mask=is_output, other=0.0).to(tl.float32)[:, None]
    return tl.trans(sums)


@triton.jit
def _load_inputs(
    place, mask, group, start, GROUP: tl.constexpr, in_features, IS_EVEN: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Returns `TILE` inputs of a group from `start` on, of rows or of weights that are bytes; zeros after its end."""
    k = start + tl.arange(0, TILE)
    first = group * GROUP
    is_there = mask[:, None]
    if not IS_EVEN:
        is_there = is_there & ((k < GROUP) & (first + k < in_features))[None, :]
    return tl.load(place + first + k[None, :], mask=is_there, other=0.0)


@triton.jit
def unpack(pairs, CODEBOOK: tl.constexpr):
    """Returns the numbers of low and of high nibbles, int8: those of the codebook, else 16 times the signed nibble."""
    if not _INTERPRETED:  # four bytes at a time
        low, high = tl.inline_asm_elementwise(
            _assembly(CODEBOOK), "=r,=r,r", [pairs], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    elif CODEBOOK == 0:
        low, high = pairs << 4, pairs & -16
    else:
        low = _look_up(pairs.to(tl.int32) & 15, CODEBOOK)
        high = _look_up((pairs.to(tl.int32) >> 4) & 15, CODEBOOK)
    return low, high


_UNPACK = """{
.reg .b32 low;
shl.b32 low, $2, 4;
and.b32 $0, low, 0xF0F0F0F0;
and.b32 $1, $2, 0xF0F0F0F0;
}"""
_LOOK_UP = """
prmt.b32 first, %s, %s, places;
prmt.b32 second, %s, %s, places;
prmt.b32 mask, 0x80808080, 0x80808080, codes;
shl.b32 shifted, mask, 1;
lop3.b32 mask, mask, shifted, 0x7F7F7F7F, 0xE4;
lop3.b32 %s, first, second, mask, 0xD8;
"""
"""Looks four nibbles of `codes` up: those below 8 in the first half of the table, which `places` without the highest
bits index, the others in the second half. A nibble's highest bit makes a byte of the mask 0xFF or 0.
"""


@triton.constexpr_function
def _assembly(codebook):
    """Returns the instructions for four bytes of pairs ($2), whose low nibbles' numbers are $0, and high ones' $1."""
    if codebook == 0:
        return _UNPACK
    words = codebook & 0xFFFFFFFF, codebook >> 32 & 0xFFFFFFFF, codebook >> 64 & 0xFFFFFFFF, codebook >> 96
    return (
        "{ .reg .b32 codes, places, first, second, mask, shifted, one, two;"
        "mov.b32 codes, $2; and.b32 places, $2, 0x77777777;"
        + _LOOK_UP % (*words, "one")
        + "shr.u32 codes, codes, 16; shr.u32 places, places, 16;"
        + _LOOK_UP % (*words, "two")
        + "prmt.b32 $0, one, two, 0x6420; prmt.b32 $1, one, two, 0x7531; }"
    )


@triton.jit
def _look_up(code, CODEBOOK: tl.constexpr):
    """Returns the byte at each place of a codebook, by shifts of the four words that hold it."""
    word = tl.where(
        code < 8,
        tl.where(code < 4, _word(CODEBOOK, 0), _word(CODEBOOK, 1)),
        tl.where(code < 12, _word(CODEBOOK, 2), _word(CODEBOOK, 3)),
    )
    return (word >> ((code & 3) * 8)).to(tl.int8)


@triton.constexpr_function
def _word(codebook, index):
    """Returns 32 bits of a number as a signed number."""
    bits = (codebook >> (32 * index)) & 0xFFFFFFFF
    return bits - (1 << 32) if bits >> 31 else bits


@triton.jit
def _dot_tile(columns, inputs, products, TILE: tl.constexpr):
    """Adds the products of a tile of weights and of rows, [OUTPUTS, ROWS]. Weights come first, because tensor cores
    take the first factor from registers, where nibbles are unpacked, and no more than 8 columns of the second one, for
    few rows. They add E4M3 with less than float32's precision, so each tile's sum is added by itself.
    """
    return tl.dot(columns, tl.trans(inputs), products, max_num_imprecise_acc=TILE, out_dtype=products.dtype)


@triton.jit
def _load_scales(
    scales, shifts, weight_scales, offsets, row, column, is_row, is_output, padded_rows, scale_stride,
    group, num_groups, SCALED: tl.constexpr, HAS_ONE_SCALE: tl.constexpr, SCALE_ROWS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
):  # fmt: skip
    """Returns a group's scales of the weights, times SCALED, and of the rows; its offsets and the rows' shifts, without
    `HAS_OFFSETS` anything. Those of a group after the last one are zero.
    """
    is_row = is_row & (tl.zeros_like(row) + group < num_groups)
    is_output = is_output & (tl.zeros_like(column) + group < num_groups)
    place = (0 if HAS_ONE_SCALE else group) * scale_stride + column // SCALE_ROWS
    weight_scale = _scale_of(tl.load(weight_scales + place, mask=is_output, other=0))
    if SCALED != 1.0:
        weight_scale *= SCALED
    row_scale = tl.load(scales + group * padded_rows + row, mask=is_row, other=0.0)
    offset, shift = weight_scale, row_scale
    if HAS_OFFSETS:
        offset = tl.load(offsets + place, mask=is_output, other=0.0).to(tl.float32)
        shift = tl.load(shifts + group * padded_rows + row, mask=is_row, other=0.0)
    return weight_scale, row_scale, offset, shift


@triton.jit
def _add_group(sums, products, weight_scale, scale, offset, shift, HAS_OFFSETS: tl.constexpr):
    """Adds a group's products times both scales, and its offsets."""
    sums += products.to(tl.float32) * weight_scale[:, None] * scale[None, :]
    if HAS_OFFSETS:
        sums += offset[:, None] * shift[None, :]
    return sums


@triton.jit
def gated_columns(width, OUTPUTS: tl.constexpr):
    """Returns the columns of the gates and of what they let through in turn, int64 [2 * OUTPUTS], for the outputs of
    program_id(1); and which are there.
    """
    lane = tl.arange(0, 2 * OUTPUTS)
    output = (tl.program_id(1) * OUTPUTS + lane // 2).to(tl.int64)
    return output + (lane % 2) * width, output < width


@triton.jit
def split_gates(sums, ROWS: tl.constexpr, OUTPUTS: tl.constexpr):
    """Returns the gates and what they let through [ROWS, OUTPUTS] of sums of `gated_columns`."""
    return tl.split(tl.reshape(sums, (ROWS, OUTPUTS, 2)))


@triton.jit
def _scale_of(stored):
    """Returns scales in float32. Bytes are exponents: 2^(byte - 128), of which the least two are subnormal."""
    if stored.dtype == tl.uint8:
        exponent = stored.to(tl.int32)
        bits = tl.where(exponent < 2, 0x00200000 << exponent, (exponent - 1) << 23)
        scale = bits.to(tl.float32, bitcast=True)
    else:
        scale = stored.to(tl.float32)
    return scale


def as_exponents(scales: torch.Tensor) -> torch.Tensor | None:
    """Returns scales as the bytes that kernels take for exponents; None if one is no power of two of that range."""
    mantissas, exponents = torch.frexp(scales)
    is_power = (mantissas == 0.5) & (exponents >= -127) & (exponents <= 128)
    return (exponents + 127).to(torch.uint8) if bool(is_power.all()) else None


_LOG2_E = tl.constexpr(LOG2_E)
_EXP2_FIRST = tl.constexpr(EXP2_FIRST)
_EXP2_1, _EXP2_2, _EXP2_3, _EXP2_4, _EXP2_5 = map(tl.constexpr, EXP2)


@triton.jit
def times_sigmoid(x):
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
