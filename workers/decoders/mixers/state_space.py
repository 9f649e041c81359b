"""Mamba 2 (Dao and Gu, 2024): a state space whose heads each have one rate of decay."""

from __future__ import annotations

import torch

from manta.workers.decoders.mixers.windows import channels_of
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.protocol import RecurrentKernels
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
    kernels: RecurrentKernels,
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
    time = kernels.softplus(time, tensors["time_bias"]).clamp(*shape.step_limits)
    of_tokens = RecurrentInputs(c, b, values * time.unsqueeze(-1), time * tensors["rates"], dtype=x.dtype)
    outputs = kernels.recur(of_tokens, states[2], step)
    outputs = outputs + values * tensors["skip"].unsqueeze(-1)
    gated = _norm_and_gate(outputs.flatten(1), gate, weights, kernels)
    return weights.output.forward(gated.to(x.dtype), metadata)


def _norm_and_gate(
    outputs: torch.Tensor, gate: torch.Tensor, weights: RecurrentWeights, kernels: RecurrentKernels
) -> torch.Tensor:
    """Returns outputs [num_tokens, inner] after their gates and the norm of each group."""
    shape = weights.shape
    assert isinstance(shape, StateSpaceShape)
    if shape.norm_eps is None:
        return outputs * kernels.silu(gate)
    if not shape.shares_group:
        by_group = outputs.unflatten(1, (shape.num_groups, -1))
        gates_first = not shape.norms_before_gate
        return kernels.gated_norm(by_group, gate, weights.tensors["norm"], shape.norm_eps, gates_first=gates_first)
    gates = kernels.silu(gate)
    if shape.norms_before_gate:
        return _norm_over_ranks(outputs, weights, shape.norm_eps, kernels) * gates
    return _norm_over_ranks(outputs * gates, weights, shape.norm_eps, kernels)


def _norm_over_ranks(x: torch.Tensor, weights: RecurrentWeights, eps: float, kernels: RecurrentKernels) -> torch.Tensor:
    """Returns the RMS norm of the only group, of which each rank has a part."""
    size = x.shape[-1] * weights.num_ranks
    squares = weights.squares_over_ranks(x, size, kernels)
    return kernels.row_norm(x, squares, size, weights.tensors["norm"], eps)
