"""The parts of a decoder that hold weights: linears prepacked for the CPU, and the table of rotary cosines and sines.

A linear here is a plain callable, so that a step pays for no module machinery. Reads no files; the loader calls it with
each weight in turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from workers.kernels import cpu, cpu_linear, processor
from workers.model_config import RopeConfig

Linear = Callable[[torch.Tensor], torch.Tensor]
"""x [num_rows, in_features] -> [num_rows, out_features], same dtype."""

_reorder = torch.ops.mkldnn._reorder_linear_weight
_PACK_ROWS = 32
"""The batch that oneDNN chooses a weight layout for; layouts for 1 to 1024 rows ran within noise of each other."""


def make_cpu_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """`x @ weight.T + bias`, with a packed copy of the weight [out_features, in_features] and no reference to it.

    By `workers/kernels/linear.cpp`, which spares oneDNN's 20 us a call: as fast on large weights, 1.3 to 2.5 times
    faster on small ones. Without a compiler in oneDNN's blocked layout, up to 1.6 times faster than `F.linear`.
    """
    linear = cpu_linear.pack(weight, bias)
    if linear is not None:
        return linear
    has_layout = weight.dtype == torch.float32 or processor.form().has_bfloat16  # oneDNN refuses the others
    if not torch.backends.mkldnn.is_available() or not has_layout:
        weight = weight.clone()  # the caller may unmap what it handed over
        return lambda x: F.linear(x, weight, bias)
    return make_onednn_linear(weight, bias)


def make_onednn_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """`x @ weight.T + bias`, with the weight in oneDNN's blocked layout."""
    packed = _reorder(weight, _PACK_ROWS)
    apply = torch.ops.mkldnn._linear_pointwise.default
    no_scalars: list[float] = []

    return lambda x: apply(x, packed, bias, "none", no_scalars, "")


def make_cpu_gated_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """`silu(x @ gate.T) * (x @ up.T)` (SwiGLU, Shazeer, 2020), of gate and up one below the other in the weight.

    In bfloat16 by one kernel, whose products do not go through memory: at 2,048 rows those of Qwen2.5-0.5B are 40 MB.
    """
    gated = cpu_linear.pack(weight, bias, gated=True)
    if gated is not None:
        return gated
    linear = make_cpu_linear(weight, bias)
    return lambda x: cpu.silu_and_mul(linear(x))


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
    """Llama 3.1's: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / inv_freq
    turns = rope.original_max_position_embeddings / wavelengths
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - kept) * inv_freq / rope.factor + kept * inv_freq


def _yarn(rope: RopeConfig, inv_freq: torch.Tensor, head_dim: int) -> torch.Tensor:
    """YaRN (Peng et al., 2023, section 3.2): the blend runs over dimensions, between two numbers of turns."""

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
