"""The decoder that computes what the families of `workers/models/` describe: a pre-norm transformer.

A step is a flat list of kernel and linear calls over one batch of tokens. The loader hands in the weights. The platform
brings the kernels and linears, and may lower the whole list to one call or one graph (`Platform.compile_decoder`). The
model runner calls it; it knows neither files nor sequences.
"""

from __future__ import annotations

import torch

from manta.workers.decoders.rope_table import rope_table
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.protocol import KVCaches
from manta.workers.kernels.weights import AttentionWeights, DecoderWeights, GatedMlpWeights, max_mlp_rows
from manta.workers.kv_groups import group_layers
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
        places = group_layers(config.sliding_windows).layers
        self._layers = list(zip(weights.layers, places, config.sliding_windows, next_norms, strict=True))
        self._mlp_rows = max_mlp_rows(config, weights.dtype) if platform.splits_mlp else None
        self.compiled = platform.compile_decoder(weights, config, self._run_layers)
        self._cos_sin = torch.empty(0)

    def forward(self, token_ids: torch.Tensor, metadata: AttentionMetadata, kv_caches: KVCaches) -> torch.Tensor:
        """Hidden states after the last norm, [num_tokens, hidden]; writes the tokens' keys and values to their KV
        slots.

        `token_ids` is int64 [num_tokens]; `kv_caches` holds (k_cache, v_cache) of each layer.
        """
        cos_sin = self._rotary_table(metadata.max_context_len, token_ids.device)
        run = self.compiled or self._run_layers
        return run(self.weights.embedding(token_ids), cos_sin, metadata, kv_caches)

    def _run_layers(
        self, residual: torch.Tensor, cos_sin: torch.Tensor, metadata: AttentionMetadata, kv_caches: KVCaches
    ) -> torch.Tensor:
        kernels, config = self._kernels, self.config
        eps = config.rms_norm_eps
        normed = kernels.rms_norm(residual, self.weights.layers[0].input_norm, eps)
        for (layer, place, sliding_window, next_norm), kv_cache in zip(self._layers, kv_caches, strict=True):
            group = metadata.of_group(place.group)
            attended = self._attend(layer.attention, normed, cos_sin, group, kv_cache, sliding_window)
            normed = kernels.add_rms_norm(attended, residual, layer.mlp_norm, eps)
            normed = kernels.add_rms_norm(self._mlp(layer.mlp, normed, metadata), residual, next_norm, eps)
        return normed

    def _attend(
        self,
        attention: AttentionWeights,
        normed: torch.Tensor,
        cos_sin: torch.Tensor,
        metadata: AttentionMetadata,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        sliding_window: int | None,
    ) -> torch.Tensor:
        heads, eps = self.config.heads, self.config.rms_norm_eps
        qkv = attention.qkv.forward(normed, metadata)
        self._kernels.rope_and_cache(qkv, cos_sin, metadata, *kv_cache, heads, attention.q_norm, attention.k_norm, eps)
        attended = self._kernels.paged_attention(qkv, *kv_cache, metadata, heads, sliding_window)
        return attention.output.forward(attended, metadata)

    def _mlp(self, mlp: GatedMlpWeights, normed: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        num_rows = normed.shape[0]
        if self._mlp_rows is None or num_rows <= self._mlp_rows:
            return mlp.down.forward(mlp.gated.forward(normed, metadata), metadata)
        num_parts = -(-num_rows // self._mlp_rows)
        # As decoder.cpp does: all ranks sum the same parts. Their rows are not those of the step.
        parts = normed.split(-(-num_rows // num_parts))
        return torch.cat([mlp.down.forward(mlp.gated.forward(rows)) for rows in parts])

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits in the model's dtype, [num_rows, vocab_size], of rows of `forward`'s result."""
        return self.weights.head.forward(hidden)

    def _rotary_table(self, num_positions: int, device: torch.device) -> torch.Tensor:
        if self._cos_sin.shape[0] < num_positions:
            rows = max(_FIRST_POSITIONS, 1 << (num_positions - 1).bit_length())
            self._cos_sin = torch.from_numpy(rope_table(self.config.rope, self.config.head_dim, rows)).to(device)
        return self._cos_sin
