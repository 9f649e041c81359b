"""The description of a model's weights: its tensors, the linears that they form, and how ranks split them.

A description holds only names and sizes and imports no framework, so the workers of all frameworks read it. The names
are those of Hugging Face's checkpoints. The split over ranks is Megatron-LM's (Shoeybi et al., 2019).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any, NamedTuple


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
    """The weight of a norm: the tensor `NAME.weight` [size]."""

    name: str
    size: int
    adds_one: bool = False
    """Whether the tensor holds the weight less one (Gemma)."""
    split: Split = Split.NOTHING
    """The split of a norm over the whole width of queries or keys, instead of over each head (OLMo 2)."""


class HeadOrder(NamedTuple):
    """The order of the rows of query and key heads. The kernels rotate dimension `i` of a head together with dimension
    `i + head_dim / 2`, so rows are read in an order in which the checkpoint's pairs lie like that. Products of queries
    and keys do not depend on the order.
    """

    head_dim: int
    rotary_dim: int
    """Number of first dimensions that rotate. `rope_table` gives the others a cosine of 1 and a sine of 0."""
    is_interleaved: bool
    """Whether the checkpoint's pairs are neighbours, instead of halves of the rotated dimensions."""

    def rows(self, num_rows: int) -> list[int]:
        """Returns the checkpoint's row for each row of the model."""
        half, rest = self.rotary_dim // 2, (self.head_dim - self.rotary_dim) // 2
        step, second = (2, 1) if self.is_interleaved else (1, half)
        first_half = [*range(0, half * step, step), *range(self.rotary_dim, self.rotary_dim + rest)]
        second_half = [*range(second, second + half * step, step), *range(self.rotary_dim + rest, self.head_dim)]
        return [head + row for head in range(0, num_rows, self.head_dim) for row in first_half + second_half]


class ExpertRows(NamedTuple):
    """The place of a part in a tensor of all experts of a layer (gpt-oss), [num_experts, in_features, columns], whose
    columns are the outputs of linears.
    """

    expert: int
    num_experts: int
    first: int = 0
    """The first column of the part."""
    step: int = 1
    """Distance between columns of the part."""

    def rows_of(self, outputs: Any) -> Any:
        """Returns the part's outputs, given an array of an expert whose first dimension is all of its outputs."""
        return outputs[self.first :: self.step]


class WeightPart(NamedTuple):
    """A linear as a checkpoint stores it: `NAME.weight` [out_features, in_features] and perhaps `NAME.bias`."""

    name: str
    out_features: int
    split: Split = Split.NOTHING
    order: HeadOrder | None = None
    """The order in which rows are read; None for the checkpoint's."""
    first_row: int = 0
    """The part's first row in the stored tensor."""
    stored_rows: int | None = None
    """Number of rows of the stored tensor, of which this part is a piece; None if it is the whole tensor."""
    expert: ExpertRows | None = None
    """The place in a tensor of all experts, named `NAME` and `NAME_bias`; None if the tensors are the part's own."""

    @property
    def weight_name(self) -> str:
        return f"{self.name}.weight" if self.expert is None else self.name

    @property
    def bias_name(self) -> str:
        return f"{self.name}.bias" if self.expert is None else f"{self.name}_bias"


class LinearSpec(NamedTuple):
    """One linear: parts with the same input, whose outputs are concatenated."""

    parts: tuple[WeightPart, ...]
    in_features: int
    has_bias: bool = False
    is_gated: bool = False
    """The first of two parts gates the second: the result is `activation(gate) * up` (Shazeer, 2020)."""
    splits_inputs: bool = False
    """Whether ranks split the inputs and sum their outputs."""

    @property
    def name(self) -> str:
        return " + ".join(dict.fromkeys(part.name for part in self.parts))

    @property
    def out_features(self) -> int:
        """Rows of the weight."""
        return sum(part.out_features for part in self.parts)

    def stored_as(self, name: str) -> LinearSpec:
        """Returns the same linear, whose parts the checkpoint stores as one tensor, one after the other."""
        starts = [sum(part.out_features for part in self.parts[:index]) for index in range(len(self.parts))]
        pieces = tuple(
            part._replace(name=name, first_row=start, stored_rows=self.out_features)
            for part, start in zip(self.parts, starts, strict=True)
        )
        return self._replace(parts=pieces)

    @property
    def gathers(self) -> bool:
        """Whether ranks gather the inputs before and the outputs after."""
        return any(part.split is Split.OUTPUTS for part in self.parts)


class AttentionSpec(NamedTuple):
    """Grouped-query attention (Ainslie et al., 2023). The window, the rope and the scale are in `ModelConfig`."""

    qkv: LinearSpec
    """The linear from hidden states to queries, keys and values of all heads."""
    output: LinearSpec
    q_norm: NormSpec | None = None
    """Norm of each query head over its dimension, before the rotation, or of all query heads together if it has a
    split; `k_norm` is that of key heads.
    """
    k_norm: NormSpec | None = None
    sinks: str | None = None
    """The tensor [num_heads] of attention sinks (gpt-oss): a logit of each query head that takes part in the softmax
    and has no value.
    """

    @property
    def has_wide_norms(self) -> bool:
        """Whether `q_norm` and `k_norm` are over all heads together."""
        return self.q_norm is not None and self.q_norm.split is not Split.NOTHING


class GatedMlpSpec(NamedTuple):
    """`down(activation(gate(x)) * up(x))`."""

    gated: LinearSpec
    down: LinearSpec


class ExpertsSpec(NamedTuple):
    """A mixture of experts (Shazeer et al., 2017): the results of the experts that a router chooses, weighted and
    summed. `ModelConfig` says how many it chooses.
    """

    router: LinearSpec
    experts: tuple[GatedMlpSpec, ...]

    def linears(self) -> Iterator[LinearSpec]:
        yield self.router
        for expert in self.experts:
            yield from expert


class LayerSpec(NamedTuple):
    """A layer adds its mixer's result to the residual stream, then its MLP's. A mixer combines tokens. Each may have a
    norm before and one after: `x += output_norm(mixer(input_norm(x)))`.
    """

    input_norm: NormSpec | None
    mixer: AttentionSpec
    mlp_norm: NormSpec | None
    mlp: GatedMlpSpec | ExpertsSpec
    mixer_output_norm: NormSpec | None = None
    mlp_output_norm: NormSpec | None = None
    is_parallel: bool = False
    """Whether the MLP gets what attention gets, the residual stream before it after `input_norm`."""

    def norms(self) -> Iterator[NormSpec]:
        """Yields every norm of the layer."""
        around = (self.input_norm, self.mixer_output_norm, self.mlp_norm, self.mlp_output_norm)
        yield from (norm for norm in (*around, self.mixer.q_norm, self.mixer.k_norm) if norm is not None)


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
            yield from (layer.mixer.qkv, layer.mixer.output)
            yield from layer.mlp if isinstance(layer.mlp, GatedMlpSpec) else layer.mlp.linears()

    def norms(self) -> Iterator[NormSpec]:
        """Yields every norm of the model."""
        yield self.final_norm
        for layer in self.layers:
            yield from layer.norms()

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
