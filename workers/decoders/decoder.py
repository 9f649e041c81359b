"""The decoder that computes what the families of `workers/models/` describe: a transformer.

A step is a flat list of kernel and linear calls over one batch of tokens. The loader hands in the weights. The platform
brings the kernels and linears, and may lower the whole list to one call or one graph (`Platform.compile_decoder`). The
model runner calls it; it knows neither files nor sequences.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from manta.workers.decoders.alternating_updates import with_sparse_gates
from manta.workers.decoders.block_choice import choose_blocks
from manta.workers.decoders.compressed_attention import attend_compressed
from manta.workers.decoders.convolved_attention import attend_convolved
from manta.workers.decoders.distance_attention import attend_with_distances
from manta.workers.decoders.expert_routing import routed_rows, run_experts
from manta.workers.decoders.gated_streams import norm_gates
from manta.workers.decoders.head_gates import gated_heads
from manta.workers.decoders.latent_attention import attend_latent
from manta.workers.decoders.layer_inputs import add_own_input, layer_inputs
from manta.workers.decoders.mixers.recurrent_mixers import MIXERS
from manta.workers.decoders.mixers.short_conv import run_short_conv, with_convolution
from manta.workers.decoders.mixers.windows import channels_of
from manta.workers.decoders.ngram_streams import ngram_streams
from manta.workers.decoders.query_growth import query_growth
from manta.workers.decoders.residual_blocks import run_residual_blocks
from manta.workers.decoders.residual_streams import residual_streams
from manta.workers.decoders.rope_table import rope_table
from manta.workers.decoders.shared_block import mixer_input
from manta.workers.decoders.sparse_attention import TokenChoice, attend_chosen
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.block_weights import ClippedAttentionWeights
from manta.workers.kernels.kv_cache import beyond, narrowed
from manta.workers.kernels.linears import GatedLinear
from manta.workers.kernels.protocol import Forward, KVCaches, RotaryTables
from manta.workers.kernels.weights import (
    AttentionWeights,
    CompressedAttentionWeights,
    DecoderWeights,
    ExpertsBesideWeights,
    ExpertsWeights,
    GatedMlpWeights,
    LatentAttentionWeights,
    MixerWeights,
    NgramWeights,
    NormGateWeights,
    RecurrentWeights,
    ScalingWeights,
    ShortConvWeights,
    SideBySideWeights,
    max_mlp_rows,
)
from manta.workers.kv_groups import group_layers
from manta.workers.models.model_config import HeadShape, ModelConfig
from manta.workers.models.recurrent_shapes import RecurrentKind
from manta.workers.platforms import Platform


def _filled_up(qkv: torch.Tensor, heads: HeadShape, value_dim: int) -> torch.Tensor:
    """Returns rows of queries, keys and values whose values have the width of keys: zeros follow each."""
    values = qkv[:, -heads.num_kv_heads * value_dim :].unflatten(-1, (-1, value_dim))
    wide = F.pad(values, (0, heads.head_dim - value_dim)).flatten(1)
    return torch.cat((qkv[:, : -heads.num_kv_heads * value_dim], wide), dim=-1)


_FIRST_POSITIONS = 4096
"""Rows of the rotary table at first. It grows when a longer context comes, so a model for 1 M tokens does not cost more
than others.
"""


class Decoder:
    """One model. The residual stream is in the dtype of the norms' weights.

    Callers put torch into inference mode, once for all that they call in a step.
    """

    def __init__(self, config: ModelConfig, weights: DecoderWeights, platform: Platform) -> None:
        self.config = config
        self.sliding_windows = config.sliding_windows
        self.weights = weights
        self._kernels = platform.kernels
        self._streams = residual_streams(weights, config, platform.kernels)
        layers = [with_sparse_gates(layer, config.activation, platform.kernels) for layer in weights.layers]
        next_norms = [*(layer.input_norm for layer in weights.layers[1:]), weights.final_norm]
        places = group_layers(config.sliding_windows, config.attends, config.kv_sources).layers
        heads = [config.heads_of(layer) for layer in range(config.num_layers)]
        grows = [
            config.query_growth is not None and config.query_growth.is_of(rope, window)
            for rope, window in zip(config.ropes, config.sliding_windows, strict=True)
        ]
        sources = config.kv_sources or range(config.num_layers)
        self._layers = list(zip(layers, places, sources, heads, config.sliding_windows, grows, next_norms, strict=True))
        self._mlp_rows = max_mlp_rows(config, weights.dtype) if platform.splits_mlp else None
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=weights.dtype).item()
        self.compiled = platform.compile_decoder(weights, config, self._run)
        self._has_tables = config.experts is not None and bool(config.experts.hashed_layers)
        self._tables: RotaryTables = []
        self._whole_caches: KVCaches = []
        self._used_caches: KVCaches = []
        """The part of each of `_whole_caches` that its layer uses."""

    def forward(self, token_ids: torch.Tensor, metadata: AttentionMetadata, kv_caches: KVCaches) -> torch.Tensor:
        """Hidden states after the last norm, [num_tokens, hidden]; writes the tokens' keys and values to their KV
        slots.

        `token_ids` is int64 [num_tokens]; `kv_caches` holds what each layer keeps.
        """
        return self.forward_tapped(token_ids, metadata, kv_caches)[0]

    def forward_tapped(
        self, token_ids: torch.Tensor, metadata: AttentionMetadata, kv_caches: KVCaches
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes like `forward`. Returns the residual stream before each layer of `ModelConfig.taps` too, side by
        side: [num_tokens, len(taps) * hidden].
        """
        embedded = self.embed(token_ids)
        inputs = token_ids if self.config.ngrams is not None or self._has_tables else None
        if self.weights.layer_inputs is not None:
            inputs = layer_inputs(self.weights.layer_inputs, token_ids, embedded, self.config, self._kernels, metadata)
        result, hidden = self.forward_embedded(embedded, metadata, kv_caches, inputs), self.config.hidden_size
        tapped = result[:, hidden:]
        return (result[:, :hidden].contiguous() if tapped.shape[1] else result), tapped

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns what the first layer reads of tokens, [num_tokens, hidden]."""
        embedded = self.weights.embedding(token_ids)
        if self.weights.embedding_norm is not None:
            return self._norm(embedded, self.weights.embedding_norm)
        if self.weights.embedding_scaling is not None:
            bias, scale = self.weights.embedding_scaling
            return embedded.add_(bias).mul_(scale)
        return embedded if self._embedding_scale == 1 else embedded.mul_(self._embedding_scale)

    def forward_embedded(
        self,
        embedded: torch.Tensor,
        metadata: AttentionMetadata,
        kv_caches: KVCaches,
        inputs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes like `forward`, from what the first layer reads, which it overwrites. `inputs` are those of
        `Forward`. In each row the hidden state comes first, and then what `forward_tapped` returns too.
        """
        tables = self._rotary_tables(metadata.max_context_len, embedded.device)
        run, caches = self.compiled or self._run, self._own_caches(kv_caches)
        if inputs is None:
            return run(embedded, tables, metadata, caches)
        return run(embedded, tables, metadata, caches, inputs)

    def _own_caches(self, kv_caches: KVCaches) -> KVCaches:
        """Returns the caches without what layers with smaller heads than others do not use, and behind keys and values
        those of an indexer's keys.
        """
        has_indexer = self.config.block_indexer is not None
        if not (self.config.layer_kv_heads or has_indexer):
            return kv_caches
        if kv_caches is not self._whole_caches:
            largest = self.config.largest_heads
            self._whole_caches, self._used_caches = kv_caches, []
            for layer, caches in enumerate(kv_caches):
                heads, count = self.config.heads_of(layer), 2 if self.config.attends[layer] else 0
                of_indexer = (beyond(caches[0], heads, largest),) if has_indexer and count else ()
                own = tuple(narrowed(each, heads, largest) for each in caches[:count])
                self._used_caches.append((*own, *of_indexer, *caches[count:]))
        return self._used_caches

    @property
    def _run(self) -> Forward:
        """The function that runs all layers. It is not kept: an object that holds its own method keeps itself, and the
        weights, until the garbage collector comes.
        """
        if self.weights.blocks is not None:
            of_model = self.config, self.weights, self._layers, self._mlp, self._kernels
            return functools.partial(run_residual_blocks, *of_model)
        return self._run_layers if self._streams is None else self._run_streams

    def _run_layers(
        self,
        residual: torch.Tensor,
        cos_sin: RotaryTables,
        metadata: AttentionMetadata,
        kv_caches: KVCaches,
        inputs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs all layers, as `Forward` says. `inputs` [num_layers, num_tokens, width] are those that each layer has of
        its own.
        """
        normed = self._norm(residual, self.weights.layers[0].input_norm)
        config = self.config
        embedded = residual if config.shared_blocks is None else residual.clone()
        growth = query_growth(config.query_growth, metadata.positions, self._kernels)
        chunks: dict[int, AttentionMetadata] = {}
        choice = None if config.indexer is None else TokenChoice()
        shortcut: torch.Tensor | None = None
        routed: torch.Tensor | None = None
        router_rows: torch.Tensor | None = None
        tapped: list[torch.Tensor] = []
        taps = config.taps if metadata.is_tapped else ()
        for index, ((layer, place, source, heads, sliding_window, grows, next_norm), table) in enumerate(
            zip(self._layers, cos_sin, strict=True)
        ):
            kv_cache = kv_caches[source]
            if index in taps:
                tapped.append(residual.clone())
            group, window = metadata.of_group(0 if place is None else place.group), sliding_window
            if config.windows_are_chunks and window is not None and place is not None:
                group = chunks[place.group] = chunks.get(place.group) or group.in_chunks(window)
                window = None
            if layer.input_gate is not None:
                normed = self._gated(layer.input_gate, normed)
            if layer.stream_factors is not None:
                torch.mul(normed, layer.stream_factors[0], out=residual)
            if layer.block is not None:
                attend = functools.partial(self._attend_block, table, group, kv_cache[:2], heads)
                run_mlp = functools.partial(self._block_mlp, metadata=metadata)
                eps = config.rms_norm_eps
                normed = mixer_input(layer.block, residual, embedded, eps, self._kernels, attend, run_mlp, metadata)
                kv_cache = kv_cache[2:]
            if layer.joins_input:
                assert inputs is not None
                normed = torch.cat((inputs[index], normed), dim=-1)
            if layer.mixer is not None:
                growing = growth if grows else None
                update = self._mix(layer.mixer, normed, table, group, kv_cache, heads, window, growing, choice)
                update = self._norm(update, layer.mixer_output_norm)
                if layer.convolutions is not None:
                    update = self._convolved(update, layer.convolutions[0], kv_cache[-2], metadata)
            if layer.mlp is not None and layer.is_parallel:
                update = update + self._mlp(layer.mlp, normed, metadata)
            elif layer.mlp is not None:
                if layer.mixer is not None:
                    normed = self._add(update, residual, layer.mlp_norm, layer.mixer_scaling)
                if layer.mlp_gate is not None:
                    normed = self._gated(layer.mlp_gate, normed)
                if layer.stream_factors is not None:
                    torch.mul(normed, layer.stream_factors[1], out=residual)
                if isinstance(layer.mlp, ExpertsWeights) and layer.mlp.deep_router is not None:
                    router, eps = layer.mlp.deep_router, config.rms_norm_eps
                    routed, router_rows = routed_rows(router, normed, router_rows, eps, self._kernels)
                update = self._mlp(layer.mlp, normed, metadata, routed)
                if shortcut is not None:
                    update, shortcut = update + shortcut, None
                if layer.shortcut is not None:
                    shortcut = self._mlp(layer.shortcut, normed, metadata)
                if layer.beside is not None:
                    update = self._norm(update, layer.beside.mlp_norm)
                    update = update + self._experts_beside(layer.beside, residual, metadata)
                update = self._norm(update, layer.mlp_output_norm)
                if layer.mlp_scale != 1:
                    update = update * layer.mlp_scale
                if layer.convolutions is not None:
                    update = self._convolved(update, layer.convolutions[1], kv_cache[-1], metadata)
            if layer.own_input is None and layer.scalar == 1:
                normed = self._add(update, residual, next_norm, layer.mlp_scaling)
                continue
            residual.add_(update)
            if layer.own_input is not None:
                assert inputs is not None
                own = inputs[index]
                residual.add_(add_own_input(layer.own_input, residual, own, config, self._kernels, metadata))
            normed = self._norm(residual.mul_(layer.scalar), next_norm)
        if config.num_layers in taps:
            tapped.append(residual)
        return torch.cat((normed, *tapped), dim=-1) if tapped else normed

    def _run_streams(
        self,
        residual: torch.Tensor,
        cos_sin: RotaryTables,
        metadata: AttentionMetadata,
        kv_caches: KVCaches,
        inputs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs all layers of a model with several residual streams, as `_run_layers` does. `inputs` may also be the
        token ids, for layers with tables of n-grams or of experts.
        """
        assert self._streams is not None
        choice = None if self.config.indexer is None else TokenChoice()
        streams = self._streams.spread(residual)
        for index, ((layer, place, source, heads, window, _, _), table) in enumerate(
            zip(self._layers, cos_sin, strict=True)
        ):
            mixer, mlp, cache = layer.mixer, layer.mlp, kv_caches[source]
            assert mixer is not None
            assert mlp is not None
            if layer.ngrams is not None:
                *others, tokens, inner = cache
                streams = self._with_ngrams(layer.ngrams, streams, inputs, metadata, (tokens, inner))
                cache = tuple(others)
            own_input = None if layer.own_input is None or inputs is None else inputs[index]
            of_mixer, of_mlp = self._streams.parts(layer, own_input)
            group = metadata.of_group(0 if place is None else place.group)
            read = of_mixer.read(streams)
            streams = of_mixer.write(self._mix(mixer, read, table, group, cache, heads, window, None, choice), streams)
            read = of_mlp.read(streams)
            chosen = mlp.table[inputs] if isinstance(mlp, ExpertsWeights) and mlp.table is not None else None
            streams = of_mlp.write(self._mlp(mlp, read, metadata, chosen=chosen), streams)
        return self._streams.gather(streams)

    def _with_ngrams(
        self,
        weights: NgramWeights,
        streams: torch.Tensor,
        token_ids: torch.Tensor | None,
        metadata: AttentionMetadata,
        states: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Returns residual streams with the rows of tables of n-grams added."""
        shape, step, eps = self.config.ngrams, metadata.states, self.config.rms_norm_eps
        assert token_ids is not None
        assert shape is not None
        assert step is not None
        return streams + ngram_streams(weights, shape, streams, token_ids, step, states, eps, self._kernels)

    def _attend_block(
        self,
        cos_sin: torch.Tensor,
        metadata: AttentionMetadata,
        kv_cache: tuple[torch.Tensor, ...],
        heads: HeadShape,
        attention: AttentionWeights,
        normed: torch.Tensor,
    ) -> torch.Tensor:
        """Returns the attention of the block before a layer's mixer."""
        return self._attend(attention, normed, cos_sin, metadata, kv_cache, heads, None, None)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Returns the norm of x, or x itself where there is none."""
        if weight is None:
            return x
        norm = self._kernels.layer_norm if self.config.has_layer_norms else self._kernels.rms_norm
        if weight.dim() == 2:
            return norm(x, weight[0], self.config.rms_norm_eps) + weight[1]
        return norm(x, weight, self.config.rms_norm_eps)

    def _gated(self, gate: NormGateWeights, normed: torch.Tensor) -> torch.Tensor:
        """Returns a norm's result times its gate."""
        return (normed * norm_gates(gate, normed, self._kernels)).to(normed.dtype)

    def _add(
        self,
        update: torch.Tensor,
        residual: torch.Tensor,
        next_norm: torch.Tensor | None,
        scaling: ScalingWeights | None = None,
    ) -> torch.Tensor:
        """Adds to the residual stream in place. Returns what the next part reads: its norm, or the stream itself."""
        if scaling is not None:
            residual.add_(scaling.stream_bias).mul_(scaling.stream_scale)
            update = (update + scaling.update_bias) * scaling.update_scale
        if self.config.residual_scale != 1:
            update = update * self.config.residual_scale
        if next_norm is None or self.config.has_layer_norms:
            return self._norm(residual.add_(update), next_norm)
        return self._kernels.add_rms_norm(update, residual, next_norm, self.config.rms_norm_eps)

    def _mix(
        self,
        mixer: MixerWeights,
        normed: torch.Tensor,
        cos_sin: torch.Tensor,
        metadata: AttentionMetadata,
        cache: tuple[torch.Tensor, ...],
        heads: HeadShape,
        sliding_window: int | None,
        growth: torch.Tensor | None,
        choice: TokenChoice | None,
    ) -> torch.Tensor:
        if isinstance(mixer, AttentionWeights | LatentAttentionWeights):
            return self._attend(mixer, normed, cos_sin, metadata, cache, heads, sliding_window, growth, choice)
        if isinstance(mixer, SideBySideWeights):
            own = cache[:2]
            attended = self._attend(mixer.attention, normed, cos_sin, metadata, own, heads, sliding_window, growth)
            return attended + self._recur(mixer.recurrent, normed, metadata, cache[2:])
        if isinstance(mixer, CompressedAttentionWeights):
            eps, shape = self.config.rms_norm_eps, self.config.compressed
            assert shape is not None
            return attend_compressed(mixer, normed, cos_sin, metadata, cache, heads, shape, eps, self._kernels)
        if isinstance(mixer, RecurrentWeights) and mixer.kind is RecurrentKind.CONVOLVED_ATTENTION:
            return attend_convolved(mixer, normed, cos_sin, metadata, cache, heads, sliding_window, self._kernels)
        assert not isinstance(mixer, ClippedAttentionWeights), "residual_blocks.py runs the layers of such a model"
        return self._recur(mixer, normed, metadata, cache)

    def _recur(
        self,
        mixer: RecurrentWeights | ShortConvWeights,
        normed: torch.Tensor,
        metadata: AttentionMetadata,
        states: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        step = metadata.states
        assert step is not None, "a model with recurrent states gets their slots with each step"
        if isinstance(mixer, ShortConvWeights):
            return run_short_conv(mixer, normed, metadata, step, states, self._kernels.recurrent)
        return MIXERS[mixer.kind](mixer, normed, metadata, step, states, self._kernels.recurrent)

    def _convolved(
        self, x: torch.Tensor, kernel: torch.Tensor, state: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Returns rows and their convolution, added."""
        assert metadata.states is not None
        return with_convolution(x, kernel, state, metadata.states, self._kernels.recurrent)

    def _attend(
        self,
        attention: AttentionWeights | LatentAttentionWeights,
        normed: torch.Tensor,
        cos_sin: torch.Tensor,
        metadata: AttentionMetadata,
        kv_cache: tuple[torch.Tensor, ...],
        heads: HeadShape,
        sliding_window: int | None,
        growth: torch.Tensor | None,
        choice: TokenChoice | None = None,
    ) -> torch.Tensor:
        k_cache, v_cache = kv_cache[:2]
        eps = self.config.rms_norm_eps
        if isinstance(attention, LatentAttentionWeights):
            caches, kernels = (k_cache, v_cache), self._kernels
            own = growth, choice if sliding_window is None else None, sliding_window
            return attend_latent(attention, normed, cos_sin, metadata, caches, heads, kernels, *own)
        qkv = attention.qkv.forward(normed, metadata)
        if attention.value_dim is not None:
            qkv = _filled_up(qkv, heads, attention.value_dim)
        if attention.convolutions is not None:
            query, *cached = qkv.split([count * heads.head_dim for count in heads.counts], dim=-1)
            of_cached = zip(cached, attention.convolutions, kv_cache[2:4], strict=True)
            convolved = [self._convolved(*each[:2], channels_of(each[2]), metadata) for each in of_cached]
            qkv = torch.cat((query, *convolved), dim=-1)
        if attention.wide_norms is not None:
            query, key, value = qkv.split([count * heads.head_dim for count in heads.counts], dim=-1)
            query_norm, key_norm = attention.wide_norms
            layer = self._kernels.recurrent
            qkv = torch.cat((query_norm(query, layer), key_norm(key, layer), value), dim=-1)
        if attention.v_norm is not None:
            values = qkv[:, -heads.num_kv_heads * heads.head_dim :].unflatten(-1, (heads.num_kv_heads, heads.head_dim))
            values.copy_(self._kernels.rms_norm(values, attention.v_norm, eps))
        written = heads._replace(num_kv_heads=0) if attention.reads_other_layer else heads
        norms = attention.q_norm, attention.k_norm
        self._kernels.rope_and_cache(qkv, cos_sin, metadata, k_cache, v_cache, written, *norms, eps)
        if growth is not None:
            qkv[:, : heads.num_heads * heads.head_dim] *= growth.to(qkv.dtype)
        blocks = None
        if attention.indexer is not None:
            rope_dim = self.config.rope.rotary_dim or heads.head_dim
            of_step = normed, cos_sin, rope_dim, kv_cache[2], metadata
            blocks = choose_blocks(attention.indexer, *of_step, eps, self._kernels)
        if attention.distances is not None:
            numbers = attention.distances.numbers.forward(normed, metadata).float()
            numbers = (numbers if growth is None else numbers * growth).unflatten(-1, (heads.num_heads, -1))
            by_distance = numbers, attention.distances.profiles
            caches = k_cache, v_cache
            attended = attend_with_distances(qkv, *by_distance, caches, metadata, heads, sliding_window, self._kernels)
        elif blocks is not None and blocks.slots is not None:
            attended = attend_chosen(qkv, k_cache, blocks, metadata, heads, self._kernels, v_cache=v_cache)
        else:
            attended = self._kernels.paged_attention(
                qkv, k_cache, v_cache, metadata, heads, sliding_window, attention.sinks
            )
        if attention.value_dim is not None:
            attended = attended.unflatten(-1, (-1, heads.head_dim))[..., : attention.value_dim].flatten(1)
        if attention.gate is not None:
            attended = gated_heads(attended, attention.gate.forward(normed, metadata), self._kernels)
        return attention.output.forward(attended, metadata)

    def _experts_beside(
        self, beside: ExpertsBesideWeights, residual: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Returns the normed result of experts that read the residual stream."""
        normed, routed = (self._norm(residual, weight) for weight in (beside.input_norm, beside.router_norm))
        return self._norm(run_experts(beside.experts, normed, self._kernels, metadata, routed), beside.output_norm)

    def _mlp(
        self,
        mlp: GatedMlpWeights | ExpertsWeights,
        normed: torch.Tensor,
        metadata: AttentionMetadata,
        routed: torch.Tensor | None = None,
        chosen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if isinstance(mlp, ExpertsWeights):
            return run_experts(mlp, normed, self._kernels, metadata, routed, chosen)
        num_rows = normed.shape[0]
        if self._mlp_rows is None or num_rows <= self._mlp_rows or metadata.adapters is not None:
            return mlp.down.forward(mlp.gated.forward(normed, metadata), metadata)
        num_parts = -(-num_rows // self._mlp_rows)
        # As decoder.cpp does: all ranks sum the same parts. Their rows are not those of the step.
        parts = normed.split(-(-num_rows // num_parts))
        return torch.cat([mlp.down.forward(mlp.gated.forward(rows)) for rows in parts])

    def _block_mlp(self, mlp: GatedMlpWeights, normed: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        """Returns the result of an MLP whose first linear has no gate."""
        gated = GatedLinear(mlp.gated, functools.partial(self._kernels.gate, self.config.activation))
        return self._mlp(GatedMlpWeights(gated, mlp.down), normed, metadata)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits in the model's dtype, [num_rows, vocab_size], of rows of `forward`'s result."""
        logits = self.weights.head.forward(hidden)
        if self.config.logits_scale != 1:
            logits = logits * self.config.logits_scale
        return self._kernels.cap(logits, self.config.final_cap)

    def _rotary_tables(self, num_positions: int, device: torch.device) -> RotaryTables:
        """Returns the same list until a longer context comes."""
        if not self._tables or self._tables[0].shape[0] < num_positions:
            rows = max(_FIRST_POSITIONS, 1 << (num_positions - 1).bit_length())
            widths = [self.config.heads_of(layer).head_dim for layer in range(self.config.num_layers)]
            kinds = list(zip(self.config.ropes, widths, strict=True))
            factors = None if self.weights.rope_factors is None else self.weights.rope_factors.cpu().numpy()
            tables = {kind: torch.from_numpy(rope_table(*kind, rows, factors)).to(device) for kind in set(kinds)}
            self._tables = [tables[kind] for kind in kinds]
        return self._tables
