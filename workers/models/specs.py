"""The description of a model's weights: its layers and what is around them.

A description holds only names and sizes and imports no framework, so the workers of all frameworks read it. The names
are those of Hugging Face's checkpoints. The split over ranks is Megatron-LM's (Shoeybi et al., 2019).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from manta.workers.models.block_indexer import BlockIndexerSpec
from manta.workers.models.compressed_specs import CompressedAttentionSpec
from manta.workers.models.model_config import IndexerShape, LatentShape
from manta.workers.models.ngrams import NgramSpec
from manta.workers.models.recurrent_shapes import RecurrentKind, RecurrentShape
from manta.workers.models.weight_specs import ConnectionSpec, LinearSpec, NormSpec, Split, TensorSpec, WeightPart


class DistanceSpec(NamedTuple):
    """Biases on the products of queries and keys that depend on their distance (Inkling): `numbers(x) @ profiles` is
    the bias for each distance.
    """

    numbers: LinearSpec
    """The linear from hidden states to the numbers of all query heads."""
    profiles: TensorSpec
    """[rank, distances]"""


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
    gate: LinearSpec | None = None
    """The linear from hidden states to numbers whose sigmoids multiply the attended values: one for each value
    (Qwen3-Next), or one for each head (LFM3).
    """
    v_norm: NormSpec | None = None
    """Norm of each value head over its dimension (Gemma 4)."""
    value_dim: int | None = None
    """Width of a value, if it is narrower than a key (MiMo-V2)."""
    indexer: BlockIndexerSpec | None = None
    """The choice of blocks of tokens; None if attention reads all (Qwen4-Exp)."""
    convolutions: tuple[TensorSpec, TensorSpec] | None = None
    """The filters [channels, 1, width] of convolutions over keys and over values, whose results are added to these;
    None for none (Inkling).
    """
    distances: DistanceSpec | None = None
    """Biases by distance; None for none."""

    @property
    def reads_other_layer(self) -> bool:
        """Whether `qkv` has queries only, because the keys and values are those of an earlier layer."""
        return len(self.qkv.parts) == 1 and self.k_norm is None

    @property
    def has_wide_norms(self) -> bool:
        """Whether `q_norm` and `k_norm` are over all heads together."""
        return self.q_norm is not None and self.q_norm.split is not Split.NOTHING

    def linears(self) -> Iterator[LinearSpec]:
        yield from (linear for linear in (self.qkv, self.gate, self.output) if linear is not None)
        if self.indexer is not None:
            yield from self.indexer.linears()
        if self.distances is not None:
            yield self.distances.numbers

    def norms(self) -> Iterator[NormSpec]:
        yield from (norm for norm in (self.q_norm, self.k_norm, self.v_norm) if norm is not None)
        if self.indexer is not None:
            yield from self.indexer.norms()

    def tensors(self) -> Iterator[TensorSpec]:
        yield from self.convolutions or ()  # a model's parameters are counted without sinks
        if self.distances is not None:
            yield self.distances.profiles


class ShortConvSpec(NamedTuple):
    """A gated short convolution (LFM2): `output(c * convolution(b * x))`, where `input` gives b, c and x. Its state is
    the last inputs of the convolution.
    """

    input: LinearSpec
    """The linear from hidden states to b, c and x, one after the other."""
    kernel: TensorSpec
    """[channels, 1, width]: a filter for each channel, whose last number is that of the newest token."""
    bias: TensorSpec | None
    """[channels]"""
    output: LinearSpec

    def linears(self) -> Iterator[LinearSpec]:
        yield from (self.input, self.output)

    def norms(self) -> Iterator[NormSpec]:
        yield from ()

    def tensors(self) -> Iterator[TensorSpec]:
        yield from (tensor for tensor in (self.kernel, self.bias) if tensor is not None)


class RecurrentSpec(NamedTuple):
    """A recurrent mixer. Its module in `workers/decoders/mixers/` says which weights it has, by name."""

    kind: RecurrentKind
    shape: RecurrentShape
    """The sizes of the whole mixer."""
    inputs: dict[str, LinearSpec]
    output: LinearSpec
    pieces: dict[str, tuple[TensorSpec, ...]]
    """Other tensors, in float32: each is its pieces one after the other."""

    def linears(self) -> Iterator[LinearSpec]:
        yield from (*self.inputs.values(), self.output)

    def norms(self) -> Iterator[NormSpec]:
        yield from ()

    def tensors(self) -> Iterator[TensorSpec]:
        for pieces in self.pieces.values():
            yield from pieces


class IndexerSpec(NamedTuple):
    """The part of latent attention that chooses tokens, whose sizes are in `shape`. Each rank has all of it."""

    shape: IndexerShape
    queries: LinearSpec
    """The linear from the queries' latent vector to the queries of all of its heads."""
    keys: LinearSpec
    """The linear from hidden states to the key, and with pools to the logarithms of its weight in its pool."""
    key_norm: NormSpec
    key_bias: TensorSpec
    """[head_dim]: what is added to the normed key."""
    shares: LinearSpec
    """The linear from hidden states to a number for each head."""
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
    latent_norm: NormSpec
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

    def linears(self) -> Iterator[LinearSpec]:
        linears = (self.inputs, self.queries, self.expansion, self.gate, self.output)
        yield from (linear for linear in linears if linear is not None)
        if self.indexer is not None:
            yield from self.indexer.linears()

    def norms(self) -> Iterator[NormSpec]:
        if self.query_norm is not None:
            yield self.query_norm
        yield self.latent_norm
        if self.key_norm is not None:
            yield self.key_norm
        if self.indexer is not None:
            yield self.indexer.key_norm

    def tensors(self) -> Iterator[TensorSpec]:
        if self.indexer is not None:
            yield self.indexer.key_bias
            if self.indexer.pool_biases is not None:
                yield self.indexer.pool_biases


class SideBySideSpec(NamedTuple):
    """Attention and a recurrent mixer with the same input, whose results are summed (Falcon-H1)."""

    attention: AttentionSpec
    recurrent: RecurrentSpec

    def linears(self) -> Iterator[LinearSpec]:
        yield from (*self.attention.linears(), *self.recurrent.linears())

    def norms(self) -> Iterator[NormSpec]:
        yield from (*self.attention.norms(), *self.recurrent.norms())

    def tensors(self) -> Iterator[TensorSpec]:
        yield from (*self.attention.tensors(), *self.recurrent.tensors())


MixerSpec = (
    AttentionSpec | LatentAttentionSpec | CompressedAttentionSpec | ShortConvSpec | RecurrentSpec | SideBySideSpec
)
"""The part of a layer that combines tokens. Each kind lists its weights, and has an `output` linear, whose inputs ranks
split, or two mixers.
"""


class GatedMlpSpec(NamedTuple):
    """`down(activation(gate(x)) * up(x))`, or `down(activation(up(x)))` if `gated` has no gate."""

    gated: LinearSpec
    down: LinearSpec

    def linears(self) -> Iterator[LinearSpec]:
        yield from self

    def or_as(self, other: GatedMlpSpec) -> GatedMlpSpec:
        """Returns the same MLP, which some checkpoints store as `other`."""
        return GatedMlpSpec(self.gated.or_as(other.gated), self.down.or_as(other.down))


class DeepRouterSpec(NamedTuple):
    """An MLP before a router (ZAYA): `linear(norm(down(x) + scale * that of the layer before))`, with GELU after each
    linear.
    """

    down: LinearSpec
    previous_scale: str | None
    """The tensor [width] of factors on the rows of the layer before; None in the first layer."""
    norm: NormSpec
    hidden: tuple[LinearSpec, LinearSpec]

    def linears(self) -> Iterator[LinearSpec]:
        yield from (self.down, *self.hidden)


class ExpertsSpec(NamedTuple):
    """A mixture of experts (Shazeer et al., 2017): the results of the experts that a router chooses, weighted and
    summed. `ExpertsConfig` says how it chooses.
    """

    router: LinearSpec
    experts: tuple[GatedMlpSpec, ...]
    choice_bias: str | None = None
    """The tensor [num_experts] that is added to the scores for the choice alone (DeepSeek-V3)."""
    may_lack_choice_bias: bool = False
    """Whether checkpoints without this tensor are served, as if it were zeros (A.X K1)."""
    shared: GatedMlpSpec | None = None
    """The expert that computes every token."""
    shared_gate: LinearSpec | None = None
    """The linear to one number, whose sigmoid multiplies the result of `shared` (Qwen2-MoE)."""
    held: range | None = None
    """The experts that this rank has, whole; None if it has its share of each one."""
    deep_router: DeepRouterSpec | None = None
    """What comes before `router`; None if it reads what experts read."""
    table: str | None = None
    """The tensor [vocab_size, num_chosen] of the experts of each token, which replaces the choice by scores; None for
    none.
    """

    @property
    def own(self) -> tuple[GatedMlpSpec, ...]:
        """The experts that this rank has, or of which it has a share."""
        return self.experts if self.held is None else self.experts[self.held.start : self.held.stop]

    def linears(self) -> Iterator[LinearSpec]:
        yield self.router
        if self.deep_router is not None:
            yield from self.deep_router.linears()
        for expert in self.experts:
            yield from expert
        if self.shared is not None:
            yield from self.shared
        if self.shared_gate is not None:
            yield self.shared_gate


class ExpertsBesideSpec(NamedTuple):
    """Experts beside a layer's MLP (Gemma 4). They read the residual stream that the MLP reads, after a norm of their
    own, and each of the two results has a norm before they are summed.
    """

    experts: ExpertsSpec
    input_norm: NormSpec
    output_norm: NormSpec
    mlp_norm: NormSpec
    """The norm of the MLP's result."""
    router_scale: str
    """The tensor [hidden] that multiplies the normed rows of the router."""
    share_scales: str
    """The tensor [num_experts] that multiplies the shares of chosen experts."""

    def linears(self) -> Iterator[LinearSpec]:
        yield from self.experts.linears()

    def norms(self) -> Iterator[NormSpec]:
        yield from (self.input_norm, self.output_norm, self.mlp_norm)


class LowRankSpec(NamedTuple):
    """Products of two narrow linears, added to the outputs of a linear that several layers share."""

    down: LinearSpec
    """The linear to the narrow vectors of all `ups`, one after the other."""
    ups: tuple[LinearSpec, ...]
    """The linears to the outputs, one after the other."""

    def linears(self) -> Iterator[LinearSpec]:
        yield from (self.down, *self.ups)


class SharedBlockSpec(NamedTuple):
    """Attention and an MLP before a layer's mixer (Zamba). They read the residual stream and the embedding, one after
    the other, and their result is added to what the mixer reads. Several layers share all weights but low-rank ones.
    """

    input_norm: NormSpec
    attention: AttentionSpec
    attention_adapter: LowRankSpec | None
    """The low-rank part of the linear to queries, keys and values; None for none."""
    mlp_norm: NormSpec
    mlp: GatedMlpSpec
    """The MLP, whose linear to gates and what they let through has no activation."""
    mlp_adapter: LowRankSpec | None
    """The low-rank part of that linear; None for none."""
    result: LinearSpec
    """The layer's own linear from the MLP's result to what is added."""
    mixer_norm: NormSpec
    """The norm of the sum that the mixer reads."""
    is_first: bool
    """Whether no earlier layer has this block."""

    def linears(self) -> Iterator[LinearSpec]:
        if self.is_first:
            yield from (*self.attention.linears(), *self.mlp.linears())
        for adapter in (self.attention_adapter, self.mlp_adapter):
            if adapter is not None:
                yield from adapter.linears()
        yield self.result

    def norms(self) -> Iterator[NormSpec]:
        if self.is_first:
            yield from (self.input_norm, self.mlp_norm)
        yield self.mixer_norm


class UpdatesSpec(NamedTuple):
    """A layer's alternating updates of several residual streams (Baykal et al., 2023), and its residual of low rank
    beside attention (Menghani et al., 2024), as in Gemma 3n.
    """

    router_norm: NormSpec
    router: LinearSpec
    prediction: LinearSpec
    correction: LinearSpec
    output_scale: str | None
    """The tensor [hidden] that multiplies the first stream where the layer's own input is gated; None for none."""
    low_rank: tuple[LinearSpec, LinearSpec]
    low_rank_norm: NormSpec

    def linears(self) -> Iterator[LinearSpec]:
        yield from (self.router, self.prediction, self.correction, *self.low_rank)

    def norms(self) -> Iterator[NormSpec]:
        yield from (self.router_norm, self.low_rank_norm)


class StreamsSpec(NamedTuple):
    """The linears between the embedding and all residual streams but the first, and from these to the last norm."""

    spread: tuple[LinearSpec, ...]
    gather: tuple[LinearSpec, ...]


class NormGateSpec(NamedTuple):
    """Numbers computed of a norm's result, whose sigmoids multiply it (A.X K2): `x * sigmoid(up(silu(down(x))))`."""

    down: LinearSpec
    up: LinearSpec

    def linears(self) -> Iterator[LinearSpec]:
        yield from self


class LayerInputSpec(NamedTuple):
    """The part that a layer adds to the residual stream after its MLP (Gemma 4):
    `norm(projection(activation(gate(stream)) * input))`, where the input is the layer's own.
    """

    gate: LinearSpec
    projection: LinearSpec
    norm: NormSpec

    def linears(self) -> Iterator[LinearSpec]:
        yield from (self.gate, self.projection)


class LayerInputsSpec(NamedTuple):
    """The inputs that each layer has of its own: rows of a table, and a normed product of the embedding, added."""

    table: WeightPart
    """The lookup table, whose rows hold the inputs of all layers."""
    width: int
    projection: LinearSpec
    norm: NormSpec


class ScalingSpec(NamedTuple):
    """Biases and factors on a part's result and on the residual stream, before they are added (ZAYA)."""

    update: tuple[str, str]
    """The tensors [hidden] of the biases, which are added first, and of the factors on the part's result."""
    stream: tuple[str, str]
    """Those of the residual stream."""


class LayerSpec(NamedTuple):
    """A layer adds its mixer's result to the residual stream, then its MLP's. A mixer combines tokens. Each may have a
    norm before and one after: `x += output_norm(mixer(input_norm(x)))`. A layer may have only one of the two, whose
    norm before is `input_norm`.
    """

    input_norm: NormSpec | None
    mixer: MixerSpec | None
    mlp_norm: NormSpec | None
    mlp: GatedMlpSpec | ExpertsSpec | None
    mixer_output_norm: NormSpec | None = None
    mlp_output_norm: NormSpec | None = None
    is_parallel: bool = False
    """Whether the MLP gets what attention gets, the residual stream before it after `input_norm`."""
    stream_factors: tuple[float, float] | None = None
    """Factors on the norms before mixer and MLP, whose results replace the residual stream (MiniMax); None leaves the
    stream as it is.
    """
    beside: ExpertsBesideSpec | None = None
    """Experts beside the MLP; None for none."""
    own_input: LayerInputSpec | None = None
    """The sum's part of the layer's own input; None in families without it."""
    scalar: str | None = None
    """The tensor [1] that multiplies the residual stream after the layer; None for none (Gemma 4)."""
    block: SharedBlockSpec | None = None
    """The block before the mixer, which has the norm before it; None for none."""
    updates: UpdatesSpec | None = None
    """The updates of several residual streams; None in families with one."""
    shortcut: ExpertsSpec | None = None
    """Experts that read what the MLP reads, and whose result is added after the next layer's MLP (LongCat-Flash)."""
    input_gate: NormGateSpec | None = None
    """The gate on the result of `input_norm`, and that on `mlp_norm`'s; None for none."""
    mlp_gate: NormGateSpec | None = None
    mixer_scaling: ScalingSpec | None = None
    """Biases and factors where the mixer's result is added; None for none. `mlp_scaling` are those of the MLP's."""
    mlp_scaling: ScalingSpec | None = None
    connections: tuple[ConnectionSpec, ...] = ()
    """How mixer and MLP read and write the residual streams (`ModelConfig.connections`); none for one stream."""
    joins_input: bool = False
    """Whether the mixer reads the layer's own input and the norm of the residual stream, side by side (EAGLE-3)."""
    stream_shares: tuple[LinearSpec, LinearSpec] | None = None
    """The linears from the norms of all residual streams to a number for each stream. Twice its sigmoid multiplies what
    is added to the stream: the mixer's result, and the MLP's. None in families with one stream (Qwen4-Exp).
    """
    ngrams: NgramSpec | None = None
    """The tables whose rows are added before the mixer; None for none."""
    convolutions: tuple[TensorSpec, TensorSpec] | None = None
    """The filters [hidden, 1, width] of convolutions over the mixer's results and over the MLP's, which are added to
    these; None for none (Inkling).
    """
    mlp_scale: str | None = None
    """The tensor [1] that multiplies the MLP's result; None for none."""
    stream_scale: float = 1.0
    """Factor on the residual stream after a layer without `scalar` (RWKV)."""

    @property
    def norm_gates(self) -> tuple[NormGateSpec | None, NormGateSpec | None]:
        return self.input_gate, self.mlp_gate

    @property
    def attention(self) -> AttentionSpec:
        """The mixer of a layer with attention."""
        assert isinstance(self.mixer, AttentionSpec)
        return self.mixer

    def norms(self) -> Iterator[NormSpec]:
        """Yields every norm of the layer."""
        around = (self.input_norm, self.mixer_output_norm, self.mlp_norm, self.mlp_output_norm)
        yield from (norm for norm in around if norm is not None)
        if self.own_input is not None:
            yield self.own_input.norm
        for part in (self.beside, self.mixer, self.block, self.updates, self.ngrams):
            if part is not None:
                yield from part.norms()

    def linears(self) -> Iterator[LinearSpec]:
        """Yields every linear of the layer."""
        others = self.updates, self.shortcut, *self.norm_gates
        for part in (self.mixer, self.mlp, self.beside, self.own_input, self.block, self.ngrams, *others):
            if part is not None:
                yield from part.linears()
        yield from self.stream_shares or ()

    def tensors(self) -> Iterator[TensorSpec]:
        """Yields every other tensor of the layer that counts as a parameter."""
        for part in (self.mixer, *self.connections):
            if part is not None:
                yield from part.tensors()
        yield from self.convolutions or ()


class DecoderSpec(NamedTuple):
    """A whole decoder-only model."""

    embedding: WeightPart
    """The lookup table: a row for each token."""
    layers: list[LayerSpec]
    final_norm: NormSpec
    head: LinearSpec
    """The linear from hidden states to logits. A tied head has the embedding's name."""
    layer_inputs: LayerInputsSpec | None = None
    """Inputs that each layer has of its own; None in families without them."""
    streams: StreamsSpec | None = None
    """The linears around several residual streams; None in families with one."""
    unread: tuple[str, ...] = ()
    """Beginnings of the names of tensors that checkpoints may have and no token needs."""
    embedding_scaling: tuple[str, str] | None = None
    """The tensors [hidden] of biases and factors on embeddings; None for none."""
    final_gate: NormGateSpec | None = None
    """The gate on the result of `final_norm`, which is that of several residual streams; None for none."""
    embedding_norm: NormSpec | None = None
    """The norm of embeddings; None for none."""
    gathering: ConnectionSpec | None = None
    """The shares by which the last norm reads the residual streams of `ModelConfig.connections`."""

    def linears(self) -> Iterator[LinearSpec]:
        """Yields every linear of the model."""
        yield self.head
        if self.layer_inputs is not None:
            yield self.layer_inputs.projection
        if self.streams is not None:
            yield from (*self.streams.spread, *self.streams.gather)
        if self.final_gate is not None:
            yield from self.final_gate.linears()
        for layer in self.layers:
            yield from layer.linears()

    def norms(self) -> Iterator[NormSpec]:
        """Yields every norm of the model."""
        yield self.final_norm
        if self.embedding_norm is not None:
            yield self.embedding_norm
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
        tensors = sum(math.prod(tensor.shape) for layer in self.layers for tensor in layer.tensors())
        return linears + heads + sum(norm.size for norm in self.norms()) + tensors

    @property
    def is_tied(self) -> bool:
        return self.head.name == self.embedding.name
