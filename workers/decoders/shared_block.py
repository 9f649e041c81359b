"""Attention and an MLP before a layer's mixer, of the residual stream and the embedding (Zamba; Zyphra, 2024).

Called by the decoder, which brings its attention and its MLP.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.protocol import Kernels
from manta.workers.kernels.weights import AttentionWeights, GatedMlpWeights, SharedBlockWeights


def mixer_input(
    block: SharedBlockWeights,
    residual: torch.Tensor,
    embedded: torch.Tensor,
    eps: float,
    kernels: Kernels,
    attend: Callable[[AttentionWeights, torch.Tensor], torch.Tensor],
    run_mlp: Callable[[GatedMlpWeights, torch.Tensor], torch.Tensor],
    step: AttentionMetadata,
) -> torch.Tensor:
    """Returns the normed sum that a mixer reads, of the residual stream and the block's result. `residual` and
    `embedded`, the embedding of the tokens, are [num_tokens, hidden].
    """
    both = torch.cat((residual, embedded), dim=-1)
    attended = attend(block.attention, kernels.rms_norm(both, block.input_norm, eps))
    result = run_mlp(block.mlp, kernels.rms_norm(attended, block.mlp_norm, eps))
    return kernels.rms_norm(residual + block.result.forward(result, step), block.mixer_norm, eps)
