"""Mamba 2 (Dao and Gu, 2024): a state space whose heads each have one rate of decay."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from manta.workers.decoders.mixers.windows import channels_of
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.protocol import Kernels
from manta.workers.kernels.recurrence import RecurrentInputs
from manta.workers.kernels.recurrent_step import RecurrentStep
from manta.workers.kernels.weights import RecurrentWeights
from manta.workers.models.recurrent_shapes import StateSpaceShape


def state_space(
    weights: RecurrentWeights,
    x: torch.Tensor,
    metadata: AttentionMetadata,
    step: RecurrentStep,
    states: tuple[torch.Tensor, ...],
    kernels: Kernels,
) -> torch.Tensor:
    """Returns what a layer adds to the residual stream, from its normed hidden states x [num_tokens, hidden].

    `input` gives gates, x, B, C and a time step of each head. `states` are the windows of the convolutions of x and of
    B and C, and the states of the heads.
    """
    shape, tensors = weights.shape, weights.tensors
    assert isinstance(shape, StateSpaceShape)
    projected = weights.inputs["input"].forward(x, metadata).float()
    inner, shared = shape.inner, 2 * shape.num_groups * shape.state_size
    gate, values, b_c, time = projected.split([inner, inner, shared, shape.num_heads], dim=-1)
    values = kernels.convolve(
        values, tensors["kernel"], tensors.get("kernel_bias"), channels_of(states[0]), step, activates=True
    )
    b_c = kernels.convolve(
        b_c, tensors["shared_kernel"], tensors.get("shared_bias"), channels_of(states[1]), step, activates=True
    )
    b, c = b_c.unflatten(1, (2, shape.num_groups, shape.state_size)).unbind(1)
    values = values.unflatten(1, (-1, shape.head_dim))
    time = F.softplus(time + tensors["time_bias"]).clamp(*shape.step_limits)
    outputs = kernels.recur(
        RecurrentInputs(c, b, values * time.unsqueeze(-1), time * tensors["rates"]), states[2], step
    )
    outputs = outputs + values * tensors["skip"].unsqueeze(-1)
    gated = _norm_and_gate(outputs.flatten(1), gate, weights, shape)
    return weights.output.forward(gated.to(x.dtype), metadata)


def _norm_and_gate(
    outputs: torch.Tensor, gate: torch.Tensor, weights: RecurrentWeights, shape: StateSpaceShape
) -> torch.Tensor:
    gate = F.silu(gate)
    if shape.norm_eps is None:
        return outputs * gate
    if shape.norms_before_gate:
        return _norm_of_groups(outputs, weights, shape, shape.norm_eps) * gate
    return _norm_of_groups(outputs * gate, weights, shape, shape.norm_eps)


def _norm_of_groups(x: torch.Tensor, weights: RecurrentWeights, shape: StateSpaceShape, eps: float) -> torch.Tensor:
    """Returns the RMS norm of each group's part of x. Of ranks, each has whole groups, or a part of the only one."""
    by_group = x.unflatten(1, (shape.num_groups, -1))
    squares, size = by_group.square().sum(-1, keepdim=True), by_group.shape[-1]
    if shape.num_groups == 1:
        squares, size = weights.sum_over_ranks(squares), size * weights.num_ranks
    return (by_group * torch.rsqrt(squares / size + eps)).flatten(1) * weights.tensors["norm"]
