"""Unpacks GGUF's types of one to three bits a weight: numbers that are points of a grid, and ternary numbers.

A point is of 4 or 8 numbers, and the types differ in how they store its place in the grid, the signs and the scales.
The grids are tables of the package `gguf`. Each function takes blocks of 256 inputs, uint8 [out, blocks, bytes], and
returns the numbers, int8 [out, blocks, 256], and the scales, float32 [out, blocks, groups of a block]. Layouts:
https://github.com/ggml-org/llama.cpp, `ggml/src/ggml-common.h` and `gguf-py`.
"""

from __future__ import annotations

import functools

import torch

from manta.workers.checkpoints.formats.block_bits import half, middle, parts_of_bytes, shifted

Unpacked = tuple[torch.Tensor, torch.Tensor]
_OF_TWO_BITS, _OF_THREE_BITS, _ODD = (8, 25, 43), (4, 12, 20, 28, 36, 44, 52, 62), (1, 3, 5, 7, 9, 11, 13, 15)
"""The numbers of the points of IQ2, of IQ3_XXS and of IQ3_S, without their signs."""
_EIGHTHS = (1, 7, 9)
"""Eight times the numbers of IQ1, without their signs: -1, 0 and 1, each an eighth more or less."""


def _codebook(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Returns 16 numbers: these with both signs, the last one repeatedly."""
    both = (*(-number for number in reversed(numbers)), *numbers)
    return both + both[-1:] * (16 - len(both))


IQ1_CODEBOOK, IQ2_CODEBOOK = _codebook(_EIGHTHS), _codebook(_OF_TWO_BITS)
IQ3_XXS_CODEBOOK, IQ3_S_CODEBOOK = _codebook(_OF_THREE_BITS), _codebook(_ODD)


@functools.cache
def _grid(name: str) -> torch.Tensor:
    """Returns the points of a type's grid, int8 [points, numbers of a point]."""
    from gguf import quants

    own = getattr(quants, name)
    own.init_grid()
    return torch.from_numpy(own.grid[0, 0]).to(torch.int8)


def _points(name: str, places: torch.Tensor) -> torch.Tensor:
    """Returns the points at these places of a grid, int8 [..., numbers of a point]."""
    return _grid(name).to(places.device)[places.int()]


def _number(packed: torch.Tensor) -> torch.Tensor:
    """Returns the number that the last dimension's bytes are, the lowest ones first: int64 [...]."""
    return torch.stack([packed[..., place].long() << 8 * place for place in range(packed.shape[-1])]).sum(0)


def _fields(words: torch.Tensor, width: int) -> torch.Tensor:
    """Returns the four lowest numbers of `width` bits in each word, int64 [..., 4]."""
    shifts = torch.arange(0, 4 * width, width, device=words.device)
    return (words[..., None] >> shifts) & ((1 << width) - 1)


def _signs(bits: torch.Tensor) -> torch.Tensor:
    """Returns 1 for each bit that is 0, and else -1: int8 [...]."""
    return 1 - 2 * bits.to(torch.int8)


@functools.cache
def _sign_sets() -> torch.Tensor:
    """Returns the eight signs that each number of seven bits stands for, int8 [128, 8]. The eighth makes their product
    1.
    """
    bits = (torch.arange(128)[:, None] >> torch.arange(7)) & 1
    return _signs(torch.cat((bits, bits.sum(-1, keepdim=True) & 1), dim=-1))


def _even_signs(numbers: torch.Tensor) -> torch.Tensor:
    """Returns the signs of each number, int8 [..., 8]."""
    return _sign_sets().to(numbers.device)[numbers.int()]


def iq2_xxs(blocks: torch.Tensor) -> Unpacked:
    """A group of 32 inputs has four places in four bytes. The next four have four sets of signs and a scale."""
    groups = blocks[..., 2:66].unflatten(-1, (8, 8))
    words = _number(groups[..., 4:])
    values = _points("IQ2_XXS", groups[..., :4]) * _even_signs(_fields(words, 7))
    return values.flatten(-3), half(blocks, 0) * (0.5 + (words >> 28)) / 4


def iq2_xs(blocks: torch.Tensor) -> Unpacked:
    """A point has two bytes, with nine bits of its place and seven of its signs. Groups have 16 inputs."""
    words = _number(blocks[..., 2:66].unflatten(-1, (32, 2)))
    values = _points("IQ2_XS", words & 511) * _even_signs(words >> 9)
    return values.flatten(-2), half(blocks, 0) * (0.5 + parts_of_bytes(blocks[..., 66:74], 4)) / 4


def iq2_s(blocks: torch.Tensor) -> Unpacked:
    """Two more bits of each place are apart, and signs have a bit each. Groups have 16 inputs."""
    places = blocks[..., 2:34].int() | parts_of_bytes(blocks[..., 66:74], 2).int() << 8
    values = _points("IQ2_S", places).flatten(-2) * _signs(parts_of_bytes(blocks[..., 34:66], 1))
    return values, half(blocks, 0) * (0.5 + parts_of_bytes(blocks[..., 74:82], 4)) / 4


def iq3_xxs(blocks: torch.Tensor) -> Unpacked:
    """A group of 32 inputs has eight places, and apart from them four bytes with four sets of signs and a scale."""
    words = _number(blocks[..., 66:98].unflatten(-1, (8, 4)))
    values = _points("IQ3_XXS", blocks[..., 2:66]).flatten(-2) * _even_signs(_fields(words, 7)).flatten(-3)
    return values, half(blocks, 0) * (0.5 + (words >> 28)) / 2


def iq3_s(blocks: torch.Tensor) -> Unpacked:
    """One more bit of each place is apart, and signs have a bit each. Groups have 32 inputs."""
    places = blocks[..., 2:66].int() | parts_of_bytes(blocks[..., 66:74], 1).int() << 8
    values = _points("IQ3_S", places).flatten(-2) * _signs(parts_of_bytes(blocks[..., 74:106], 1))
    return values, half(blocks, 0) * (1 + 2 * parts_of_bytes(blocks[..., 106:110], 4))


def iq1_s(blocks: torch.Tensor) -> Unpacked:
    """A group of 32 inputs has two bytes: three more bits of four places, a scale, and which way an eighth goes."""
    words = _number(blocks[..., 34:50].unflatten(-1, (8, 2)))
    places = blocks[..., 2:34].int() | _fields(words, 3).flatten(-2).int() << 8
    values = 8 * _points("IQ1_S", places).unflatten(-2, (8, 4)) + _signs(words >> 15)[..., None, None]
    return values.flatten(-3), half(blocks, 0) * (2 * ((words >> 12) & 7) + 1) / 8


def iq1_m(blocks: torch.Tensor) -> Unpacked:
    """A point has half a byte: three more bits of its place, and which way an eighth goes. Groups have 16 inputs. Of
    the four words with their scales the highest four bits are the block's factor together.
    """
    words, upper = _number(blocks[..., 48:56].unflatten(-1, (4, 2))), parts_of_bytes(blocks[..., 32:48], 4)
    places = blocks[..., :32].int() | (upper & 7).int() << 8
    values = 8 * _points("IQ1_S", places) + _signs(upper >> 3)[..., None]
    bits = ((words >> 12) << torch.arange(0, 16, 4, device=words.device)).sum(-1, keepdim=True)
    factors = bits.to(torch.int16).view(torch.float16).float()
    return values.flatten(-2), factors * (2 * _fields(words, 3).flatten(-2) + 1) / 8


def tq1_0(blocks: torch.Tensor) -> Unpacked:
    """A byte has five ternary digits, or four: its third has the first one in the bits above eight."""
    first, second, last = blocks[..., :32], blocks[..., 32:48], blocks[..., 48:52]
    powers = torch.tensor((1, 3, 9, 27, 81), dtype=torch.uint8, device=blocks.device)[:, None]
    digits = [
        (packed[..., None, :] * powers[:count]).flatten(-2) for packed, count in ((first, 5), (second, 5), (last, 4))
    ]
    return middle((torch.cat(digits, dim=-1).int() * 3) >> 8, 1), half(blocks, 52)


def tq2_0(blocks: torch.Tensor) -> Unpacked:
    """A byte has four ternary digits of two bits, 32 inputs apart."""
    digits = shifted(blocks[..., :64].unflatten(-1, (2, 32)), 0, 2, 4, 6) & 3
    return middle(digits.flatten(-3), 1), half(blocks, 64)
