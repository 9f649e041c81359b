"""Compressed attention as the families describe it: `workers/decoders/compressed_attention.py` computes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from manta.workers.models.model_config import IndexerShape
from manta.workers.models.weight_specs import LinearSpec, NormSpec, TensorSpec


class CompressorSpec(NamedTuple):
    """The weights that make entries of their tokens' products (`CompressedShape`)."""

    numbers: LinearSpec
    """The linear from hidden states to the numbers of which entries are sums: of two series if entries overlap."""
    gates: LinearSpec
    """The linear to the logarithms of their weights."""
    biases: TensorSpec
    """[rate, out_features of `gates`]: what is added to these logarithms, by the token's place in the entry."""
    norm: NormSpec

    def linears(self) -> Iterator[LinearSpec]:
        yield from (self.numbers, self.gates)


class EntryIndexerSpec(NamedTuple):
    """The part of compressed attention that chooses entries. Each rank has all of it."""

    shape: IndexerShape
    keys: CompressorSpec
    """What makes the keys of entries."""
    queries: LinearSpec
    """The linear from the queries' latent vector to the queries of all of its heads."""
    shares: LinearSpec
    """The linear from hidden states to a number for each head."""

    def linears(self) -> Iterator[LinearSpec]:
        yield from (*self.keys.linears(), self.queries, self.shares)


class CompressedAttentionSpec(NamedTuple):
    """Attention over the last tokens and over entries, whose sizes are in `CompressedShape`. Ranks split the query
    heads. Each has the whole key, and makes all entries.
    """

    inputs: LinearSpec
    """The linear from hidden states to the latent vector of the queries, and to the key."""
    query_norm: NormSpec
    queries: LinearSpec
    """The linear from the queries' latent vector to the queries of all heads."""
    head_norm: NormSpec
    """The norm of each query head, which has no weight."""
    key_norm: NormSpec
    sinks: str
    """The tensor [num_heads] of attention sinks, as those of `AttentionSpec`."""
    group_outputs: LinearSpec
    """The linear of each group of heads to narrower values: the groups' rows one after the other."""
    output_rank: int
    """Rows of each group."""
    output: LinearSpec
    entries: CompressorSpec | None
    """What makes entries; None if the layer attends to the last tokens alone."""
    indexer: EntryIndexerSpec | None
    """The choice of entries; None if attention reads all."""

    def linears(self) -> Iterator[LinearSpec]:
        yield from (self.inputs, self.queries, self.group_outputs, self.output)
        for part in (self.entries, self.indexer):
            if part is not None:
                yield from part.linears()

    def norms(self) -> Iterator[NormSpec]:
        yield from (self.query_norm, self.key_norm)
        if self.entries is not None:
            yield self.entries.norm
        if self.indexer is not None:
            yield self.indexer.keys.norm

    def tensors(self) -> Iterator[TensorSpec]:
        if self.entries is not None:
            yield self.entries.biases
        if self.indexer is not None:
            yield self.indexer.keys.biases
