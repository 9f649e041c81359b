"""The weights of the parts that Inkling's layers have, which `workers/models/block_specs.py` describes: plain data."""

from __future__ import annotations

import dataclasses

import torch

from manta.workers.kernels.linear_protocol import Linear


@dataclasses.dataclass(slots=True, frozen=True)
class DistanceWeights:
    """The weights of `DistanceSpec`."""

    numbers: Linear
    """hidden -> num_heads * rank"""
    profiles: torch.Tensor
    """float32 [rank, distances]"""


@dataclasses.dataclass(slots=True, frozen=True)
class ConvolutionWeights:
    """The weights of `ConvolutionSpec`."""

    taps: torch.Tensor
    """float32 [channels, width], the newest token's last."""
    added: Linear | None
    """hidden -> num_kv_heads * width, the newest token's first in each head; None for nothing."""


@dataclasses.dataclass(slots=True, frozen=True)
class ClippedAttentionWeights:
    """The weights of `ClippedAttentionSpec`."""

    query: Linear
    query_scale: torch.Tensor
    """float32 [num_heads, head_dim]"""
    key: Linear
    value: Linear
    convolutions: tuple[ConvolutionWeights, ConvolutionWeights]
    sinks: Linear
    distances: DistanceWeights
    distance_scale: torch.Tensor
    """float32 [num_heads, rank]"""
    gate: Linear
    output: Linear


@dataclasses.dataclass(slots=True, frozen=True)
class MessageGateWeights:
    """The weights of `MessageGateSpec`; `forgetting` and `taking` are in float32."""

    down: Linear
    forgetting: Linear
    taking: Linear


@dataclasses.dataclass(slots=True, frozen=True)
class BlockReadsWeights:
    """The weights of `BlockReadsSpec`. Queries are float32 [num_queries, hidden]."""

    attention: torch.Tensor | None
    norms: tuple[torch.Tensor, ...]
    mlp: torch.Tensor
    gates: tuple[MessageGateWeights, ...]


@dataclasses.dataclass(slots=True, frozen=True)
class BlockEndsWeights:
    """The weights of `BlockEndsSpec`."""

    final: torch.Tensor
    """float32 [1, hidden]"""
    messages: torch.Tensor | None
    """float32 [layers of the loop, 4, hidden]: those for queries, keys, values and MLP; None without a loop."""
