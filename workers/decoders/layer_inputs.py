"""Inputs that each layer of a decoder has of its own (Gemma 4): a row of a table for each token, and a normed product
of its embedding. Called by the decoder.
"""

from __future__ import annotations

import torch

from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.protocol import Kernels
from manta.workers.kernels.weights import LayerInputsWeights, LayerInputWeights
from manta.workers.models.model_config import ModelConfig

_MEAN = 2**-0.5
"""Factor on the sum of both parts."""


def layer_inputs(
    weights: LayerInputsWeights,
    token_ids: torch.Tensor,
    embedded: torch.Tensor,
    config: ModelConfig,
    kernels: Kernels,
    step: AttentionMetadata,
) -> torch.Tensor:
    """Returns the inputs of all layers, [num_layers, num_tokens, per_layer_size], given token ids [num_tokens] and
    their scaled embeddings [num_tokens, hidden].
    """
    by_layer = (config.num_layers, config.per_layer_size)
    scale = torch.tensor(config.per_layer_size**0.5, dtype=embedded.dtype).item()
    in_table = torch.where(token_ids < config.per_layer_vocab_size, token_ids, 0)
    rows = weights.table(in_table).mul_(scale).unflatten(-1, by_layer)
    products = weights.projection.forward(embedded, step) * config.hidden_size**-0.5
    normed = kernels.rms_norm(products.unflatten(-1, by_layer), weights.norm, config.rms_norm_eps)
    return ((normed + rows) * _MEAN).transpose(0, 1).contiguous()


def add_own_input(
    weights: LayerInputWeights,
    residual: torch.Tensor,
    own: torch.Tensor,
    config: ModelConfig,
    kernels: Kernels,
    step: AttentionMetadata | None = None,
) -> torch.Tensor:
    """Returns what a layer adds to the residual stream [num_tokens, hidden] for its own input [num_tokens,
    per_layer_size].
    """
    together = torch.cat((weights.gate.forward(residual, step), own), dim=-1)
    gated = kernels.gate(config.activation, together)
    return kernels.rms_norm(weights.projection.forward(gated, step), weights.norm, config.rms_norm_eps)
