"""Rounds the keys and values of a KV cache to four bits, in plain torch. `native/nibbles.h` computes the same.

A head's numbers are rotated first (QuaRot, Ashkboos et al., 2024). They are then spread like those of a normal
distribution, whatever outliers they had, and the best sixteen levels for that distribution with one scale a head leave
little error (TurboQuant, Zandieh et al., 2025). Queries are rotated too, so their products with keys stay the same.
"""

from __future__ import annotations

import functools
import math

import torch

_POSITIVE = torch.tensor([6.0, 18.0, 31.0, 44.0, 58.0, 75.0, 96.0, 127.0])
LEVELS = torch.cat((_POSITIVE, -_POSITIVE))
"""The number of each code: the best levels for a normal distribution (Max, 1960), as whole numbers that bfloat16 holds.
"""
DEVIATIONS = (36.0, 42.0, 48.0, 54.0, 60.0, 66.0)
"""Standard deviations of the rotated numbers that are tried for each head, in units of the levels. A head has too few
numbers for one deviation to fit all heads.
"""
LEAST_SQUARES = 1e-36
"""A head whose squares have no larger sum is zero, so that the deviation's inverse is finite."""
_BOUNDS = (_POSITIVE[1:] + _POSITIVE[:-1]) / 2


def packed_width(head_dim: int) -> int:
    """Returns the bytes of a head's codes."""
    return -(-head_dim // 2)


def round_heads(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds heads [num_heads, head_dim].

    Returns uint8 [num_heads, packed_width], in whose bytes an even dimension's code is lower, and float32 scales
    [num_heads]. Of the tried deviations the one counts whose levels have the smallest angle to the head. The scale
    makes the product with the head itself right, because scales with less error make all products too small (RaBitQ,
    Gao and Long, 2024). It is NaN if the sum of a head's squares is not finite.
    """
    head_dim = numbers.shape[-1]
    rotated = numbers.float() @ rotation(head_dim)
    squares = rotated.square().sum(-1)
    is_rounded = squares.isfinite() & (squares >= LEAST_SQUARES)
    deviation = torch.where(is_rounded, squares / head_dim, 1.0).sqrt()
    signs = rotated.signbit().int() << 3
    codes, products, likeness = torch.zeros_like(signs), torch.ones_like(squares), torch.zeros_like(squares)
    for each in DEVIATIONS:
        magnitudes = rotated.abs() * (each / deviation).unsqueeze(-1)
        tried = torch.bucketize(magnitudes, _BOUNDS, out_int32=True) | signs
        levels = LEVELS[tried]
        tried_products = (rotated * levels).sum(-1)
        tried_likeness = tried_products.square() / levels.square().sum(-1)
        is_better = is_rounded & (tried_likeness > likeness)
        codes = torch.where(is_better.unsqueeze(-1), tried, codes)
        products = torch.where(is_better, tried_products, products)
        likeness = torch.where(is_better, tried_likeness, likeness)
    scales = torch.where(is_rounded, squares / products, torch.where(squares.isfinite(), 0.0, torch.nan))
    pairs = torch.nn.functional.pad(codes, (0, head_dim % 2)).unflatten(-1, (-1, 2))
    return (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8), scales


def widen_heads(packed: torch.Tensor, scales: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Returns the numbers [..., head_dim] that codes [..., packed_width] and scales [...] stand for, in float32."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :head_dim]
    return (LEVELS[codes.int()] * scales.unsqueeze(-1)) @ rotation(head_dim).T


@functools.cache
def rotation(head_dim: int) -> torch.Tensor:
    """Returns the orthogonal matrix [head_dim, head_dim] that heads are multiplied by, float32.

    It is a Walsh-Hadamard transform of numbers whose signs are flipped by the Rudin-Shapiro sequence (Shapiro, 1951).
    The signs spread a constant and periodic numbers too, which the transform alone would gather in one dimension. If
    `head_dim` is no power of two, the first dimensions are transformed, as many as the largest power below it, then the
    last ones.
    """
    width = 1 << (head_dim.bit_length() - 1)
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < width:
        hadamard = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), hadamard)
    signs = [(-1.0) ** (index & (index >> 1)).bit_count() for index in range(width)]
    transform = torch.tensor(signs, dtype=torch.float64)[:, None] * hadamard / math.sqrt(width)
    first, last = torch.eye(head_dim, dtype=torch.float64), torch.eye(head_dim, dtype=torch.float64)
    first[:width, :width] = transform
    last[-width:, -width:] = transform
    return (first if width == head_dim else first @ last).float()
