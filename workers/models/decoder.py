"""The one decoder for Llama, Mistral, Qwen2 and Qwen3: a pre-norm transformer whose families differ by configuration.

A step is a flat list of kernel and linear calls over one batch of tokens. The loader hands in the weights; the platform
brings the kernels and linears, and may run the whole list in one call. Knows neither files nor sequences; called by the
model runner.
"""

from __future__ import annotations

import torch

from workers.attention import AttentionMetadata
from workers.checkpoints.model_config import ModelConfig
from workers.checkpoints.weights import DecoderWeights, LayerWeights, max_mlp_rows
from workers.kernels.protocol import KVCaches
from workers.models.rope import rope_table
from workers.platforms import Platform

_FIRST_POSITIONS = 4096
"""Rows of the rotary table at first. It grows when a longer context comes, so a model for 1 M tokens does not cost more
than others.
"""


class Decoder:
    """One model. The residual stream is in the dtype of the norms' weights."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, platform: Platform) -> None:
        self.config = config
        self._weights = weights
        self._kernels = platform.kernels
        next_norms = [*(layer.input_norm for layer in weights.layers[1:]), weights.final_norm]
        self._layers = list(zip(weights.layers, config.sliding_windows, next_norms, strict=True))
        self._mlp_rows = max_mlp_rows(config, weights.dtype) if platform.splits_mlp else None
        self.compiled = platform.compile_decoder(weights, config, self._run_layers)
        self._cos_sin = torch.empty(0)

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, metadata: AttentionMetadata, kv_caches: KVCaches) -> torch.Tensor:
        """Hidden states after the last norm, [num_tokens, hidden]; writes the tokens' keys and values to their KV
        slots.

        `token_ids` is int64 [num_tokens]; `kv_caches` holds (k_cache, v_cache) of each layer.
        """
        cos_sin = self._rotary_table(metadata.max_context_len, token_ids.device)
        run = self.compiled or self._run_layers
        return run(self._weights.embedding(token_ids), cos_sin, metadata, kv_caches)

    def _run_layers(
        self, residual: torch.Tensor, cos_sin: torch.Tensor, metadata: AttentionMetadata, kv_caches: KVCaches
    ) -> torch.Tensor:
        kernels, config = self._kernels, self.config
        eps = config.rms_norm_eps
        heads = config.heads
        normed = kernels.rms_norm(residual, self._weights.layers[0].input_norm, eps)
        for (layer, sliding_window, next_norm), (k_cache, v_cache) in zip(self._layers, kv_caches, strict=True):
            qkv = layer.qkv(normed)
            kernels.rope_and_cache(qkv, cos_sin, metadata, k_cache, v_cache, heads, layer.q_norm, layer.k_norm, eps)
            attended = kernels.paged_attention(qkv, k_cache, v_cache, metadata, heads, sliding_window)
            normed = kernels.add_rms_norm(layer.attention_output(attended), residual, layer.mlp_norm, eps)
            normed = kernels.add_rms_norm(self._mlp(layer, normed), residual, next_norm, eps)
        return normed

    def _mlp(self, layer: LayerWeights, normed: torch.Tensor) -> torch.Tensor:
        num_rows = normed.shape[0]
        if self._mlp_rows is None or num_rows <= self._mlp_rows:
            return layer.down(layer.gated(normed))
        num_parts = -(-num_rows // self._mlp_rows)
        parts = normed.split(-(-num_rows // num_parts))  # as decoder.cpp does: all ranks sum the same parts
        return torch.cat([layer.down(layer.gated(rows)) for rows in parts])

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits in the model's dtype, [num_rows, vocab_size], of rows of `forward`'s result."""
        return self._weights.head(hidden)

    def _rotary_table(self, num_positions: int, device: torch.device) -> torch.Tensor:
        if self._cos_sin.shape[0] < num_positions:
            rows = max(_FIRST_POSITIONS, 1 << (num_positions - 1).bit_length())
            self._cos_sin = rope_table(self.config.rope, self.config.head_dim, rows).to(device)
        return self._cos_sin
