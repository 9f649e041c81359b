"""Kimi's delta attention (Kimi Team, 2025): a gated delta net in which each dimension of a key has a decay of its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from manta.workers.decoders.mixers.gated_delta import delta_heads
from manta.workers.decoders.mixers.convolution import convolve
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.recurrence import RecurrentInputs, recur
from manta.workers.kernels.recurrent_step import RecurrentStep
from manta.workers.kernels.reference import rms_norm
from manta.workers.kernels.weights import RecurrentWeights
from manta.workers.models.recurrent_shapes import DeltaShape


def kimi_delta(
    weights: RecurrentWeights,
    x: torch.Tensor,
    metadata: AttentionMetadata,
    step: RecurrentStep,
    states: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """Returns what a layer adds to the residual stream, from its normed hidden states x [num_tokens, hidden].

    `input` gives queries, keys and values of all heads, then a beta of each head. Decays and gates are products of two
    narrow linears each. `states` are the windows of the convolution and the states of the heads.
    """
    shape, tensors, linears = weights.shape, weights.tensors, weights.linears
    assert isinstance(shape, DeltaShape)
    projected = linears["input"].forward(x, metadata).float()
    mixed, beta = projected.split([sum(shape.sizes), shape.num_value_heads], dim=-1)
    mixed = F.silu(convolve(mixed, tensors["kernel"], None, merged(states[0]), step))
    time = linears["decay"].forward(linears["decay_input"].forward(x, metadata), metadata).float()
    time = F.softplus(time + tensors["time_bias"]).unflatten(1, (-1, shape.key_dim))
    outputs = recur(
        RecurrentInputs(
            *delta_heads(mixed, shape),
            log_decay=-tensors["log_rates"].exp().unsqueeze(-1) * time,
            beta=beta.sigmoid(),
        ),
        states[1],
        step,
    )
    gate = linears["gate"].forward(linears["gate_input"].forward(x, metadata), metadata).float()
    normed = rms_norm(outputs, tensors["norm"], shape.norm_eps).flatten(1) * gate.sigmoid()
    return linears["output"].forward(normed.to(x.dtype), metadata)
