"""The gated short convolution of LFM2 (Liquid AI, 2025), and the plain one that Inkling adds to its input."""

from __future__ import annotations

import torch

from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.protocol import RecurrentKernels
from manta.workers.kernels.recurrent_step import RecurrentStep
from manta.workers.kernels.weights import ShortConvWeights


def run_short_conv(
    weights: ShortConvWeights,
    normed: torch.Tensor,
    metadata: AttentionMetadata,
    step: RecurrentStep,
    states: tuple[torch.Tensor, ...],
    kernels: RecurrentKernels,
) -> torch.Tensor:
    """Returns the mixer's result [num_tokens, hidden], and writes the step's states, float32 [num_slots, channels,
    width - 1].
    """
    b, c, x = weights.input.forward(normed, metadata).float().chunk(3, dim=-1)
    convolved = kernels.convolve(b * x, weights.kernel, weights.bias, states[0], step)
    return weights.output.forward((c * convolved).to(normed.dtype), metadata)


def with_convolution(
    x: torch.Tensor,
    kernel: torch.Tensor,
    state: torch.Tensor,
    step: RecurrentStep,
    kernels: RecurrentKernels,
    scale: float = 1.0,
) -> torch.Tensor:
    """Returns rows x [num_tokens, channels] and their convolution, added, times `scale`. Writes the step's states,
    float32 [num_slots, channels, width - 1].
    """
    wide = x.float()
    return ((kernels.convolve(wide, kernel, None, state, step) + wide) * scale).to(x.dtype)
