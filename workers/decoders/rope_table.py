"""The table of rotary cosines and sines, computed from a checkpoint's configuration.

Plain arithmetic in numpy, for the workers of all frameworks. Only operations that IEEE 754 or `decimal` defines to the
last bit are used, so that every machine has the same table. The cosines and powers of C libraries and of numpy's vector
code differ between processors.
"""

from __future__ import annotations

import math
from decimal import Decimal

import numpy as np

from manta.workers.models.model_config import RopeConfig


def rope_table(
    rope: RopeConfig | None, head_dim: int, num_positions: int, factors: np.ndarray | None = None
) -> np.ndarray:
    """Cosines then sines of every position's angles, float32 [num_positions, head_dim]. `factors`, float32
    [rotary_dim / 2], multiply the angles.

    Dimensions that do not rotate have a cosine of 1 and a sine of 0: those from `rotary_dim` on, and all without a
    rope, for layers without positions.
    """
    half = head_dim // 2
    table = np.zeros((num_positions, 2, half), dtype=np.float32)
    table[:, 0] = 1
    if rope is None:
        return table.reshape(num_positions, head_dim)
    rotary_dim = rope.rotary_dim or head_dim
    if rope.rope_type == "proportional":
        inv_freq = _frequencies(rope.theta, head_dim)[: rotary_dim // 2] / np.float32(rope.factor)
        attention_factor = 1.0
    else:
        inv_freq, attention_factor = _inverse_frequencies(rope, rotary_dim)
    if factors is not None:
        inv_freq = inv_freq * factors
    # The angles are rounded to float32, as in transformers. Their cosines are computed in float64 and rounded once.
    angles = np.outer(np.arange(num_positions, dtype=np.float32), inv_freq)
    for first in range(0, num_positions, _CHUNK_POSITIONS):
        chunk = slice(first, first + _CHUNK_POSITIONS)
        cos_and_sin = np.stack(_cos_and_sin(angles[chunk].astype(np.float64)), axis=1)
        table[chunk, :, : len(inv_freq)] = cos_and_sin * attention_factor
    return table.reshape(num_positions, head_dim)


_CHUNK_POSITIONS = 128
"""Positions computed at a time, so that what lies between two operations stays in the processor's cache."""
_HALF_PI = (float.fromhex("0x1.921fb544p+0"), float.fromhex("0x1.0b4611a6p-34"), float.fromhex("0x1.3198a2e037073p-69"))
"""Pi / 2 in three parts. The first two have 33 and 32 bits, so that their products with a quadrant below 2^20 are
exact.
"""
_TERMS = 9
"""Terms of each Taylor series: for angles up to pi / 4 the next one is below 1e-17."""


def _cos_and_sin(angles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns cosines and sines of angles from 0 to 10^6, float64, to about 2e-16."""
    quadrants = np.rint(angles * (2 / math.pi))
    rests = angles
    for part in _HALF_PI:
        rests = rests - quadrants * part
    squares = rests * rests
    cos, sin = np.zeros_like(rests), np.zeros_like(rests)
    for term in range(_TERMS - 1, -1, -1):
        for series, power in ((cos, 2 * term), (sin, 2 * term + 1)):
            series *= squares
            series += (-1) ** term / math.factorial(power)
    sin *= rests
    quadrant = quadrants.astype(np.int64) % 4
    is_odd = quadrant % 2 == 1
    of_cos, of_sin = np.where(is_odd, sin, cos), np.where(is_odd, cos, sin)
    return np.where((quadrant == 1) | (quadrant == 2), -of_cos, of_cos), np.where(quadrant >= 2, -of_sin, of_sin)


def _log(x: float) -> float:
    return float(Decimal(x).ln())


def _frequencies(theta: float, head_dim: int) -> np.ndarray:
    """theta^(-i / head_dim) for even i, float32 [head_dim / 2]."""
    powers = [(Decimal(theta).ln() * -i / head_dim).exp() for i in range(0, head_dim, 2)]
    return np.array([float(power) for power in powers]).astype(np.float32)


def _inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """([head_dim / 2] radians a position, factor on cosines and sines). `head_dim` counts rotated dimensions only."""
    if rope.rope_type == "dynamic":
        return _frequencies(_stretched_theta(rope, head_dim), head_dim), 1.0
    inv_freq = _frequencies(rope.theta, head_dim)
    if rope.rope_type == "longrope":
        is_long = rope.longest_context > rope.original_max_position_embeddings
        factors = np.array(rope.long_factors if is_long else rope.short_factors, dtype=np.float32)
        return inv_freq / factors, _longrope_attention_factor(rope)
    if rope.rope_type == "linear":
        return inv_freq / np.float32(rope.factor), 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, inv_freq), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, inv_freq, head_dim), _yarn_attention_factor(rope)
    if rope.frequency_divisors is not None:
        return inv_freq / np.array(rope.frequency_divisors, dtype=np.float32), 1.0
    return inv_freq, 1.0


def _stretched_theta(rope: RopeConfig, head_dim: int) -> float:
    """Returns theta for `longest_context` positions by the rule that transformers calls dynamic NTK."""
    stretch = max(1.0, rope.longest_context / rope.original_max_position_embeddings)
    growth = Decimal(rope.factor * stretch - (rope.factor - 1))
    return float(Decimal(rope.theta) * (growth.ln() * head_dim / (head_dim - 2)).exp())


def _longrope_attention_factor(rope: RopeConfig) -> float:
    """The factor on cosines and sines (Ding et al., 2024)."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1:
        return 1.0
    return math.sqrt(1 + _log(rope.factor) / _log(rope.original_max_position_embeddings))


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """The factor on cosines and sines (Peng et al., 2023, section 3.4; its two multipliers are DeepSeek-V2's)."""

    def stretched(multiplier: float) -> float:
        return 0.1 * multiplier * _log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return stretched(rope.mscale) / stretched(rope.mscale_all_dim)
    return stretched(1.0)


def _llama3(rope: RopeConfig, inv_freq: np.ndarray) -> np.ndarray:
    """Llama 3.1's scaling: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    wavelengths = np.float32(2 * math.pi) / inv_freq
    turns = np.float32(rope.original_max_position_embeddings) / wavelengths
    kept = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
    return ((1 - kept) * inv_freq / rope.factor + kept * inv_freq).astype(np.float32)


def _yarn(rope: RopeConfig, inv_freq: np.ndarray, head_dim: int) -> np.ndarray:
    """YaRN (Peng et al., 2023, section 3.2): blends over the dimensions between two numbers of turns."""

    def dimension(turns: float) -> float:
        positions_per_radian = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * _log(positions_per_radian) / (2 * _log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = max(high - low, 0.001)
    stretched = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / span, 0, 1)
    return (stretched * inv_freq / rope.factor + (1 - stretched) * inv_freq).astype(np.float32)
