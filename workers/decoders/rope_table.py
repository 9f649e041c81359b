"""The table of rotary cosines and sines, computed from a checkpoint's configuration.

Plain arithmetic. The model makes the table once, makes a longer one when it needs it, and hands it to the kernels.
"""

from __future__ import annotations

import math

import torch

from workers.models.model_config import RopeConfig


def rope_table(rope: RopeConfig, head_dim: int, num_positions: int) -> torch.Tensor:
    """Cosines then sines of every position's angles, float32 [num_positions, head_dim]."""
    inv_freq, attention_factor = _inverse_frequencies(rope, head_dim)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inv_freq)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor


def _inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """([head_dim / 2] radians a position, factor on cosines and sines)."""
    inv_freq = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.rope_type == "linear":
        return inv_freq / rope.factor, 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, inv_freq), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, inv_freq, head_dim), rope.attention_factor or 0.1 * math.log(rope.factor) + 1.0
    return inv_freq, 1.0


def _llama3(rope: RopeConfig, inv_freq: torch.Tensor) -> torch.Tensor:
    """Llama 3.1's scaling: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / inv_freq
    turns = rope.original_max_position_embeddings / wavelengths
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - kept) * inv_freq / rope.factor + kept * inv_freq


def _yarn(rope: RopeConfig, inv_freq: torch.Tensor, head_dim: int) -> torch.Tensor:
    """YaRN (Peng et al., 2023, section 3.2): blends over the dimensions between two numbers of turns."""

    def dimension(turns: float) -> float:
        positions_per_radian = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(positions_per_radian) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = max(high - low, 0.001)
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return stretched * inv_freq / rope.factor + (1 - stretched) * inv_freq
