"""Runs an EAGLE-3 draft head (`workers/models/eagle3.py`): a decoder with one layer, which reads embeddings beside its
residual stream.

The draft runner calls it as any `Model`. Where it drafts, its residual stream takes the place of the fused state.
"""

from __future__ import annotations

import torch

from manta.workers.decoders.decoder import Decoder
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.protocol import KVCaches
from manta.workers.kernels.weights import Eagle3Weights
from manta.workers.models.model_config import ModelConfig
from manta.workers.platforms import Platform


class Eagle3Head:
    """A `Model` whose position `i` holds the token at position `i + 1` of a sequence, and reads what `fuse` made of the
    model's residual stream at position `i`.
    """

    def __init__(self, config: ModelConfig, weights: Eagle3Weights, platform: Platform) -> None:
        self.config = config
        self.sliding_windows = config.sliding_windows
        self._weights = weights
        self._kernels = platform.kernels
        self._decoder = Decoder(config, weights.decoder, platform)
        self.compiled = self._decoder.compiled

    def fuse(self, tapped: torch.Tensor) -> torch.Tensor:
        """Returns the states that the head reads, [num_tokens, hidden], of those that `Decoder.forward_tapped` of the
        model returns, [num_tokens, len(taps) * target_size].
        """
        return self._weights.fuse.forward(tapped.contiguous())

    def forward(self, token_ids: torch.Tensor, metadata: AttentionMetadata, kv_caches: KVCaches) -> torch.Tensor:
        """Computes the residual stream after the layer, [num_tokens, hidden]; writes keys and values like
        `Decoder.forward`. `kv_caches` has keys, values and fused states (`draft_head_caches`): each token reads the
        state in its KV slot.
        """
        ((keys, values, states),) = kv_caches
        weights, eps = self._weights, self.config.rms_norm_eps
        stream = states[metadata.slot_mapping]
        if weights.stream_norm is not None:
            stream = self._kernels.rms_norm(stream, weights.stream_norm, eps)
        embedded = self._kernels.rms_norm(self._decoder.embed(token_ids), weights.embedding_norm, eps)
        result = self._decoder.forward_embedded(stream, metadata, [(keys, values)], embedded.unsqueeze(0))
        return result[:, self.config.hidden_size :].contiguous()

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the logits of the tokens after those of rows of `forward`'s result, [num_rows, target_vocab_size]:
        minus infinity for tokens that the head does not draft.
        """
        weights = self._weights
        normed = self._kernels.rms_norm(hidden, weights.decoder.final_norm, self.config.rms_norm_eps)
        logits = self._decoder.compute_logits(normed)
        if weights.target_ids is None:
            return logits
        wide = logits.new_full((logits.shape[0], self.config.num_tokens_read), float("-inf"))
        wide[:, weights.target_ids] = logits
        return wide
