"""Reads a checkpoint and builds the model: each weight is packed by the platform as it is read.

No more than one weight is held twice. Called by the worker; chooses between the native decoder and transformers.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import overload

import msgspec
import torch

from manta.structured.host import give_back_freed_memory
from manta.workers.adapters.adapter_bank import AdapterBank
from manta.workers.adapters.expert_places import Join
from manta.workers.checkpoints.checkpoint import Checkpoint
from manta.workers.checkpoints.linear_reader import LinearReader
from manta.workers.checkpoints.unread_tensors import check_all_used
from manta.workers.decoders.convolved_attention import mixing_layout
from manta.workers.decoders.decoder import Decoder
from manta.workers.kept_weights import KEPT_BITS
from manta.workers.kernels.exponential import exponential
from manta.workers.kernels.linears import GatedLinear, LowRankLinear
from manta.workers.kernels.model_protocol import Model
from manta.workers.kernels.reference import activate
from manta.workers.kernels.weights import (
    AttentionWeights,
    ConnectionWeights,
    DecoderWeights,
    DeepRouterWeights,
    DraftHeadWeights,
    Eagle3Weights,
    Embedding,
    ExpertsBesideWeights,
    ExpertsWeights,
    GatedMlpWeights,
    LayerWeights,
    Linear,
    LinearWeight,
    MixerWeights,
    NormGateWeights,
    RecurrentWeights,
    RowNorm,
    ScalingWeights,
    SharedBlockWeights,
    SharedLinears,
    ShortConvWeights,
    SideBySideWeights,
)
from manta.workers.load_meter import LOAD_METER
from manta.workers.models.block_specs import ClippedAttentionSpec
from manta.workers.models.compressed_specs import CompressedAttentionSpec
from manta.workers.models.draft_heads import DraftHeadSpec
from manta.workers.models.eagle3 import Eagle3Spec
from manta.workers.models.latent_specs import LatentAttentionSpec
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.recurrent_shapes import ConvolvedShape
from manta.workers.models.specs import (
    AttentionSpec,
    DeepRouterSpec,
    ExpertsBesideSpec,
    ExpertsSpec,
    GatedMlpSpec,
    LayerSpec,
    LowRankSpec,
    MixerSpec,
    NormGateSpec,
    RecurrentSpec,
    ScalingSpec,
    SharedBlockSpec,
    SideBySideSpec,
)
from manta.workers.models.weight_specs import ConnectionSpec, LinearSpec, NormSpec, Split, TensorSpec, WeightPart
from manta.workers.parallel.group import Group, OneRank, rank_shard
from manta.workers.parallel.sharded_layers import (
    ExactExpertsOfRanks,
    ExpertsOfRank,
    GatheredHead,
    SquaresOverRanks,
    VocabularyParallelEmbedding,
    WideNorm,
)
from manta.workers.parallel.split import check_num_ranks, describe_share, shard_config
from manta.workers.platforms import Platform
from manta.workers.torch_worker.block_loader import load_clipped_attention, load_distances, load_ends, load_reads
from manta.workers.torch_worker.embedding_lookup import load_lookup
from manta.workers.torch_worker.mixer_loader import (
    PartReader,
    load_compressed_attention,
    load_connection,
    load_latent_attention,
    load_table,
)
from manta.workers.torch_worker.room import check_room
from manta.workers.torch_worker.stream_loader import (
    Readers,
    load_block_indexer,
    load_layer_input,
    load_layer_inputs,
    load_ngrams,
    load_shares,
    load_streams,
    load_updates,
)
from manta.workers.torch_worker.weight_content import weight_content
from manta.workers.torch_worker.weight_platform import WeightPlatform

_ALWAYS = 1e30
"""A bias with which an expert is chosen for every token."""


def load_model(
    folder: str | pathlib.Path,
    config: ModelConfig,
    dtype: str,
    platform: Platform,
    whole: bool = True,
    group: Group | None = None,
    weights: str = "auto",
    exact: bool = False,
    expert_parallel: bool = False,
    bank: AdapterBank | None = None,
    kept_bytes: int = 0,
) -> Model:
    """Returns the model of a checkpoint in `bfloat16`, `float16` or `float32`, on the platform's device. With a `group`
    of ranks it is this one's share, which computes together with the others'.

    `weights` is the option of this name. If `whole` is False, `config` may have fewer layers than the checkpoint: the
    others are not read. With `exact` ranks split no sums, and with `expert_parallel` they divide the experts of layers.
    With a `bank` its linears take adapters. With `kept_bytes` packed weights are kept in files of at most that size.
    Raises `ModelError` naming a tensor that is missing, misshapen, or unexpected; if the weights exceed a CPU's free
    memory; and if the model cannot be split over so many ranks.
    """
    group = group or OneRank()
    if not config.native:
        check_num_ranks(config, group.num_ranks)
        if whole:
            check_room(pathlib.Path(folder), config, dtype, weights, platform, group.num_ranks)
        from manta.workers.decoders.transformers_model import TransformersModel  # seconds to import, and rarely needed

        return TransformersModel(folder, config, platform.torch_dtype(dtype), platform, KEPT_BITS[weights])
    content = weight_content(folder, config, dtype, group, weights, exact, expert_parallel, kept_bytes=kept_bytes)
    checkpoint = Checkpoint(folder)
    config = checkpoint.as_stored(config)
    share = shard_config(config, group.num_ranks, expert_parallel)
    with platform.shared_linears(content) as shared:
        if whole and (shared is None or shared.takes_memory):
            check_room(pathlib.Path(folder), config, dtype, weights, platform, group.num_ranks)
        read_ahead(checkpoint, group, shared)
        checkpoint.count_into(LOAD_METER)
        compute_dtype = platform.torch_dtype(dtype)
        loader = WeightLoader(
            checkpoint, config, compute_dtype, platform, group, weights, exact, expert_parallel, shared, bank
        )
        loaded = loader.load()
    if whole:
        check_all_used(checkpoint, config, loader.spec)
    if group.num_ranks > 1:
        embedding = VocabularyParallelEmbedding(loaded.embedding, group, share.vocab_size)
        head = GatheredHead(loaded.head, group, config.vocab_size)
        loaded = dataclasses.replace(loaded, embedding=embedding, head=head)
    return Decoder(share, loaded, platform)


def read_ahead(checkpoint: Checkpoint, group: Group, shared: SharedLinears | None) -> None:
    """Has the system read all of a cold file while the first weights are packed. Ranks read parts of it. Where weights
    are packed already, only norms, routers and rows of the embedding are read.
    """
    if shared is not None and shared.are_packed:
        checkpoint.read_little()
    elif group.num_ranks == 1:
        checkpoint.read_ahead()


class WeightLoader:
    """Loads the weights that a family describes, a rank's share of each. A linear is read, packed by the platform, or
    in memory that processes share, and joined to those of the other ranks.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        dtype: torch.dtype,
        platform: WeightPlatform,
        group: Group,
        weights: str,
        exact: bool,
        expert_parallel: bool = False,
        shared: SharedLinears | None = None,
        bank: AdapterBank | None = None,
    ) -> None:
        self.spec = describe_share(config, group.rank, group.num_ranks, exact, expert_parallel)
        self._checkpoint = checkpoint
        self._config = config
        self._dtype = dtype
        self._platform = platform
        self._group = group
        self._weights = weights
        self._exact = exact
        self._bank = bank
        self._make_linear = (shared or platform).make_linear
        self._of_blocks: dict[LinearSpec, Linear] = {}
        """Linears that several layers share."""
        self.linears = LinearReader(
            checkpoint,
            rank_shard(config, group),
            config.quantization,
            dtype,
            platform.place_weight,
            keeps_float8=platform.keeps_float8 and weights == "auto",
            shapes_only=shared is not None and shared.are_packed,
        )

    def load(self) -> DecoderWeights:
        if self._bank is not None:
            self._bank.note_modules(part.name for linear in self.spec.linears() for part in linear.parts)
        # The head before the layers: it is the largest weight, and is held twice while it is packed.
        embedding, head = self._ends()
        layers: list[LayerWeights] = []
        for spec in self.spec.layers:
            layers.append(self._layer(spec) if spec.repeats is None else layers[spec.repeats])
        final_norm = self._norm(self.spec.final_norm)
        inputs = load_layer_inputs(self.spec.layer_inputs, self._readers._replace(linear=self._adapted))
        streams = load_streams(self.spec.streams, self._readers)
        scaling = None if self.spec.embedding_scaling is None else self._vectors(self.spec.embedding_scaling)
        gate = self._norm_gate(self.spec.final_gate)
        embedding_norm = self._norm(self.spec.embedding_norm)
        gathering = None if self.spec.gathering is None else self._connection(self.spec.gathering)
        ends = load_ends(self._reader, self.spec.blocks)
        rope = None if self.spec.rope_exponents is None else exponential(self._tensor(self.spec.rope_exponents))
        parts = inputs, streams, scaling, gate, embedding_norm, gathering, ends, rope
        give_back_freed_memory()
        return DecoderWeights(embedding, layers, final_norm, head, *parts)

    def load_draft_head(self, spec: DraftHeadSpec, target: DecoderWeights | None) -> DraftHeadWeights:
        """Returns a draft head with the embedding and the output head of `target`, or with its own without it."""
        embedding, head = self._ends() if target is None else (target.embedding, target.head)
        decoder = DecoderWeights(embedding, [self._layer(spec.layer)], self._norm(spec.final_norm), head)
        norms = self._norm(spec.embedding_norm), self._norm(spec.hidden_norm)
        return DraftHeadWeights(*norms, self._linear(spec.join), decoder)

    def load_eagle3(
        self, spec: Eagle3Spec, embedding: Embedding | None, target_ids: torch.Tensor | None
    ) -> Eagle3Weights:
        """Returns an EAGLE-3 head with an embedding, or with its own without one. `target_ids` are on the CPU."""
        head = self._linear(self.spec.head, is_head=True)
        (layer,), norm = map(self._layer, self.spec.layers), self._norm(self.spec.final_norm)
        decoder = DecoderWeights(embedding or self.load_embedding(), [layer], norm, head)
        norms = self._norm(spec.embedding_norm), self._norm(spec.stream_norm)
        placed = None if target_ids is None else self._platform.place_weight(target_ids, torch.int64)
        return Eagle3Weights(self._linear(spec.fuse), *norms, decoder, placed)

    def load_embedding(self) -> Embedding:
        return self._embedding()[0]

    def _ends(self) -> tuple[Embedding, Linear]:
        """Returns the embedding and the output head, which may be tied."""
        embedding, tied_head = self._embedding()
        return embedding, (tied_head if self.spec.is_tied else None) or self._linear(self.spec.head, is_head=True)

    def _block(self, spec: SharedBlockSpec) -> SharedBlockWeights:
        qkv = self._with_low_rank(self._of_block(spec.attention.qkv), spec.attention_adapter)
        gate_up = self._with_low_rank(self._of_block(spec.mlp.gated), spec.mlp_adapter)
        return SharedBlockWeights(
            self._norm(spec.input_norm),
            AttentionWeights(qkv, self._of_block(spec.attention.output), None, None),
            self._norm(spec.mlp_norm),
            GatedMlpWeights(gate_up, self._of_block(spec.mlp.down)),
            self._adapted(spec.result),
            self._norm(spec.mixer_norm),
        )

    def _of_block(self, spec: LinearSpec) -> Linear:
        """Returns a linear of a block, the same one for all layers that share it."""
        if spec not in self._of_blocks:
            self._of_blocks[spec] = self._adapted(spec)
        return self._of_blocks[spec]

    def _with_low_rank(self, linear: Linear, spec: LowRankSpec | None) -> Linear:
        if spec is None:
            return linear
        return LowRankLinear(linear, self._adapted(spec.down), [self._adapted(up) for up in spec.ups])

    def _table(self, part: WeightPart, width: int) -> Embedding:
        """Returns the lookup of a table [num_rows, width]."""
        return load_lookup(self.linears, self._platform, part, width, self._dtype)[0]

    @property
    def _readers(self) -> Readers:
        return Readers(self._linear, self._plain_linear, self._norm, self._tensor, self._vector, self._table)

    def _layer(self, spec: LayerSpec) -> LayerWeights:
        adapts_input = spec.updates is None  # several streams are computed without the step
        of_input = self._readers._replace(linear=self._adapted) if adapts_input else self._readers
        return LayerWeights(
            self._norm(spec.input_norm),
            None if spec.mixer is None else self._mixer(spec.mixer),
            self._norm(spec.mlp_norm),
            None if spec.mlp is None else self._mlp(spec.mlp),
            self._norm(spec.mixer_output_norm),
            self._norm(spec.mlp_output_norm),
            spec.is_parallel,
            spec.stream_factors,
            None if spec.beside is None else self._beside(spec.beside),
            load_layer_input(spec.own_input, of_input),
            spec.stream_scale if spec.scalar is None else self._scalar(spec.scalar),
            None if spec.block is None else self._block(spec.block),
            load_updates(spec.updates, spec.mlp, self._readers, SquaresOverRanks(self._group, self._exact)),
            None if spec.shortcut is None else self._experts(spec.shortcut),
            self._norm_gate(spec.input_gate),
            self._norm_gate(spec.mlp_gate),
            self._scaling(spec.mixer_scaling),
            self._scaling(spec.mlp_scaling),
            spec.joins_input,
            load_shares(spec.stream_shares, self._readers),
            load_ngrams(spec.ngrams, self._config.ngrams, self._readers),
            self._filters(spec.convolutions),
            1.0 if spec.mlp_scale is None else self._scalar(spec.mlp_scale),
            tuple(map(self._connection, spec.connections)),
            load_reads(self._reader, spec.reads),
        )

    def _connection(self, spec: ConnectionSpec) -> ConnectionWeights:
        return load_connection(self._reader, spec, functools.partial(self._platform.make_router, bias=None))

    def _norm_gate(self, spec: NormGateSpec | None) -> NormGateWeights | None:
        return None if spec is None else NormGateWeights(*map(self._linear, spec))

    def _scaling(self, spec: ScalingSpec | None) -> ScalingWeights | None:
        return None if spec is None else ScalingWeights(*self._vectors(spec.update), *self._vectors(spec.stream))

    def _vectors(self, names: tuple[str, str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns two tensors [hidden] in the model's dtype."""
        first, second = map(self._vector, names)
        return first, second

    def _vector(self, name: str) -> torch.Tensor:
        stored = self.linears.read_vector(name, self._config.hidden_size, Split.NOTHING)
        return self._platform.place_weight(stored, self._dtype)

    def _scalar(self, name: str) -> float:
        stored = self._checkpoint.view(name, (1,))
        return 1.0 if stored.is_meta else stored.to(self._dtype).item()

    def _mlp(self, spec: GatedMlpSpec | ExpertsSpec) -> GatedMlpWeights | ExpertsWeights:
        if isinstance(spec, GatedMlpSpec):
            return GatedMlpWeights(self._adapted(spec.gated), self._adapted(spec.down))
        return self._experts(spec)

    def _beside(self, spec: ExpertsBesideSpec) -> ExpertsBesideWeights:
        hidden = self._config.hidden_size
        scale = self.linears.read_vector(spec.router_scale, hidden, Split.NOTHING).float() * hidden**-0.5
        return ExpertsBesideWeights(
            self._experts(spec.experts, self._of_experts(spec.share_scales)),
            self._norm(spec.input_norm),
            self._norm(spec.output_norm),
            self._norm(spec.mlp_norm),
            self._platform.place_weight(scale, self._dtype),
        )

    def _experts(self, spec: ExpertsSpec, share_scales: torch.Tensor | None = None) -> ExpertsWeights:
        config = self._config.experts
        assert config is not None
        activation = spec.experts[0].gated.activation or self._config.activation
        router = self._plain_linear(spec.router)
        own = msgspec.structs.replace(config, num_experts=len(spec.own))
        join: Join = self._platform.join_experts
        if self._bank is not None:
            join = self._bank.joining(join, spec)
        experts = join((self._own_mlp(each, is_expert=True) for each in spec.own), own, activation)
        if spec.held is not None:
            of_rank = ExpertsOfRank(experts, spec.held)
            experts = ExactExpertsOfRanks(of_rank, self._group) if self._exact else of_rank
        weights = ExpertsWeights(
            config,
            router,
            experts,
            None if self._has_whole_results(spec) else self._group.all_reduce,
            self._choice_bias(spec),
            None if spec.shared is None else self._own_mlp(spec.shared, self._bank),
            share_scales,
            shared_gate=None if spec.shared_gate is None else self._adapted_gate(spec.shared_gate),
            deep_router=None if spec.deep_router is None else self._deep_router(spec.deep_router),
            table=load_table(self._checkpoint, self._config, spec.table, self._platform),
        )
        return dataclasses.replace(weights, in_one_call=self._platform.fuse_mixture(weights, self._dtype))

    def _has_whole_results(self, spec: ExpertsSpec) -> bool:
        """Whether the results of this rank's experts need not be added to those of other ranks."""
        return self._exact or spec.experts[0].down.gathers or self._group.num_ranks == 1

    def _deep_router(self, spec: DeepRouterSpec) -> DeepRouterWeights:
        width, (first, second) = spec.norm.size, map(self._plain_linear, spec.hidden)
        return DeepRouterWeights(
            self._plain_linear(spec.down),
            None if spec.previous_scale is None else self._numbers(spec.previous_scale, width),
            self._numbers(f"{spec.norm.name}.weight", width),
            (first, second),
        )

    def _choice_bias(self, spec: ExpertsSpec) -> torch.Tensor | None:
        name = spec.choice_bias
        if name is None or (spec.may_lack_choice_bias and name not in self._checkpoint):
            return None
        assert self._config.experts is not None
        num_always_chosen = self._config.experts.num_always_chosen
        bias = self._numbers(name, self._config.experts.num_scores - num_always_chosen)
        return torch.cat((bias, _ALWAYS * torch.arange(num_always_chosen, 0, -1, device=bias.device)))

    def _own_mlp(self, spec: GatedMlpSpec, bank: AdapterBank | None = None, is_expert: bool = False) -> GatedMlpWeights:
        """Returns this rank's share of an MLP, with the adapters of `bank`. Its results are still to be summed, unless
        ranks split its outputs and gather them.
        """
        gated, down = (self._own(each, bank=bank, is_expert=is_expert) for each in (spec.gated, spec.down))
        return GatedMlpWeights(gated, self._joined(down, spec.down) if spec.down.gathers else down)

    def _plain_linear(self, spec: LinearSpec) -> Linear:
        """Returns a small linear in float32, such as a router, whose choice should not depend on rounding."""
        weight = self.linears.read(spec, shapes_only=False)
        place = self._platform.place_weight
        dense = place(weight.dense(), torch.float32)
        bias = None if weight.bias is None else place(weight.bias, torch.float32)
        self._checkpoint.release()
        return self._platform.make_router(dense, bias)

    def _adapted_gate(self, spec: LinearSpec) -> Linear:
        """Returns a small linear in float32, which takes adapters unless all is exact."""
        linear = self._plain_linear(spec)
        return linear if self._bank is None or self._exact else self._bank.around_plain(linear, spec)

    def _of_experts(self, name: str) -> torch.Tensor:
        """Returns a tensor with a number for each score of the router, in float32."""
        assert self._config.experts is not None
        return self._numbers(name, self._config.experts.num_scores)

    def _numbers(self, name: str, size: int) -> torch.Tensor:
        """Returns a tensor [size], whole on every rank, in float32."""
        return self._platform.place_weight(self.linears.read_vector(name, size, Split.NOTHING), torch.float32)

    def _mixer(self, spec: MixerSpec) -> MixerWeights:
        if isinstance(spec, AttentionSpec):
            return self._attention(spec)
        if isinstance(spec, LatentAttentionSpec):
            return load_latent_attention(self._reader, spec, self._exact)
        if isinstance(spec, CompressedAttentionSpec):
            return load_compressed_attention(self._reader, spec)
        if isinstance(spec, ClippedAttentionSpec):
            return load_clipped_attention(self._reader, spec)
        if isinstance(spec, RecurrentSpec):
            return self._recurrent(spec)
        if isinstance(spec, SideBySideSpec):
            return SideBySideWeights(self._attention(spec.attention), self._recurrent(spec.recurrent))
        kernel = self._tensor(spec.kernel).flatten(1)
        bias = None if spec.bias is None else self._tensor(spec.bias)
        return ShortConvWeights(self._adapted(spec.input), kernel, bias, self._adapted(spec.output))

    def _recurrent(self, spec: RecurrentSpec) -> RecurrentWeights:
        tensors = {name: torch.cat([self._tensor(piece) for piece in pieces]) for name, pieces in spec.pieces.items()}
        if isinstance(spec.shape, ConvolvedShape):
            tensors["mixing"] = mixing_layout(tensors["mixing"], spec.shape)
        return RecurrentWeights(
            spec.kind,
            spec.shape.share(self._group.num_ranks),
            {name: self._adapted(linear) for name, linear in spec.inputs.items()},
            self._adapted(spec.output),
            tensors,
            self._group.num_ranks,
            SquaresOverRanks(self._group, self._exact),
        )

    def _tensor(self, spec: TensorSpec) -> torch.Tensor:
        """Returns this rank's share of a tensor of a recurrent mixer, in float32."""
        placed = self._platform.place_weight(self.linears.read_tensor(spec), torch.float32)
        return -exponential(placed) if spec.is_log_rate else placed

    def _attention(self, spec: AttentionSpec) -> AttentionWeights:
        is_wide = spec.has_wide_norms
        return AttentionWeights(
            qkv=self._adapted(spec.qkv),
            output=self._adapted(spec.output),
            q_norm=None if is_wide else self._norm(spec.q_norm),
            k_norm=None if is_wide else self._norm(spec.k_norm),
            wide_norms=(self._wide_norm(spec.q_norm), self._wide_norm(spec.k_norm)) if is_wide else None,
            sinks=None if spec.sinks is None else self._sinks(spec.sinks),
            v_norm=self._norm(spec.v_norm),
            reads_other_layer=spec.reads_other_layer,
            value_dim=spec.value_dim,
            gate=None if spec.gate is None else self._adapted(spec.gate),
            indexer=load_block_indexer(spec.indexer, self._readers),
            convolutions=self._filters(spec.convolutions),
            distances=None if spec.distances is None else load_distances(self._reader, spec.distances),
        )

    def _filters(self, specs: tuple[TensorSpec, TensorSpec] | None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns the filters [channels, width] of two convolutions."""
        return None if specs is None else (self._tensor(specs[0]), self._tensor(specs[1]))

    @overload
    def _norm(self, spec: NormSpec) -> torch.Tensor: ...

    @overload
    def _norm(self, spec: NormSpec | None) -> torch.Tensor | None: ...

    def _norm(self, spec: NormSpec | None) -> torch.Tensor | None:
        """Returns a copy in the model's dtype, followed by the bias if there is one; None where there is no norm."""
        if spec is None:
            return None
        if not spec.is_stored:
            return self._platform.place_weight(torch.ones(spec.size), self._dtype)
        other = None if spec.elsewhere is None else f"{spec.elsewhere}.weight"
        name = other if other is not None and other in self._checkpoint else f"{spec.name}.weight"
        weight = self._checkpoint.view(name, (spec.size,))
        if spec.has_bias:
            weight = torch.stack((weight, self._checkpoint.view(f"{spec.name}.bias", (spec.size,))))
        if spec.order is not None:
            weight = weight[spec.order.rows(spec.size)]
        return self._platform.place_weight(weight.float() + 1 if spec.adds_one else weight, self._dtype)

    def _wide_norm(self, spec: NormSpec | None) -> RowNorm:
        assert spec is not None
        weight = self.linears.read_vector(f"{spec.name}.weight", spec.size, spec.split)
        placed = self._platform.place_weight(weight, self._dtype)
        squares_over_ranks = SquaresOverRanks(self._group, self._exact)
        return WideNorm(placed, spec.size, self._config.rms_norm_eps, squares_over_ranks)

    def _sinks(self, name: str) -> torch.Tensor:
        sinks = self.linears.read_vector(name, self._config.num_heads, Split.QUERY_HEADS)
        return self._platform.place_weight(sinks, torch.float32)

    @property
    def _reader(self) -> PartReader:
        read = self._adapted, self._plain_linear, self._dense, self._norm, self._tensor, self._sinks, self._placed
        return PartReader(*read, self._bank)

    def _dense(self, spec: LinearSpec) -> torch.Tensor:
        return self.linears.read(spec, shapes_only=False).dense()

    def _placed(self, weight: torch.Tensor) -> torch.Tensor:
        placed = self._platform.place_weight(weight, self._dtype)
        self._checkpoint.release()
        return placed

    def _linear(self, spec: LinearSpec, is_head: bool = False) -> Linear:
        """Returns the parts packed as one linear, joined to those of the other ranks."""
        return self._joined(self._own(spec, is_head), spec)

    def _adapted(self, spec: LinearSpec) -> Linear:
        """Returns a linear of a layer, which takes adapters if there is a bank of them."""
        return self._joined(self._own(spec, bank=self._bank), spec)

    def _own(
        self, spec: LinearSpec, is_head: bool = False, bank: AdapterBank | None = None, is_expert: bool = False
    ) -> Linear:
        """Returns this rank's linear, which takes the adapters of `bank`."""
        weight = self._as_kept(self.linears.read(spec), is_head)
        linear = self._make_linear(
            dataclasses.replace(
                weight,
                activation=self._config.activation,
                gate_limit=spec.gate_limit,
                gate_caps=spec.gate_caps,
                is_expert=is_expert,
            )
        )
        if bank is not None:
            linear = bank.around(linear, spec)
        if spec.activation is not None:
            linear = GatedLinear(linear, functools.partial(activate, spec.activation))
        self._checkpoint.release()
        return linear

    def _as_kept(self, weight: LinearWeight, is_head: bool) -> LinearWeight:
        """Applies the option `weights`. What the checkpoint stores as integers stays as it is, unless it is `dense`."""
        if weight.quantized is not None:
            dense = self._weights == "dense"
            return dataclasses.replace(weight, weight=weight.dense(), quantized=None) if dense else weight
        bits = KEPT_BITS[self._weights]
        return dataclasses.replace(weight, rounded_to=bits.head if is_head else bits.layers)

    def _joined(self, linear: Linear, spec: LinearSpec) -> Linear:
        """Returns a linear that ends in a sum over the ranks if its inputs are split, or in a gather over them."""
        num_ranks = self._group.num_ranks
        if spec.splits_inputs:
            return self._group.row_parallel(linear, spec.out_features, self._dtype)
        if spec.gathers:
            sizes = spec.in_features // num_ranks, spec.out_features // num_ranks
            return self._group.column_parallel(linear, *sizes, self._dtype)
        return linear

    def _embedding(self) -> tuple[Embedding, Linear | None]:
        """Returns the lookup table, and the head that the platform makes of it if the two are tied."""
        width = self._config.hidden_size
        lookup, table = load_lookup(self.linears, self._platform, self.spec.embedding, width, self._dtype)
        is_rounded = KEPT_BITS[self._weights].head is not None
        return lookup, None if table is None or is_rounded else self._platform.tied_head(table)
