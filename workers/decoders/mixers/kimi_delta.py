"""Kimi's delta attention (Kimi Team, 2025): a gated delta net with a decay for each dimension of a key."""

from __future__ import annotations

import torch

from manta.workers.decoders.mixers.gated_delta import delta_heads
from manta.workers.decoders.mixers.windows import channels_of
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.protocol import RecurrentKernels
from manta.workers.kernels.recurrence import RecurrentInputs
from manta.workers.kernels.recurrent_step import RecurrentStep
from manta.workers.kernels.weights import RecurrentWeights
from manta.workers.models.recurrent_shapes import DeltaShape


def kimi_delta(
    weights: RecurrentWeights,
    x: torch.Tensor,
    metadata: AttentionMetadata,
    step: RecurrentStep,
    states: tuple[torch.Tensor, ...],
    kernels: RecurrentKernels,
) -> torch.Tensor:
    """Returns what a layer adds to the residual stream, from its normed hidden states x [num_tokens, hidden].

    `input` gives queries, keys and values of all heads, then a beta of each head. `decay` and `gate` read hidden
    states, or narrow products of them, `decay_input` and `gate_input`. `states` are the windows of the convolution and
    the states of the heads.
    """
    shape, tensors, inputs = weights.shape, weights.tensors, weights.inputs
    assert isinstance(shape, DeltaShape)
    projected = inputs["input"].forward(x, metadata).float()
    mixed, beta = projected.split([sum(shape.sizes), shape.num_value_heads], dim=-1)
    mixed = kernels.convolve(mixed, tensors["kernel"], None, channels_of(states[0]), step, activates=True)
    time = _projected("decay", weights, x, metadata)
    outputs = kernels.recur(
        RecurrentInputs(
            *delta_heads(mixed, shape, kernels),
            log_decay=_log_decay(time, weights, shape, kernels),
            beta=kernels.sigmoid(beta),
            dtype=x.dtype,
        ),
        states[1],
        step,
    )
    gate = _projected("gate", weights, x, metadata)
    normed = kernels.gated_norm(outputs, gate, tensors["norm"], shape.norm_eps, has_sigmoid=True)
    return weights.output.forward(normed.to(x.dtype), metadata)


def _projected(name: str, weights: RecurrentWeights, x: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
    """Returns the product of hidden states and a linear, which another one to a narrow vector may precede."""
    narrow = weights.inputs.get(f"{name}_input")
    rows = x if narrow is None else narrow.forward(x, metadata)
    return weights.inputs[name].forward(rows, metadata).float()


def _log_decay(
    time: torch.Tensor, weights: RecurrentWeights, shape: DeltaShape, kernels: RecurrentKernels
) -> torch.Tensor:
    """Returns the logarithms of decays [num_tokens, num_heads, key_dim] of time steps [num_tokens, width]."""
    rates, bias = weights.tensors["rates"].unsqueeze(-1), weights.tensors["time_bias"]
    if not shape.least_log_decay:
        return rates * kernels.softplus(time, bias).unflatten(1, (-1, shape.key_dim))
    return kernels.sigmoid((time + bias).unflatten(1, (-1, shape.key_dim)) * -rates) * shape.least_log_decay
