"""The decoder that computes what the families of `workers/models/` describe: a transformer.

A step is a flat list of kernel and linear calls over one batch of tokens. The loader hands in the weights. The platform
brings the kernels and linears, and may lower the whole list to one call or one graph (`Platform.compile_decoder`). The
model runner calls it; it knows neither files nor sequences.
"""

from __future__ import annotations

import torch

from manta.workers.decoders.experts import run_experts
from manta.workers.decoders.latent_attention import attend_latent
from manta.workers.decoders.mixers.recurrent_mixers import MIXERS
from manta.workers.decoders.mixers.short_conv import run_short_conv
from manta.workers.decoders.rope_table import rope_table
from manta.workers.kernels import reference
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.protocol import KVCaches, RotaryTables
from manta.workers.kernels.weights import (
    AttentionWeights,
    DecoderWeights,
    ExpertsWeights,
    GatedMlpWeights,
    LatentAttentionWeights,
    MixerWeights,
    RecurrentWeights,
    SideBySideWeights,
    max_mlp_rows,
)
from manta.workers.kv_groups import LayerPlace, group_layers
from manta.workers.models.model_config import ModelConfig
from manta.workers.platforms import Platform

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
        next_norms = [*(layer.input_norm for layer in weights.layers[1:]), weights.final_norm]
        places = group_layers(config.sliding_windows, config.attends).layers
        self._layers = list(zip(weights.layers, places, config.sliding_windows, next_norms, strict=True))
        self._mlp_rows = max_mlp_rows(config, weights.dtype) if platform.splits_mlp else None
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=weights.dtype).item()
        self.compiled = platform.compile_decoder(weights, config, self._run_layers)
        self._tables: RotaryTables = []

    def forward(self, token_ids: torch.Tensor, metadata: AttentionMetadata, kv_caches: KVCaches) -> torch.Tensor:
        """Hidden states after the last norm, [num_tokens, hidden]; writes the tokens' keys and values to their KV
        slots.

        `token_ids` is int64 [num_tokens]; `kv_caches` holds what each layer keeps.
        """
        tables = self._rotary_tables(metadata.max_context_len, token_ids.device)
        embedded = self.weights.embedding(token_ids)
        if self._embedding_scale != 1:
            embedded = embedded.mul_(self._embedding_scale)
        run = self.compiled or self._run_layers
        return run(embedded, tables, metadata, kv_caches)

    def _run_layers(
        self, residual: torch.Tensor, cos_sin: RotaryTables, metadata: AttentionMetadata, kv_caches: KVCaches
    ) -> torch.Tensor:
        normed = self._norm(residual, self.weights.layers[0].input_norm)
        for (layer, place, sliding_window, next_norm), table, kv_cache in zip(
            self._layers, cos_sin, kv_caches, strict=True
        ):
            if layer.mixer is not None:
                update = self._mix(layer.mixer, normed, table, metadata, place, kv_cache, sliding_window)
                update = self._norm(update, layer.mixer_output_norm)
            if layer.mlp is not None and layer.is_parallel:
                update = update + self._mlp(layer.mlp, normed, metadata)
            elif layer.mlp is not None:
                if layer.mixer is not None:
                    normed = self._add(update, residual, layer.mlp_norm)
                update = self._norm(self._mlp(layer.mlp, normed, metadata), layer.mlp_output_norm)
            normed = self._add(update, residual, next_norm)
        return normed

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Returns the norm of x, or x itself where there is none."""
        if weight is None:
            return x
        norm = reference.layer_norm if self.config.has_layer_norms else self._kernels.rms_norm
        return norm(x, weight, self.config.rms_norm_eps)

    def _add(self, update: torch.Tensor, residual: torch.Tensor, next_norm: torch.Tensor | None) -> torch.Tensor:
        """Adds to the residual stream in place. Returns what the next part reads: its norm, or the stream itself."""
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
        place: LayerPlace | None,
        cache: tuple[torch.Tensor, ...],
        sliding_window: int | None,
    ) -> torch.Tensor:
        if isinstance(mixer, AttentionWeights | LatentAttentionWeights):
            assert place is not None
            return self._attend(mixer, normed, cos_sin, metadata.of_group(place.group), cache, sliding_window)
        if isinstance(mixer, SideBySideWeights):
            attended = self._mix(mixer.attention, normed, cos_sin, metadata, place, cache[:2], sliding_window)
            return attended + self._mix(mixer.recurrent, normed, cos_sin, metadata, place, cache[2:], sliding_window)
        assert metadata.states is not None, "a model with recurrent states gets their slots with each step"
        if isinstance(mixer, RecurrentWeights):
            return MIXERS[mixer.kind](mixer, normed, metadata, metadata.states, cache, self._kernels)
        return run_short_conv(mixer, normed, metadata, metadata.states, cache, self._kernels)

    def _attend(
        self,
        attention: AttentionWeights | LatentAttentionWeights,
        normed: torch.Tensor,
        cos_sin: torch.Tensor,
        metadata: AttentionMetadata,
        kv_cache: tuple[torch.Tensor, ...],
        sliding_window: int | None,
    ) -> torch.Tensor:
        k_cache, v_cache = kv_cache
        heads, eps = self.config.heads, self.config.rms_norm_eps
        if isinstance(attention, LatentAttentionWeights):
            assert self.config.latent is not None
            shape = self.config.latent
            return attend_latent(attention, normed, cos_sin, metadata, (k_cache, v_cache), heads, shape, self._kernels)
        qkv = attention.qkv.forward(normed, metadata)
        if attention.wide_norms is not None:
            query, key, value = qkv.split([count * heads.head_dim for count in heads.counts], dim=-1)
            query_norm, key_norm = attention.wide_norms
            qkv = torch.cat((query_norm(query), key_norm(key), value), dim=-1)
        norms = attention.q_norm, attention.k_norm
        self._kernels.rope_and_cache(qkv, cos_sin, metadata, k_cache, v_cache, heads, *norms, eps)
        attended = self._kernels.paged_attention(
            qkv, k_cache, v_cache, metadata, heads, sliding_window, attention.sinks
        )
        if attention.gate is not None:
            attended = attended * attention.gate.forward(normed, metadata).sigmoid()
        return attention.output.forward(attended, metadata)

    def _mlp(
        self, mlp: GatedMlpWeights | ExpertsWeights, normed: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        if isinstance(mlp, ExpertsWeights):
            return run_experts(mlp, normed)
        num_rows = normed.shape[0]
        if self._mlp_rows is None or num_rows <= self._mlp_rows:
            return mlp.down.forward(mlp.gated.forward(normed, metadata), metadata)
        num_parts = -(-num_rows // self._mlp_rows)
        # As decoder.cpp does: all ranks sum the same parts. Their rows are not those of the step.
        parts = normed.split(-(-num_rows // num_parts))
        return torch.cat([mlp.down.forward(mlp.gated.forward(rows)) for rows in parts])

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits in the model's dtype, [num_rows, vocab_size], of rows of `forward`'s result."""
        logits = self.weights.head.forward(hidden)
        if self.config.logits_scale != 1:
            logits = logits * self.config.logits_scale
        return reference.cap(logits, self.config.final_cap)

    def _rotary_tables(self, num_positions: int, device: torch.device) -> RotaryTables:
        """Returns the same list until a longer context comes."""
        if not self._tables or self._tables[0].shape[0] < num_positions:
            rows, head_dim = max(_FIRST_POSITIONS, 1 << (num_positions - 1).bit_length()), self.config.head_dim
            ropes = self.config.ropes
            tables = {rope: torch.from_numpy(rope_table(rope, head_dim, rows)).to(device) for rope in set(ropes)}
            self._tables = [tables[rope] for rope in ropes]
        return self._tables
