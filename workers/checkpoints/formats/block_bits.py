"""The bits of GGUF's blocks: what the readers of all types of blocks share."""

from __future__ import annotations

import torch


def half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Returns the float16 at byte `start` of each block, float32 [out, blocks, 1]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Returns the low halves of all bytes, then the high halves: uint8 [..., 2 * bytes]."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def shifted(packed: torch.Tensor, *shifts: int) -> torch.Tensor:
    """Returns all bytes shifted right by each number, one after the other: uint8 [..., shifts, bytes]."""
    return packed[..., None, :] >> torch.tensor(shifts, dtype=torch.uint8, device=packed.device)[:, None]


def parts_of_bytes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns the numbers of so many bits in each byte, the lowest bits first: uint8 [..., 8 / bits * bytes]."""
    return (shifted(packed.unsqueeze(-1), *range(0, 8, bits)) & ((1 << bits) - 1)).flatten(-3)


def middle(numbers: torch.Tensor, zero_point: int) -> torch.Tensor:
    """Returns unsigned numbers less their zero point, int8 of the same shape."""
    return numbers.to(torch.int8) - zero_point
