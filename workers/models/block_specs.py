"""The description of Inkling 2's layers: attention with bounded queries and keys, and reads of blocks of layers.

Plain data, as `specs.py` is, which makes layers of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from manta.workers.models.weight_specs import LinearSpec, NormSpec, TensorSpec


class DistanceSpec(NamedTuple):
    """Biases on the products of queries and keys that depend on their distance (Inkling): `numbers(x) @ profiles` is
    the bias for each distance.
    """

    numbers: LinearSpec
    """The linear from hidden states to the numbers of all query heads."""
    profiles: TensorSpec
    """[rank, distances]"""


class ConvolutionSpec(NamedTuple):
    """A convolution over keys or values of a token and earlier ones, which is added to them."""

    taps: TensorSpec
    """[channels, 1, width], whose last number is that of the newest token; with `added` [channels, width], whose first
    number is.
    """
    added: LinearSpec | None = None
    """The linear from hidden states to what is added to the taps of each head; None for nothing."""


class ClippedAttentionSpec(NamedTuple):
    """Grouped-query attention without positions, whose queries and keys are not longer than a bound (Inkling 2). Each
    token has a sink for each head, and a gate for each value.
    """

    query: LinearSpec
    query_scale: TensorSpec
    """[num_heads, head_dim]: factors on queries before their length is bounded."""
    key: LinearSpec
    value: LinearSpec
    convolutions: tuple[ConvolutionSpec, ConvolutionSpec]
    """Those of keys and of values."""
    sinks: LinearSpec
    """The linear from hidden states to a logit of each query head, which takes part in the softmax and has no value."""
    distances: DistanceSpec
    distance_scale: TensorSpec
    """[num_heads, rank]: factors on the numbers for distances before their length is bounded."""
    gate: LinearSpec
    output: LinearSpec

    def linears(self) -> Iterator[LinearSpec]:
        yield from (self.query, self.key, self.value, self.sinks, self.distances.numbers, self.gate, self.output)
        yield from (each.added for each in self.convolutions if each.added is not None)

    def norms(self) -> Iterator[NormSpec]:
        yield from ()

    def tensors(self) -> Iterator[TensorSpec]:
        yield from (self.query_scale, self.distances.profiles, self.distance_scale)
        yield from (each.taps for each in self.convolutions)


class MessageGateSpec(NamedTuple):
    """The way in which a layer's next pass takes up a message `m` of the pass before into what it reads, `x`:
    `(1 - tanh(forgetting(y))) * x + tanh(taking(y)) * m`, where `y = down([norm(x), norm(m)])`.
    """

    down: LinearSpec
    forgetting: LinearSpec
    taking: LinearSpec


class BlockReadsSpec(NamedTuple):
    """How the parts of a layer read the blocks of layers before them: by a mean of their norms, whose shares are a
    softmax of products with a learned query.
    """

    attention: TensorSpec | None
    """[hidden], or [3, hidden] for queries, keys and values; None for the first layer, which reads the embedding."""
    input_norms: tuple[NormSpec, ...]
    """Those of what attention reads: one, or those for queries, keys and values."""
    mlp: TensorSpec
    """[hidden]"""
    gates: tuple[MessageGateSpec, ...] = ()
    """Those of queries, keys, values and MLP in a layer that runs several times; none in others."""

    def linears(self) -> Iterator[LinearSpec]:
        for gate in self.gates:
            yield from gate

    def norms(self) -> Iterator[NormSpec]:
        yield from self.input_norms

    def tensors(self) -> Iterator[TensorSpec]:
        yield self.mlp
        if self.attention is not None:
            yield self.attention


class BlockEndsSpec(NamedTuple):
    """The reads of blocks outside of layers."""

    final: TensorSpec
    """[hidden]: the query of what the last norm reads."""
    messages: tuple[TensorSpec, TensorSpec] | None
    """[2 * layers of the loop, hidden] each: the queries of messages, for each layer those for its queries and its MLP,
    and those for its keys and its values; None without a loop.
    """
