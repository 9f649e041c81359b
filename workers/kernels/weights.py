"""The weights of a decoder, as the loader hands them to a platform and to the model: plain data, nothing computed.

They mirror the descriptions of `workers/models/specs.py`: norms are tensors, and linears are objects that keep their
weights to themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from manta.workers.kernels.block_weights import (
    BlockEndsWeights,
    BlockReadsWeights,
    ClippedAttentionWeights,
    DistanceWeights,
)
from manta.workers.kernels.linear_protocol import Linear as Linear
from manta.workers.kernels.protocol import RecurrentKernels
from manta.workers.kernels.quantized_weight import QuantizedWeight
from manta.workers.models.block_indexer import BlockIndexerShape
from manta.workers.models.model_config import ExpertsConfig, IndexerShape, LatentShape, ModelConfig
from manta.workers.models.recurrent_shapes import RecurrentKind, RecurrentShape

if TYPE_CHECKING:
    from manta.workers.kernels.latent_adapters import LatentAdapters
    from manta.workers.kernels.packed_files import PackedFiles


@dataclasses.dataclass(slots=True, frozen=True)
class LinearWeight:
    """A linear as the checkpoint has it, from which a platform makes the `Linear`."""

    name: str
    """The names of its parts in the checkpoint, for messages."""
    weight: torch.Tensor
    """[out_features, in_features] in `dtype`; a meta tensor where `quantized` is set. It may be a view of a file, or
    memory that is overwritten once the linear is made.
    """
    bias: torch.Tensor | None
    """[out_features] in `dtype`, on the device."""
    dtype: torch.dtype
    """The dtype of the activations."""
    gated: bool = False
    """The first half of the rows are a gate's, the second what it lets through: the result is `activation(gate) * up`,
    half as wide (Shazeer, 2020).
    """
    quantized: QuantizedWeight | None = None
    """The weight as integers, if the checkpoint stores it so."""
    rounded_to: int | None = None
    """Bits (`KeptBits`) in which the platform keeps `weight` when it makes the linear; None keeps its dtype."""
    activation: str = "silu"
    """The function of the gate, by its name in `ModelConfig.activation`."""
    gate_limit: float = 0.0
    """Bound of the gate and of what it lets through (`LinearSpec.gate_limit`); 0 for none."""
    gate_caps: tuple[float, ...] = ()
    """Soft bounds of both (`LinearSpec.gate_caps`); empty for none."""
    is_expert: bool = False
    """Whether a step reads it only if its rows choose it."""

    def dense(self) -> torch.Tensor:
        """Returns the weight [out_features, in_features] in `dtype`, computed anew if it is quantised."""
        return self.weight if self.quantized is None else self.quantized.dequantized(self.dtype)


Embedding = Callable[[torch.Tensor], torch.Tensor]
"""Token ids, int64 [num_tokens] -> [num_tokens, hidden] in the dtype of the activations, which may be written to."""


RowNorm = Callable[[torch.Tensor, RecurrentKernels], torch.Tensor]
"""Normalises rows [num_tokens, width]; of ranks, each has a part of the width."""


class RowSums(Protocol):
    """Sums over rows, of which each rank has a part [num_tokens, width]."""

    def __call__(self, x: torch.Tensor, size: int, kernels: RecurrentKernels) -> torch.Tensor:
        """Returns the sums of squares [num_tokens, 1] of rows of `size` numbers, given this rank's part."""
        ...

    def sums(self, x: torch.Tensor, size: int, sum_rows: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Returns the sums [num_tokens, 1] that `sum_rows` makes of such rows."""
        ...


class WeightContent(NamedTuple):
    """All that packed weights depend on beside the kernels."""

    now: str
    """The checkpoint's files as they are now, and what is made of them."""
    files: PackedFiles | None = None
    """The files in which they are kept, by the checkpoint's values; None if they are not."""


class SharedLinears(Protocol):
    """Makes the linears of one model while it is read, in memory that processes share."""

    @property
    def are_packed(self) -> bool:
        """Whether some process has packed these weights: then only their shapes are looked at."""
        ...

    @property
    def takes_memory(self) -> bool:
        """Whether no process of this machine holds these weights yet."""
        ...

    def make_linear(self, weight: LinearWeight) -> Linear: ...


MLP_BYTES = 32 << 20
"""Largest buffer of the widest activations on a CPU, which are made for as many rows at a time as fit. The C library
gives larger buffers back at once, and the system would zero new pages for the next ones.
"""


@dataclasses.dataclass(slots=True, frozen=True)
class BlockIndexerWeights:
    """The weights of `BlockIndexerSpec`."""

    shape: BlockIndexerShape
    projection: Linear
    """hidden -> (num_heads + 1) * head_dim: the queries of all heads, then the key."""
    query_norm: torch.Tensor
    key_norm: torch.Tensor


@dataclasses.dataclass(slots=True, frozen=True)
class AttentionWeights:
    qkv: Linear
    """hidden -> (num_heads + 2 * num_kv_heads) * head_dim: queries, keys, values."""
    output: Linear
    q_norm: torch.Tensor | None
    """[head_dim]; None in families that do not normalise heads. As is `k_norm`."""
    k_norm: torch.Tensor | None
    wide_norms: tuple[RowNorm, RowNorm] | None = None
    """Norms over all query heads and over all key heads, before the rotation; None in families without them."""
    sinks: torch.Tensor | None = None
    """float32 [num_heads]; None in families without attention sinks."""
    v_norm: torch.Tensor | None = None
    """[head_dim]; None in families that do not normalise values."""
    reads_other_layer: bool = False
    """Whether `qkv` gives queries only, and keys and values are those of an earlier layer."""
    value_dim: int | None = None
    """Width of a value, which is filled up with zeros to that of a key; None in families in which both are equal."""
    gate: Linear | None = None
    """hidden -> num_heads * head_dim, or num_heads, whose sigmoids multiply the attended values; None in families
    without.
    """
    indexer: BlockIndexerWeights | None = None
    """The choice of blocks of tokens; None if attention reads all."""
    convolutions: tuple[torch.Tensor, torch.Tensor] | None = None
    """float32 [channels, width], of keys and of values; None for none."""
    distances: DistanceWeights | None = None
    """Biases by distance; None for none."""


@dataclasses.dataclass(slots=True, frozen=True)
class ShortConvWeights:
    input: Linear
    """hidden -> 3 * channels: b, c and x."""
    kernel: torch.Tensor
    """float32 [channels, width]"""
    bias: torch.Tensor | None
    """float32 [channels]"""
    output: Linear


@dataclasses.dataclass(slots=True, frozen=True)
class RecurrentWeights:
    """The weights of `RecurrentSpec`, by the names that the mixer's module gives them."""

    kind: RecurrentKind
    shape: RecurrentShape
    """The sizes of this rank's share."""
    inputs: dict[str, Linear]
    output: Linear
    tensors: dict[str, torch.Tensor]
    """float32"""
    num_ranks: int
    squares_over_ranks: RowSums


@dataclasses.dataclass(slots=True, frozen=True)
class GrowthWeights:
    """The weights of `GrowthSpec`, float32 [num_heads]."""

    rate: torch.Tensor
    bias: torch.Tensor


@dataclasses.dataclass(slots=True, frozen=True)
class IndexerWeights:
    """The weights of `IndexerSpec`."""

    shape: IndexerShape
    queries: Linear
    keys: Linear
    key_norm: torch.Tensor
    """float32 [head_dim], as is `key_bias`."""
    key_bias: torch.Tensor
    shares: Linear
    """hidden -> num_heads, in float32."""
    query_norm: tuple[torch.Tensor, torch.Tensor] | None = None
    """float32 [hidden], factors and biases of the norm of hidden states of which queries are made; None if these are
    made of their latent vector.
    """
    growth: GrowthWeights | None = None
    place: int = 0
    """The place of its key among those that are cached beside one latent vector."""
    pool_biases: torch.Tensor | None = None
    """float32 [pool_len, head_dim], which are added to the logarithms of weights in a pool; None if there are no pools.
    """


@dataclasses.dataclass(slots=True, frozen=True)
class LatentAttentionWeights:
    """The weights of `LatentAttentionSpec`. The two weights between latent vectors and heads are laid out for cached
    tokens (`workers/decoders/latent_attention.py`).
    """

    shape: LatentShape
    inputs: Linear
    query_norm: torch.Tensor | None
    queries: Linear | None
    latent_norm: torch.Tensor | None
    """None if latent vectors are those of an earlier layer."""
    keys: torch.Tensor
    """[num_heads, plain_dim, head_dim]: from a head's unrotated query to a query of cached tokens."""
    values: torch.Tensor
    """[num_heads, head_dim, value_dim]: from attended cached tokens to a head's values."""
    output: Linear
    indexer: IndexerWeights | None = None
    """The choice of tokens; None if attention reads all, or those that an earlier layer chose."""
    gate: Linear | None = None
    """hidden -> num_heads, or num_heads * value_dim, whose sigmoids multiply the heads' values; None in families
    without.
    """
    sinks: torch.Tensor | None = None
    """float32 [num_heads]; None in families without attention sinks."""
    key_norm: torch.Tensor | None = None
    """[rope_dim], of the rotated key before its rotation; None in families without."""
    growth: GrowthWeights | None = None
    """Factors on the queries of each head; None for none."""
    adapters: LatentAdapters | None = None
    """What adapters add to the two weights; None if they take none."""


@dataclasses.dataclass(slots=True, frozen=True)
class CompressorWeights:
    """The weights of `CompressorSpec` but for its linears."""

    num_products: int
    """Numbers of a token for entries: as many as an entry has, or twice as many if entries overlap."""
    biases: torch.Tensor
    """float32 [num_terms, width of an entry]: what is added to the logarithms of the weights of an entry's tokens."""
    norm: torch.Tensor
    """[width of an entry]"""


@dataclasses.dataclass(slots=True, frozen=True)
class EntryIndexerWeights:
    """The weights of `EntryIndexerSpec` but for those that make the keys of entries."""

    shape: IndexerShape
    queries: Linear
    shares: Linear
    """hidden -> num_heads, in float32."""


@dataclasses.dataclass(slots=True, frozen=True)
class EntriesWeights:
    """The weights that make and choose the entries of a layer."""

    rate: int
    """Tokens that one entry stands for."""
    num_terms: int
    """Tokens that one entry is made of."""
    inputs: Linear
    """hidden -> for each of `compressors` its numbers, then the logarithms of their weights."""
    compressors: tuple[CompressorWeights, ...]
    """What makes the keys of attention, and perhaps those of the indexer."""
    indexer: EntryIndexerWeights | None
    """The choice of entries; None if attention reads all."""


@dataclasses.dataclass(slots=True, frozen=True)
class CompressedAttentionWeights:
    """The weights of `CompressedAttentionSpec`."""

    inputs: Linear
    query_norm: torch.Tensor
    queries: Linear
    head_norm: torch.Tensor
    key_norm: torch.Tensor
    sinks: torch.Tensor
    """float32 [num_heads]"""
    group_outputs: torch.Tensor
    """[num_groups, width of a group's values, output_rank]"""
    output: Linear
    entries: EntriesWeights | None
    """None if the layer attends to the last tokens alone."""


@dataclasses.dataclass(slots=True, frozen=True)
class SideBySideWeights:
    attention: AttentionWeights
    recurrent: RecurrentWeights


MixerWeights = (
    AttentionWeights
    | LatentAttentionWeights
    | CompressedAttentionWeights
    | ClippedAttentionWeights
    | ShortConvWeights
    | RecurrentWeights
    | SideBySideWeights
)


@dataclasses.dataclass(slots=True, frozen=True)
class GatedMlpWeights:
    gated: Linear
    """hidden -> intermediate: activation(gate) * up."""
    down: Linear


class Experts(Protocol):
    """The experts of a layer, on any platform."""

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Returns the weighted sum of the chosen experts' results for x [num_rows, hidden], float32. `chosen`, int64
        [num_rows, num_chosen], has different experts in a row, and `shares`, float32, their weights. A number that is
        none of the experts', such as -1, adds nothing.

        A row's results are added in the order of the experts, so they do not depend on the other rows.
        """
        ...


@dataclasses.dataclass(slots=True, frozen=True)
class DeepRouterWeights:
    """The weights of `DeepRouterSpec`, in float32."""

    down: Linear
    previous_scale: torch.Tensor | None
    norm: torch.Tensor
    hidden: tuple[Linear, Linear]


@dataclasses.dataclass(slots=True, frozen=True)
class ExpertsWeights:
    config: ExpertsConfig
    router: Linear
    """hidden -> num_experts, in float32 whatever the dtype of the activations is."""
    experts: Experts
    """Of ranks, each has a part of every expert's inner width, or some experts whole."""
    join: Callable[[torch.Tensor], torch.Tensor] | None
    """Sums the results [num_tokens, hidden] of ranks; None if each rank has whole ones."""
    choice_bias: torch.Tensor | None = None
    """float32 [num_experts], added to the scores for the choice alone; None for none."""
    shared: GatedMlpWeights | None = None
    """The expert that computes every token; None for none."""
    share_scales: torch.Tensor | None = None
    """float32 [num_experts], which multiply the shares of chosen experts; None for none."""
    shared_gate: Linear | None = None
    """hidden -> 1, whose sigmoid multiplies the result of `shared`; in float32. None for none."""
    deep_router: DeepRouterWeights | None = None
    """What comes before `router`; None if it reads what experts read."""
    table: torch.Tensor | None = None
    """int64 [vocab_size, num_chosen]: the experts of each token, whatever their scores are; None for none."""
    in_one_call: Linear | None = None
    """All of this as one linear of rows [num_tokens, hidden], with the same bits; None if the platform has none."""


@dataclasses.dataclass(slots=True, frozen=True)
class ExpertsBesideWeights:
    """The weights of `ExpertsBesideSpec`."""

    experts: ExpertsWeights
    input_norm: torch.Tensor
    output_norm: torch.Tensor
    mlp_norm: torch.Tensor
    router_norm: torch.Tensor
    """[hidden], of the norm whose result the router reads."""


@dataclasses.dataclass(slots=True, frozen=True)
class SharedBlockWeights:
    """The weights of `SharedBlockSpec`. Linears that layers share are one object, and low-rank parts are in linears."""

    input_norm: torch.Tensor
    """[2 * hidden]"""
    attention: AttentionWeights
    mlp_norm: torch.Tensor
    mlp: GatedMlpWeights
    """Its first linear gives gates and what they let through, one after the other."""
    result: Linear
    mixer_norm: torch.Tensor


@dataclasses.dataclass(slots=True, frozen=True)
class SparseGates:
    """The gates of an MLP that are turned off (Gemma 3n)."""

    width: int
    """Number of gates of all ranks together."""
    deviations: float
    """Standard deviations above their mean below which gates are off."""
    sums_over_ranks: RowSums


@dataclasses.dataclass(slots=True, frozen=True)
class UpdatesWeights:
    """The weights of `UpdatesSpec`. Router, prediction and correction are in float32."""

    router_norm: torch.Tensor
    router: Linear
    """hidden -> num_streams"""
    prediction: Linear
    """num_streams -> num_streams * num_streams"""
    correction: Linear
    """num_streams -> num_streams"""
    output_scale: torch.Tensor | None
    low_rank: tuple[Linear, Linear]
    low_rank_norm: torch.Tensor
    sparse_gates: SparseGates | None
    """Those of the layer's MLP, whose first linear then gives gates and what they let through; None for none."""


@dataclasses.dataclass(slots=True, frozen=True)
class StreamsWeights:
    """The weights of `StreamsSpec`."""

    spread: tuple[Linear, ...]
    gather: tuple[Linear, ...]


@dataclasses.dataclass(slots=True, frozen=True)
class ConnectionWeights:
    """The weights of `ConnectionSpec`, in float32."""

    shares: Linear
    """num_streams * hidden -> num_shares"""
    bases: torch.Tensor
    """[num_shares]"""
    scales: torch.Tensor
    """[num_shares]: the factor of each share."""


@dataclasses.dataclass(slots=True, frozen=True)
class NormGateWeights:
    """The weights of `NormGateSpec`."""

    down: Linear
    """hidden -> rank"""
    up: Linear


@dataclasses.dataclass(slots=True, frozen=True)
class NgramWeights:
    """The weights of `NgramSpec`. Norms are [num_streams * hidden]."""

    table_rows: tuple[int, ...]
    """Rows of each table, which lie one after the other in `table`."""
    multipliers: tuple[int, ...]
    """The hash's factors on the last tokens, the newest first."""
    table: Embedding
    """Rows of all tables, int64 [n] -> [n, row_width]."""
    keys: Linear
    values: Linear
    key_norm: torch.Tensor
    query_norm: torch.Tensor
    conv_norm: torch.Tensor
    kernel: torch.Tensor
    """float32 [channels, window + 1]: the taps with zeros between them."""


@dataclasses.dataclass(slots=True, frozen=True)
class LayerInputWeights:
    """The weights of `LayerInputSpec`."""

    gate: Linear
    projection: Linear
    norm: torch.Tensor


@dataclasses.dataclass(slots=True, frozen=True)
class LayerInputsWeights:
    """The weights of `LayerInputsSpec`."""

    table: Embedding
    projection: Linear
    norm: torch.Tensor


@dataclasses.dataclass(slots=True, frozen=True)
class ScalingWeights:
    """The weights of `ScalingSpec`, each [hidden]."""

    update_bias: torch.Tensor
    update_scale: torch.Tensor
    stream_bias: torch.Tensor
    stream_scale: torch.Tensor


@dataclasses.dataclass(slots=True, frozen=True)
class LayerWeights:
    """A layer of `LayerSpec`: norms are tensors [hidden], [2, hidden] with a bias, or None where a family has none."""

    input_norm: torch.Tensor | None
    mixer: MixerWeights | None
    mlp_norm: torch.Tensor | None
    mlp: GatedMlpWeights | ExpertsWeights | None
    mixer_output_norm: torch.Tensor | None = None
    mlp_output_norm: torch.Tensor | None = None
    is_parallel: bool = False
    stream_factors: tuple[float, float] | None = None
    beside: ExpertsBesideWeights | None = None
    own_input: LayerInputWeights | None = None
    scalar: float = 1.0
    """Factor on the residual stream after the layer."""
    block: SharedBlockWeights | None = None
    updates: UpdatesWeights | None = None
    shortcut: ExpertsWeights | None = None
    input_gate: NormGateWeights | None = None
    mlp_gate: NormGateWeights | None = None
    mixer_scaling: ScalingWeights | None = None
    mlp_scaling: ScalingWeights | None = None
    joins_input: bool = False
    stream_shares: tuple[Linear, Linear] | None = None
    """all streams' norms -> num_streams, in float32; of the mixer, and of the MLP."""
    ngrams: NgramWeights | None = None
    convolutions: tuple[torch.Tensor, torch.Tensor] | None = None
    """float32 [hidden, width], of the mixer's results and of the MLP's; None for none."""
    mlp_scale: float = 1.0
    """Factor on the MLP's result."""
    connections: tuple[ConnectionWeights, ...] = ()
    """Those of mixer and MLP; none for one residual stream."""
    reads: BlockReadsWeights | None = None


@dataclasses.dataclass(slots=True, frozen=True)
class DecoderWeights:
    embedding: Embedding
    layers: list[LayerWeights]
    final_norm: torch.Tensor
    head: Linear
    """hidden -> vocab_size; of ranks, only the one that draws gets them all."""
    layer_inputs: LayerInputsWeights | None = None
    streams: StreamsWeights | None = None
    embedding_scaling: tuple[torch.Tensor, torch.Tensor] | None = None
    """[hidden] each: biases, then factors on embeddings; None for none."""
    final_gate: NormGateWeights | None = None
    embedding_norm: torch.Tensor | None = None
    gathering: ConnectionWeights | None = None
    blocks: BlockEndsWeights | None = None
    rope_factors: torch.Tensor | None = None
    """float32 [rope_dim / 2], on the angles of each pair of dimensions; None for none."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the activations and norms. Linears may keep their weights in another one."""
        return self.final_norm.dtype


@dataclasses.dataclass(slots=True, frozen=True)
class DraftHeadWeights:
    """A draft head, as `DraftHeadSpec` of `workers/models/draft_heads.py` describes it."""

    embedding_norm: torch.Tensor
    hidden_norm: torch.Tensor
    join: Linear
    """2 * hidden -> hidden."""
    decoder: DecoderWeights
    """The head's layer and its last norm, between the model's embedding and output head."""


@dataclasses.dataclass(slots=True, frozen=True)
class Eagle3Weights:
    """A draft head, as `Eagle3Spec` of `workers/models/eagle3.py` describes it."""

    fuse: Linear
    """len(taps) * target_size -> hidden."""
    embedding_norm: torch.Tensor
    stream_norm: torch.Tensor | None
    """The norm of what the head's residual stream begins with; None if the stream begins before its norm."""
    decoder: DecoderWeights
    """The head's layer and its last norm, between its embedding and its output head."""
    target_ids: torch.Tensor | None
    """The model's token of each that the head drafts, int64 [vocab_size]; None if both have the same tokens."""


def max_mlp_rows(config: ModelConfig, dtype: torch.dtype) -> int:
    """Rows for which the widest activations are made at a time, at least 1."""
    return max(1, MLP_BYTES // (config.intermediate_size * dtype.itemsize))
