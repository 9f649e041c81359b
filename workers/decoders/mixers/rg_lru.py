"""Real-gated linear recurrent units (RG-LRU; Griffin, De et al., 2024, section 2.4): each channel keeps one number,
which decays by a gate of the token.
"""

from __future__ import annotations

import math

import torch

from manta.workers.decoders.mixers.windows import channels_of
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.protocol import RecurrentKernels
from manta.workers.kernels.recurrence import RecurrentInputs
from manta.workers.kernels.recurrent_step import RecurrentStep
from manta.workers.kernels.weights import RecurrentWeights
from manta.workers.models.recurrent_shapes import RgLruShape

_STRENGTH = 8.0
"""The paper's constant c: a channel whose gate is 1 decays by `exp(-c * softplus(parameter))`."""


def rg_lru(
    weights: RecurrentWeights,
    x: torch.Tensor,
    metadata: AttentionMetadata,
    step: RecurrentStep,
    states: tuple[torch.Tensor, ...],
    kernels: RecurrentKernels,
) -> torch.Tensor:
    """Returns what a layer adds to the residual stream, from its normed hidden states x [num_tokens, hidden].

    `input` gives the branch that gates the results, and the channels. `states` are the window of the convolution and
    the states of the channels.
    """
    shape, tensors = weights.shape, weights.tensors
    assert isinstance(shape, RgLruShape)
    branch, values = weights.inputs["input"].forward(x, metadata).float().chunk(2, dim=-1)
    values = kernels.convolve(values, tensors["kernel"], tensors["kernel_bias"], channels_of(states[0]), step)
    by_head = values.unflatten(1, (shape.num_heads, shape.head_dim))
    input_gate, recurrent_gate = (_gate(name, by_head, weights, kernels) for name in ("input", "recurrent"))
    rates = kernels.softplus(values.new_zeros((1, shape.channels)), tensors["rates"]) * -_STRENGTH
    # What is added has the variance of the channel's input, whatever the decay is. A sequence begins with all of it.
    rest = (1 - kernels.exp(recurrent_gate * rates * 2)).clamp(min=0)
    share = torch.where((metadata.positions == 0).unsqueeze(1), 1.0, kernels.sqrt(rest))
    ones = values.new_ones((len(x), 1, 1))
    added = (values * input_gate * share).unsqueeze(-1)
    of_tokens = RecurrentInputs(ones, ones, added, recurrent_gate, rates=rates.T.contiguous(), dtype=x.dtype)
    outputs = kernels.recur(of_tokens, states[1], step).squeeze(-1)
    return weights.output.forward((outputs * _gelu(branch, kernels)).to(x.dtype), metadata)


def _gate(name: str, by_head: torch.Tensor, weights: RecurrentWeights, kernels: RecurrentKernels) -> torch.Tensor:
    """Returns a gate of each channel, [num_tokens, channels], of channels [num_tokens, num_heads, head_dim]."""
    weight, bias = (weights.tensors[f"{name}_gate_{part}"] for part in ("weight", "bias"))
    products = kernels.head_products(by_head, weight.view(by_head.shape[1], by_head.shape[2], -1))
    return kernels.sigmoid((products + bias).flatten(1))


def _gelu(x: torch.Tensor, kernels: RecurrentKernels) -> torch.Tensor:
    """Returns GELU by its tanh, which a sigmoid gives: `(1 + tanh(y)) / 2` is the sigmoid of `2 y`."""
    return x * kernels.sigmoid((x + x * x * x * 0.044715) * (2 * (2 / math.pi) ** 0.5))
