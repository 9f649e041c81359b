"""Reads GGUF's types of quantised tensors: blocks of 32 or 256 inputs that hold their scales. `gguf_grids.py` has those
of few bits.

Layouts: https://github.com/ggml-org/llama.cpp, `ggml/src/ggml-common.h` and `gguf-py`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from manta.workers.checkpoints.formats import gguf_grids
from manta.workers.checkpoints.formats.block_bits import half, middle, nibbles, parts_of_bytes, shifted
from manta.workers.checkpoints.formats.compressed_tensors import FP4_CODEBOOK
from manta.workers.checkpoints.formats.head_orders import in_head_order, rows_of_transposed
from manta.workers.checkpoints.formats.stored_part import StoredPart
from manta.workers.kernels.quantized_weight import QuantizedWeight
from manta.workers.models.model_config import ModelError


class _Integers(NamedTuple):
    """The integers of some blocks."""

    values: torch.Tensor
    """int8 [out, blocks, inputs of a block]."""
    scales: torch.Tensor
    """float32 [out, blocks, groups of a block], like `offsets`."""
    offsets: torch.Tensor | None = None


class BlockType(NamedTuple):
    name: str
    inputs: int
    num_bytes: int
    bits: int
    unpack: Callable[[torch.Tensor], _Integers]
    codebook: tuple[int, ...] | None = None


def read_gguf(part: StoredPart) -> QuantizedWeight | torch.Tensor:
    """Reads a `weight` of a type in `BLOCK_TYPES`. One whose heads are transposed becomes a plain weight, because its
    blocks lie across the inputs.
    """
    name = f"{part.name}.weight"
    kind, form = BLOCK_TYPES[part.tensors.kind_of(name)], part.tensors.form_of(name)
    stored = part.tensors.blocks(name, (part.out_features, part.in_features))
    num_inputs = part.out_features // form.transposed_heads if form.transposed_heads else part.in_features
    if stored.shape[1] * kind.inputs != num_inputs * kind.num_bytes:
        raise ModelError(f"{name} has {stored.shape[1]} bytes a row, which are not {num_inputs} inputs in {kind.name}")
    weight = unpacked(kind, stored)
    if part.has("scale"):
        weight = _scaled(weight, part.stored("scale", part.tensors.shape_of(f"{part.name}.scale"), torch.float32))
    part.skip("input_scale")  # of activations in NVFP4, which are not rounded to it here
    if form.transposed_heads:
        shape = part.out_features, part.in_features
        return rows_of_transposed(weight.dequantized(part.dtype), form.transposed_heads, shape)
    return _with_input_heads(weight, form.head_order) if form.orders_inputs else weight


def _scaled(weight: QuantizedWeight, factor: torch.Tensor) -> QuantizedWeight:
    """Returns the weight times a tensor of one number."""
    offsets = None if weight.offsets is None else weight.offsets * factor
    return dataclasses.replace(weight, scales=weight.scales * factor, offsets=offsets)


def unpacked(kind: BlockType, rows: torch.Tensor) -> QuantizedWeight:
    """Returns the weight of rows of blocks, uint8 [out_features, bytes of a row]."""
    values, scales, offsets = kind.unpack(rows.view(len(rows), -1, kind.num_bytes))
    return QuantizedWeight(
        values.flatten(1),
        scales.flatten(1),
        kind.bits,
        None if offsets is None else offsets.flatten(1),
        codebook=kind.codebook,
    )


def _with_input_heads(weight: QuantizedWeight, head_order: tuple[int, ...]) -> QuantizedWeight:
    """Returns the weight with its inputs, which are heads, in the order of the tensor."""
    width = weight.values.shape[1] // len(head_order)
    fine = weight.in_groups_of(math.gcd(weight.group_size, width))
    inputs, groups = (in_head_order(head_order, each.shape[1]).to(each.device) for each in (fine.values, fine.scales))
    return dataclasses.replace(
        fine,
        values=fine.values[:, inputs],
        scales=fine.scales[:, groups],
        offsets=None if fine.offsets is None else fine.offsets[:, groups],
    )


def _codes(packed: torch.Tensor, codebook: tuple[int, ...]) -> torch.Tensor:
    """Returns the numbers that the halves of bytes stand for, in the order of `nibbles`."""
    return torch.tensor(codebook, dtype=torch.int8, device=packed.device)[nibbles(packed).int()]


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """Returns the 32 bits of four bytes, each as the fifth bit of a number: uint8 [..., 32]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts) & 1).flatten(-2) << 4


def _q8_0(blocks: torch.Tensor) -> _Integers:
    return _Integers(blocks[..., 2:].view(torch.int8), half(blocks, 0))


def _q4_0(blocks: torch.Tensor) -> _Integers:
    return _Integers(middle(nibbles(blocks[..., 2:]), 8), half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> _Integers:
    scales = half(blocks, 0)
    return _Integers(middle(nibbles(blocks[..., 4:]), 8), scales, half(blocks, 2) + 8 * scales)


def _q5_0(blocks: torch.Tensor) -> _Integers:
    numbers = nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return _Integers(middle(numbers, 16), half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> _Integers:
    numbers = nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return _Integers(middle(numbers, 0), half(blocks, 0), half(blocks, 2))


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scales and offsets of the eight groups of a Q4_K or Q5_K block, float32 [out, blocks, 8] each. Twelve
    bytes after the block's two factors hold them as 6-bit numbers.
    """
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, (third & 15) | (first >> 6 << 4)), dim=-1)
    minima = torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), dim=-1)
    return half(blocks, 0) * scales, -half(blocks, 2) * minima


def _k_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Returns the 256 numbers in 128 bytes. Each 32 bytes hold 32 numbers in their low halves and the next 32 in the
    high ones.
    """
    return nibbles(packed.unflatten(-1, (4, 32))).flatten(-2)


def _q4_k(blocks: torch.Tensor) -> _Integers:
    scales, minima = _k_scales(blocks)
    return _Integers(middle(_k_nibbles(blocks[..., 16:]), 8), scales, minima + 8 * scales)


def _q5_k(blocks: torch.Tensor) -> _Integers:
    """Unpacks a block in which bit i of each of 32 bytes is the fifth bit of a number in group i."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    fifth = ((blocks[..., None, 16:48] >> shifts) & 1).flatten(-2) << 4
    return _Integers(middle(_k_nibbles(blocks[..., 48:]) | fifth, 0), *_k_scales(blocks))


def _q6_k(blocks: torch.Tensor) -> _Integers:
    """Unpacks a block of two halves, each four rows of 32 numbers: four bits of them are in 64 bytes and two in 32."""
    low, high = blocks[..., :128].unflatten(-1, (2, 64)), blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    upper = ((high >> shifts) & 3).flatten(-2) << 4
    scales = half(blocks, 208) * blocks[..., 192:208].view(torch.int8)
    return _Integers(middle((nibbles(low) | upper).flatten(-2), 32), scales)


def _q2_k(blocks: torch.Tensor) -> _Integers:
    """Unpacks a block of two halves, each four rows of 32 numbers whose bits are in 32 bytes. A group is 16 numbers,
    and a byte has the factors of its scale and its minimum.
    """
    numbers = shifted(blocks[..., 16:80].unflatten(-1, (2, 32)), 0, 2, 4, 6) & 3
    scales, minima = blocks[..., :16] & 15, blocks[..., :16] >> 4
    return _Integers(middle(numbers.flatten(-3), 0), half(blocks, 80) * scales, -half(blocks, 82) * minima)


def _q3_k(blocks: torch.Tensor) -> _Integers:
    """Unpacks a block whose numbers have two bits as in Q2_K. Where a third bit, in the first 32 bytes, is missing,
    they are 4 less. The 16 scales have 6 bits, four in the first 8 of 12 bytes and two in the last 4.
    """
    upper = shifted(blocks[..., :32], 0, 1, 2, 3, 4, 5, 6, 7) & 1
    lower = shifted(blocks[..., 32:96].unflatten(-1, (2, 32)), 0, 2, 4, 6) & 3
    low, high = shifted(blocks[..., 96:104], 0, 4) & 15, shifted(blocks[..., 104:108], 0, 2, 4, 6) & 3
    scales = half(blocks, 108) * middle(low.flatten(-2) | high.flatten(-2) << 4, 32)
    return _Integers(middle(lower.flatten(-3) | upper.flatten(-2) << 2, 4), scales)


def _iq4_nl(blocks: torch.Tensor) -> _Integers:
    return _Integers(_codes(blocks[..., 2:], IQ4_CODEBOOK), half(blocks, 0))


def _iq4_xs(blocks: torch.Tensor) -> _Integers:
    """Unpacks a block whose eight scales have 6 bits: two in two bytes after the factor, four in the next four."""
    low, high = parts_of_bytes(blocks[..., 4:8], 4), parts_of_bytes(blocks[..., 2:4], 2)
    scales = half(blocks, 0) * middle(low | high << 4, 32)
    return _Integers(_codes(blocks[..., 8:].unflatten(-1, (8, 16)), IQ4_CODEBOOK).flatten(-2), scales)


def _mxfp4(blocks: torch.Tensor) -> _Integers:
    return _Integers(_codes(blocks[..., 1:], FP4_CODEBOOK), torch.exp2(blocks[..., :1].float() - 128))


def _nvfp4(blocks: torch.Tensor) -> _Integers:
    """Unpacks a block of four groups of 16 numbers, whose scales are the first four bytes."""
    scales = _unsigned_e4m3().to(blocks.device)[blocks[..., :4].int()]
    return _Integers(_codes(blocks[..., 4:].unflatten(-1, (4, 8)), FP4_CODEBOOK).flatten(-2), scales)


@functools.cache
def _unsigned_e4m3() -> torch.Tensor:
    """Returns half of each E4M3 number without its sign, float32 [256]: codes are twice their numbers. What would be no
    number is 0, as in llama.cpp.
    """
    numbers = torch.arange(256, dtype=torch.uint8).bitwise_and(127).view(torch.float8_e4m3fn)
    return numbers.float().nan_to_num(0.0) / 2


def _of_grid(unpack: Callable[[torch.Tensor], gguf_grids.Unpacked]) -> Callable[[torch.Tensor], _Integers]:
    return lambda blocks: _Integers(*unpack(blocks))


IQ4_CODEBOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The numbers of IQ4_NL and IQ4_XS (`kvalues_iq4nl`)."""
_SERVED = (
    BlockType("Q8_0", 32, 34, 8, _q8_0),
    BlockType("Q4_0", 32, 18, 4, _q4_0),
    BlockType("Q4_1", 32, 20, 4, _q4_1),
    BlockType("Q5_0", 32, 22, 8, _q5_0),
    BlockType("Q5_1", 32, 24, 8, _q5_1),
    BlockType("Q2_K", 256, 84, 4, _q2_k),
    BlockType("Q3_K", 256, 110, 4, _q3_k),
    BlockType("Q4_K", 256, 144, 4, _q4_k),
    BlockType("Q5_K", 256, 176, 8, _q5_k),
    BlockType("Q6_K", 256, 210, 8, _q6_k),
    BlockType("IQ4_NL", 32, 18, 8, _iq4_nl, IQ4_CODEBOOK),
    BlockType("IQ4_XS", 256, 136, 8, _iq4_xs, IQ4_CODEBOOK),
    BlockType("MXFP4", 32, 17, 8, _mxfp4, FP4_CODEBOOK),
    BlockType("NVFP4", 64, 36, 8, _nvfp4, FP4_CODEBOOK),
    BlockType("IQ1_S", 256, 50, 8, _of_grid(gguf_grids.iq1_s), gguf_grids.IQ1_CODEBOOK),
    BlockType("IQ1_M", 256, 56, 8, _of_grid(gguf_grids.iq1_m), gguf_grids.IQ1_CODEBOOK),
    BlockType("IQ2_XXS", 256, 66, 8, _of_grid(gguf_grids.iq2_xxs), gguf_grids.IQ2_CODEBOOK),
    BlockType("IQ2_XS", 256, 74, 8, _of_grid(gguf_grids.iq2_xs), gguf_grids.IQ2_CODEBOOK),
    BlockType("IQ2_S", 256, 82, 8, _of_grid(gguf_grids.iq2_s), gguf_grids.IQ2_CODEBOOK),
    BlockType("IQ3_XXS", 256, 98, 8, _of_grid(gguf_grids.iq3_xxs), gguf_grids.IQ3_XXS_CODEBOOK),
    BlockType("IQ3_S", 256, 110, 8, _of_grid(gguf_grids.iq3_s), gguf_grids.IQ3_S_CODEBOOK),
    BlockType("TQ1_0", 256, 54, 4, _of_grid(gguf_grids.tq1_0)),
    BlockType("TQ2_0", 256, 66, 4, _of_grid(gguf_grids.tq2_0)),
)
BLOCK_TYPES = {kind.name: kind for kind in _SERVED}
"""The supported types, by ggml's names."""
