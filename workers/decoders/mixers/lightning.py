"""Lightning attention (MiniMax, 2025): a recurrence whose heads each let their state decay at one constant rate."""

from __future__ import annotations

import torch

from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.protocol import RecurrentKernels
from manta.workers.kernels.recurrence import RecurrentInputs
from manta.workers.kernels.recurrent_step import RecurrentStep
from manta.workers.kernels.weights import RecurrentWeights
from manta.workers.models.recurrent_shapes import LightningShape


def lightning(
    weights: RecurrentWeights,
    x: torch.Tensor,
    metadata: AttentionMetadata,
    step: RecurrentStep,
    states: tuple[torch.Tensor, ...],
    kernels: RecurrentKernels,
) -> torch.Tensor:
    """Returns what a layer adds to the residual stream, from its normed hidden states x [num_tokens, hidden].

    `input` gives each head's query, key and value, then the gates of all heads. `states` are those of the heads.
    """
    shape, tensors = weights.shape, weights.tensors
    assert isinstance(shape, LightningShape)
    width = shape.num_heads * shape.head_dim
    mixed, gate = weights.inputs["input"].forward(x, metadata).float().split([3 * width, width], dim=-1)
    query, key, value = kernels.silu(mixed).unflatten(1, (shape.num_heads, 3, shape.head_dim)).unbind(2)
    log_decay = -tensors["slopes"].expand(len(x), -1)
    query, key, value, log_decay = (each.contiguous() for each in (query, key, value, log_decay))
    inputs = RecurrentInputs(query, key, value, log_decay, dtype=x.dtype)
    outputs = kernels.recur(inputs, states[0], step).flatten(1)
    size = width * weights.num_ranks
    squares = weights.squares_over_ranks(outputs, size, kernels)
    normed = kernels.row_norm(outputs, squares, size, tensors["norm"], shape.norm_eps)
    return weights.output.forward((normed * kernels.sigmoid(gate.contiguous())).to(x.dtype), metadata)
