"""Builds the weights of attention over vectors that all heads share, and of hyper-connections, of their descriptions.

The loader hands in its own methods, which read linears, norms and tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from manta.workers.adapters.adapter_bank import AdapterBank
from manta.workers.checkpoints.checkpoint import Checkpoint
from manta.workers.decoders.latent_attention import cached_layout
from manta.workers.kernels.latent_adapters import LatentAdapters
from manta.workers.kernels.weights import (
    CompressedAttentionWeights,
    CompressorWeights,
    ConnectionWeights,
    EntriesWeights,
    EntryIndexerWeights,
    GrowthWeights,
    IndexerWeights,
    LatentAttentionWeights,
    Linear,
)
from manta.workers.models.compressed_specs import (
    CompressedAttentionSpec,
    CompressorSpec,
    EntryIndexerSpec,
)
from manta.workers.models.latent_specs import IndexerSpec, LatentAttentionSpec
from manta.workers.models.model_config import ModelConfig, ModelError
from manta.workers.models.weight_specs import ConnectionSpec, LinearSpec, NormSpec, Split, TensorSpec
from manta.workers.torch_worker.weight_platform import WeightPlatform


class PartReader(NamedTuple):
    """Methods of `WeightLoader`, each of which reads a part of a layer."""

    linear: Callable[[LinearSpec], Linear]
    """A linear that takes adapters."""
    plain_linear: Callable[[LinearSpec], Linear]
    """A small linear in float32."""
    dense: Callable[[LinearSpec], torch.Tensor]
    """The numbers of a linear's weight, which may be a view of the file."""
    norm: Callable[[NormSpec], torch.Tensor]
    tensor: Callable[[TensorSpec], torch.Tensor]
    """A tensor in float32, whose dimensions but the first are one."""
    sinks: Callable[[str], torch.Tensor]
    placed: Callable[[torch.Tensor], torch.Tensor]
    """A copy on the device, in the model's dtype."""
    bank: AdapterBank | None
    """The adapters that the model takes; None for none."""


def load_latent_attention(read: PartReader, spec: LatentAttentionSpec, exact: bool) -> LatentAttentionWeights:
    inputs = read.linear(spec.inputs)
    queries = None if spec.queries is None else read.linear(spec.queries)
    keys, values = cached_layout(read.dense(spec.expansion), spec.shape, spec.head_dim)
    if exact:
        values = values.contiguous()  # its kernel would copy them in every step
    placed_keys, adapters = read.placed(keys), None
    if read.bank is not None:
        adapters = LatentAdapters(spec.shape, placed_keys)
        read.bank.beside(adapters, spec.expansion)
    return LatentAttentionWeights(
        shape=spec.shape,
        inputs=inputs,
        query_norm=None if spec.query_norm is None else read.norm(spec.query_norm),
        queries=queries,
        latent_norm=None if spec.latent_norm is None else read.norm(spec.latent_norm),
        keys=placed_keys,
        values=read.placed(values),
        output=read.linear(spec.output),
        indexer=None if spec.indexer is None else _indexer(read, spec.indexer),
        gate=None if spec.gate is None else read.linear(spec.gate),
        key_norm=None if spec.key_norm is None else read.norm(spec.key_norm),
        sinks=None if spec.sinks is None else read.sinks(spec.sinks),
        growth=None if spec.growth is None else GrowthWeights(*map(read.sinks, spec.growth)),
        adapters=adapters,
    )


def _indexer(read: PartReader, spec: IndexerSpec) -> IndexerWeights:
    def vector(name: str, size: int) -> torch.Tensor:
        return read.tensor(TensorSpec(name, (size,), Split.NOTHING))

    queries, keys, norm = read.linear(spec.queries), read.linear(spec.keys), spec.query_norm
    growth = None if spec.growth is None else [vector(name, spec.shape.num_heads) for name in spec.growth]
    return IndexerWeights(
        spec.shape,
        queries,
        keys,
        vector(f"{spec.key_norm.name}.weight", spec.key_norm.size),
        read.tensor(spec.key_bias),
        read.plain_linear(spec.shares),
        None if norm is None else (vector(f"{norm.name}.weight", norm.size), vector(f"{norm.name}.bias", norm.size)),
        None if growth is None else GrowthWeights(*growth),
        spec.place,
        None if spec.pool_biases is None else read.tensor(spec.pool_biases),
    )


def load_compressed_attention(read: PartReader, spec: CompressedAttentionSpec) -> CompressedAttentionWeights:
    inputs, queries = read.linear(spec.inputs), read.linear(spec.queries)
    by_group = read.dense(spec.group_outputs).unflatten(0, (-1, spec.output_rank))
    return CompressedAttentionWeights(
        inputs=inputs,
        query_norm=read.norm(spec.query_norm),
        queries=queries,
        head_norm=read.norm(spec.head_norm),
        key_norm=read.norm(spec.key_norm),
        sinks=read.sinks(spec.sinks),
        group_outputs=read.placed(by_group.transpose(1, 2).contiguous()),
        output=read.linear(spec.output),
        entries=None if spec.entries is None else _entries(read, spec.entries, spec.indexer),
    )


def _entries(read: PartReader, keys: CompressorSpec, spec: EntryIndexerSpec | None) -> EntriesWeights:
    compressors, indexer = [keys], None
    if spec is not None:
        compressors.append(spec.keys)
        indexer = EntryIndexerWeights(spec.shape, read.linear(spec.queries), read.plain_linear(spec.shares))
    parts = [part for each in compressors for linear in each.linears() for part in linear.parts]
    made = tuple(_compressor(read, each) for each in compressors)
    return EntriesWeights(
        rate=keys.biases.shape[0],
        num_terms=len(made[0].biases),
        inputs=read.linear(keys.numbers._replace(parts=tuple(parts))),
        compressors=made,
        indexer=indexer,
    )


def _compressor(read: PartReader, spec: CompressorSpec) -> CompressorWeights:
    biases = read.tensor(spec.biases).view(spec.biases.shape)
    if spec.numbers.out_features > spec.norm.size:  # of the tokens of the entry before, then of the entry's own
        biases = torch.cat(biases.chunk(2, dim=-1))
    return CompressorWeights(spec.numbers.out_features, biases, read.norm(spec.norm))


def load_connection(
    read: PartReader, spec: ConnectionSpec, make_linear: Callable[[torch.Tensor], Linear]
) -> ConnectionWeights:
    """Returns the weights of hyper-connections. `make_linear` makes a linear of a weight in float32."""
    shares, bases, scales = (read.tensor(each).view(each.shape) for each in spec.tensors())
    sizes = [spec.num_streams, spec.num_streams, spec.num_streams**2][: len(scales)]
    of_shares = torch.cat([scales[kind].expand(size) for kind, size in enumerate(sizes)])
    return ConnectionWeights(make_linear(shares), bases, of_shares)


def load_table(
    checkpoint: Checkpoint, config: ModelConfig, name: str | None, platform: WeightPlatform
) -> torch.Tensor | None:
    """Returns the experts of each token, int64 [vocab_size, num_chosen]; None without a name.

    Raises `ModelError` for unknown ones, and for a token with one expert twice.
    """
    if name is None:
        return None
    experts = config.experts
    assert experts is not None
    stored = checkpoint.view(name, (config.vocab_size, experts.num_chosen), torch.int64)
    if not stored.is_meta and not 0 <= int(stored.min()) <= int(stored.max()) < experts.num_experts:
        raise ModelError(f"tensor {name} has numbers that are none of the {experts.num_experts} experts")
    if not stored.is_meta and bool((stored.sort(-1).values.diff(dim=-1) == 0).any()):
        raise ModelError(f"tensor {name} names an expert twice for one token; each of its experts must be another")
    return platform.place_weight(stored, torch.int64)
