"""Gated delta nets (Yang et al., 2024): the delta rule with a decay for each head and token, as in Qwen3-Next."""

from __future__ import annotations

import torch

from manta.workers.decoders.mixers.windows import channels_of
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.protocol import RecurrentKernels
from manta.workers.kernels.recurrence import RecurrentInputs
from manta.workers.kernels.recurrent_step import RecurrentStep
from manta.workers.kernels.weights import RecurrentWeights
from manta.workers.models.recurrent_shapes import DeltaShape

_NORM_EPS = 1e-6
"""The constant in the norms of queries and keys."""


def gated_delta(
    weights: RecurrentWeights,
    x: torch.Tensor,
    metadata: AttentionMetadata,
    step: RecurrentStep,
    states: tuple[torch.Tensor, ...],
    kernels: RecurrentKernels,
) -> torch.Tensor:
    """Returns what a layer adds to the residual stream, from its normed hidden states x [num_tokens, hidden].

    `input` gives queries, keys, values and gates of all heads, then a beta and a time step of each value head. `states`
    are the windows of the convolution and the states of the heads.
    """
    shape, tensors = weights.shape, weights.tensors
    assert isinstance(shape, DeltaShape)
    projected = weights.inputs["input"].forward(x, metadata)
    normed = None
    if not shape.has_sigmoid_gates:
        normed = kernels.delta_step(projected, tensors, shape, _NORM_EPS, states, step)
    if normed is None:
        normed = _delta_net(projected.float(), tensors, shape, step, states, kernels, x.dtype).to(x.dtype)
    return weights.output.forward(normed, metadata)


def _delta_net(
    projected: torch.Tensor,
    tensors: dict[str, torch.Tensor],
    shape: DeltaShape,
    step: RecurrentStep,
    states: tuple[torch.Tensor, ...],
    kernels: RecurrentKernels,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Returns what the output linear reads, float32 [num_tokens, num_value_heads * value_dim]. `dtype` is that of the
    activations.
    """
    heads = shape.num_value_heads
    mixed, gate, beta, time = projected.split([sum(shape.sizes), shape.sizes[2], heads, heads], dim=-1)
    mixed = kernels.convolve(mixed, tensors["kernel"], None, channels_of(states[0]), step, activates=True)
    beta = kernels.sigmoid(beta)
    outputs = kernels.recur(
        RecurrentInputs(
            *delta_heads(mixed, shape, kernels),
            log_decay=tensors["rates"] * kernels.softplus(time, tensors["time_bias"]),
            beta=beta if shape.beta_scale == 1 else beta * shape.beta_scale,
            dtype=dtype,
        ),
        states[1],
        step,
    )
    return kernels.gated_norm(outputs, gate, tensors["norm"], shape.norm_eps, has_sigmoid=shape.has_sigmoid_gates)


def delta_heads(
    mixed: torch.Tensor, shape: DeltaShape, kernels: RecurrentKernels
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns queries and keys [num_tokens, num_key_heads, key_dim] of length 1, queries scaled, and values
    [num_tokens, num_value_heads, value_dim], of their rows one after the other.
    """
    query, key, value = mixed.split(shape.sizes, dim=-1)
    query, key = (each.unflatten(1, (-1, shape.key_dim)) for each in (query, key))
    scaled = kernels.unit_heads(query, shape.key_dim**-0.5, _NORM_EPS)
    return scaled, kernels.unit_heads(key, 1.0, _NORM_EPS), value.unflatten(1, (-1, shape.value_dim))
