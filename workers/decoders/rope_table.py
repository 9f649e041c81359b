"""The table of rotary cosines and sines, computed from a checkpoint's configuration.

Plain arithmetic in numpy, for the workers of all frameworks.
"""

from __future__ import annotations

import math

import numpy as np

from workers.models.model_config import RopeConfig


def rope_table(rope: RopeConfig, head_dim: int, num_positions: int) -> np.ndarray:
    """Cosines then sines of every position's angles, float32 [num_positions, head_dim]."""
    inv_freq, attention_factor = _inverse_frequencies(rope, head_dim)
    # The angles are rounded to float32, as in transformers. Their cosines are computed in float64 and rounded once, so
    # that every machine has the same table.
    angles = np.outer(np.arange(num_positions, dtype=np.float32), inv_freq).astype(np.float64)
    return (np.concatenate((np.cos(angles), np.sin(angles)), axis=-1) * attention_factor).astype(np.float32)


def _inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """([head_dim / 2] radians a position, factor on cosines and sines)."""
    inv_freq = (rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)).astype(np.float32)
    if rope.rope_type == "linear":
        return inv_freq / np.float32(rope.factor), 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, inv_freq), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, inv_freq, head_dim), rope.attention_factor or 0.1 * math.log(rope.factor) + 1.0
    if rope.frequency_divisors is not None:
        return inv_freq / np.array(rope.frequency_divisors, dtype=np.float32), 1.0
    return inv_freq, 1.0


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
        return head_dim * math.log(positions_per_radian) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = max(high - low, 0.001)
    stretched = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / span, 0, 1)
    return (stretched * inv_freq / rope.factor + (1 - stretched) * inv_freq).astype(np.float32)
