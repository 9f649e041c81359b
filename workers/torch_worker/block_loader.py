"""Builds the weights of parts that Inkling's layers have, of their descriptions. The loader hands in its methods."""

from __future__ import annotations

import torch

from manta.workers.kernels.block_weights import (
    BlockEndsWeights,
    BlockReadsWeights,
    ClippedAttentionWeights,
    ConvolutionWeights,
    DistanceWeights,
    MessageGateWeights,
)
from manta.workers.models.block_specs import (
    BlockEndsSpec,
    BlockReadsSpec,
    ClippedAttentionSpec,
    ConvolutionSpec,
    DistanceSpec,
    MessageGateSpec,
)
from manta.workers.torch_worker.mixer_loader import PartReader


def load_distances(read: PartReader, spec: DistanceSpec) -> DistanceWeights:
    return DistanceWeights(read.linear(spec.numbers), read.tensor(spec.profiles))


def load_clipped_attention(read: PartReader, spec: ClippedAttentionSpec) -> ClippedAttentionWeights:
    of_keys, of_values = spec.convolutions
    return ClippedAttentionWeights(
        query=read.linear(spec.query),
        query_scale=read.tensor(spec.query_scale),
        key=read.linear(spec.key),
        value=read.linear(spec.value),
        convolutions=(_convolution(read, of_keys), _convolution(read, of_values)),
        sinks=read.linear(spec.sinks),
        distances=load_distances(read, spec.distances),
        distance_scale=read.tensor(spec.distance_scale),
        gate=read.linear(spec.gate),
        output=read.linear(spec.output),
    )


def _convolution(read: PartReader, spec: ConvolutionSpec) -> ConvolutionWeights:
    taps = read.tensor(spec.taps)
    if spec.added is None:
        return ConvolutionWeights(taps, None)
    return ConvolutionWeights(taps.flip(-1), read.linear(spec.added))


def load_reads(read: PartReader, spec: BlockReadsSpec | None) -> BlockReadsWeights | None:
    if spec is None:
        return None
    return BlockReadsWeights(
        attention=None if spec.attention is None else _queries(read.tensor(spec.attention)),
        norms=tuple(map(read.norm, spec.input_norms)),
        mlp=_queries(read.tensor(spec.mlp)),
        gates=tuple(_gate(read, each) for each in spec.gates),
    )


def _gate(read: PartReader, spec: MessageGateSpec) -> MessageGateWeights:
    return MessageGateWeights(
        read.linear(spec.down), read.plain_linear(spec.forgetting), read.plain_linear(spec.taking)
    )


def load_ends(read: PartReader, spec: BlockEndsSpec | None) -> BlockEndsWeights | None:
    if spec is None:
        return None
    messages = None
    if spec.messages is not None:
        (query, mlp), (key, value) = (read.tensor(each).unflatten(0, (-1, 2)).unbind(1) for each in spec.messages)
        messages = torch.stack((query, key, value, mlp), dim=1)
    return BlockEndsWeights(_queries(read.tensor(spec.final)), messages)


def _queries(stored: torch.Tensor) -> torch.Tensor:
    """Returns one query, or several, as [num_queries, hidden]."""
    return stored.view(-1, stored.shape[-1])
