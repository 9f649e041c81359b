"""The description of a model's weights: its tensors, the linears that they form, and how ranks split them.

A description holds only names and sizes and imports no framework, so the workers of all frameworks read it. The names
are those of Hugging Face's checkpoints. The split over ranks is Megatron-LM's (Shoeybi et al., 2019).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple


class Split(enum.Enum):
    """The way in which ranks split the outputs of a linear."""

    NOTHING = enum.auto()
    """Every rank has all outputs."""
    QUERY_HEADS = enum.auto()
    KV_HEADS = enum.auto()
    """KV heads; with fewer heads than ranks, several ranks hold the same head."""
    INNER = enum.auto()
    """The inner width of the MLP."""
    VOCABULARY = enum.auto()
    """Rows of the vocabulary, padded with zeros on the last ranks."""
    OUTPUTS = enum.auto()
    """Outputs without a structure, where ranks do not split the inputs and sum (`workers/parallel/split.py`)."""


class NormSpec(NamedTuple):
    """The weight of an RMS norm: the tensor `NAME.weight` [size]."""

    name: str
    size: int


class WeightPart(NamedTuple):
    """A linear as a checkpoint stores it: `NAME.weight` [out_features, in_features] and perhaps `NAME.bias`."""

    name: str
    out_features: int
    split: Split = Split.NOTHING


class LinearSpec(NamedTuple):
    """One linear: parts with the same input, whose outputs are concatenated."""

    parts: tuple[WeightPart, ...]
    in_features: int
    has_bias: bool = False
    is_gated: bool = False
    """The first of two parts gates the second: the result is `silu(gate) * up` (SwiGLU, Shazeer, 2020)."""
    splits_inputs: bool = False
    """Whether ranks split the inputs and sum their outputs."""

    @property
    def name(self) -> str:
        return " + ".join(part.name for part in self.parts)

    @property
    def out_features(self) -> int:
        """Rows of the weight."""
        return sum(part.out_features for part in self.parts)

    @property
    def gathers(self) -> bool:
        """Whether ranks gather the inputs before and the outputs after."""
        return any(part.split is Split.OUTPUTS for part in self.parts)


class AttentionSpec(NamedTuple):
    """Grouped-query attention (Ainslie et al., 2023) with rotary positions."""

    qkv: LinearSpec
    """The linear from hidden states to queries, keys and values of all heads."""
    output: LinearSpec
    q_norm: NormSpec | None = None
    """Norm of each query head over its dimension, before the rotation; `k_norm` is that of key heads."""
    k_norm: NormSpec | None = None


class GatedMlpSpec(NamedTuple):
    """`down(silu(gate(x)) * up(x))`."""

    gated: LinearSpec
    down: LinearSpec


class LayerSpec(NamedTuple):
    """A pre-norm layer: `x += attention(norm(x))`, then `x += mlp(norm(x))`."""

    input_norm: NormSpec
    attention: AttentionSpec
    mlp_norm: NormSpec
    mlp: GatedMlpSpec


class DecoderSpec(NamedTuple):
    """A whole decoder-only model."""

    embedding: WeightPart
    """The lookup table: a row for each token."""
    layers: list[LayerSpec]
    final_norm: NormSpec
    head: LinearSpec
    """The linear from hidden states to logits. A tied head has the embedding's name."""

    def linears(self) -> Iterator[LinearSpec]:
        """Yields every linear of the model."""
        yield self.head
        for layer in self.layers:
            yield from (layer.attention.qkv, layer.attention.output, layer.mlp.gated, layer.mlp.down)

    def norms(self) -> Iterator[NormSpec]:
        """Yields every norm of the model."""
        yield self.final_norm
        for layer in self.layers:
            attention = layer.attention
            yield from (layer.input_norm, layer.mlp_norm)
            yield from (norm for norm in (attention.q_norm, attention.k_norm) if norm is not None)

    def num_parameters(self) -> int:
        """Returns the number of weights, those of a tied head once."""
        linears = sum(
            linear.out_features * (linear.in_features + linear.has_bias)
            for linear in self.linears()
            if linear is not self.head
        )
        heads = (1 if self.is_tied else 2) * self.head.out_features * self.head.in_features
        return linears + heads + sum(norm.size for norm in self.norms())

    @property
    def is_tied(self) -> bool:
        return self.head.name == self.embedding.name
