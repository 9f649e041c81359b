"""The description of latent attention and of the indexer that chooses the tokens which it reads.

Plain data, as `specs.py` is, which makes layers of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from manta.workers.models.model_config import IndexerShape, LatentShape
from manta.workers.models.weight_specs import LinearSpec, NormSpec, TensorSpec


class GrowthSpec(NamedTuple):
    """Factors on the queries of each head that grow with their position (Mistral Large 4):
    `rate * ln(position + 1) + bias`. The tensors are [num_heads].
    """

    rate: str
    bias: str


class IndexerSpec(NamedTuple):
    """The part of latent attention that chooses tokens, whose sizes are in `shape`. Each rank has all of it."""

    shape: IndexerShape
    queries: LinearSpec
    """The linear to the queries of all of its heads: from the queries' latent vector, or with a `query_norm` from the
    norm of hidden states.
    """
    keys: LinearSpec
    """The linear from hidden states to the key, and with pools to the logarithms of its weight in its pool."""
    key_norm: NormSpec
    key_bias: TensorSpec
    """[head_dim]: what is added to the normed key."""
    shares: LinearSpec
    """The linear from hidden states to a number for each head."""
    query_norm: NormSpec | None = None
    """The norm of hidden states, which subtracts their mean; None if queries are made of their latent vector."""
    growth: GrowthSpec | None = None
    """Factors on the queries; None for none."""
    place: int = 0
    """The place of its key among those that are cached beside one latent vector."""
    pool_biases: TensorSpec | None = None
    """[pool_len, head_dim]: what is added to the logarithms of weights, by the token's place in its pool; None if there
    are no pools.
    """

    def linears(self) -> Iterator[LinearSpec]:
        yield from (self.queries, self.keys, self.shares)


class LatentAttentionSpec(NamedTuple):
    """Latent attention. Ranks split the heads. Each has the whole latent vector."""

    shape: LatentShape
    """The sizes of this layer's attention."""
    head_dim: int
    """Width of a cached token (`ModelConfig.latent`)."""
    inputs: LinearSpec
    """The linear from hidden states to the latent vector of the queries, or to the queries of all heads, and to the
    cached latent vector with the key that rotates.
    """
    query_norm: NormSpec | None
    """The norm of the queries' latent vector; None if there is none."""
    queries: LinearSpec | None
    """The linear from the queries' latent vector to the queries of all heads; None if there is none."""
    latent_norm: NormSpec | None
    """The norm of the cached latent vector; None if that is the one of an earlier layer, which `inputs` does not give.
    """
    expansion: LinearSpec
    """The linear from the cached latent vector to the unrotated keys of all heads, then to their values."""
    output: LinearSpec
    indexer: IndexerSpec | None = None
    """The choice of tokens; None if attention reads all, or those that an earlier layer chose."""
    gate: LinearSpec | None = None
    """The linear from hidden states to numbers whose sigmoids multiply the heads' values: one for each head (Ling 3),
    or one for each value (HY 4); None for none.
    """
    sinks: str | None = None
    """The tensor [num_heads] of attention sinks, as those of `AttentionSpec`."""
    key_norm: NormSpec | None = None
    """The norm of the key that rotates, before its rotation; None if there is none (dots3.note)."""
    growth: GrowthSpec | None = None
    """Factors on the queries; None for none."""

    def linears(self) -> Iterator[LinearSpec]:
        linears = (self.inputs, self.queries, self.expansion, self.gate, self.output)
        yield from (linear for linear in linears if linear is not None)
        if self.indexer is not None:
            yield from self.indexer.linears()

    def norms(self) -> Iterator[NormSpec]:
        if self.query_norm is not None:
            yield self.query_norm
        if self.latent_norm is not None:
            yield self.latent_norm
        if self.key_norm is not None:
            yield self.key_norm
        if self.indexer is not None:
            yield self.indexer.key_norm
            if self.indexer.query_norm is not None:
                yield self.indexer.query_norm

    def tensors(self) -> Iterator[TensorSpec]:
        if self.indexer is not None:
            yield self.indexer.key_bias
            if self.indexer.pool_biases is not None:
                yield self.indexer.pool_biases
