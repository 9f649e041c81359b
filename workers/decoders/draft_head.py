"""Runs the draft head of a model (`workers/models/draft_heads.py`): a decoder with one layer, whose input is made of
tokens and of the model's hidden states.

The draft runner calls it as any `Model`.
"""

from __future__ import annotations

import torch

from manta.workers.decoders.decoder import Decoder
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.protocol import KVCaches
from manta.workers.kernels.weights import DraftHeadWeights
from manta.workers.models.model_config import ModelConfig
from manta.workers.platforms import Platform


class DraftHead:
    """A `Model` whose position `i` holds the token at position `i + 1` of a sequence, and reads the hidden state that
    the sequence's model has at position `i`.
    """

    def __init__(self, config: ModelConfig, weights: DraftHeadWeights, platform: Platform) -> None:
        self.config = config
        self.sliding_windows = config.sliding_windows
        self._weights = weights
        self._kernels = platform.kernels
        self._decoder = Decoder(config, weights.decoder, platform)
        self.compiled = self._decoder.compiled

    def forward(self, token_ids: torch.Tensor, metadata: AttentionMetadata, kv_caches: KVCaches) -> torch.Tensor:
        """Computes hidden states like `Decoder.forward`. `kv_caches` has keys, values and hidden states
        (`draft_head_caches`): each token reads the hidden state in its KV slot.
        """
        ((keys, values, hidden_states),) = kv_caches
        eps = self.config.rms_norm_eps
        embedded = self._kernels.rms_norm(self._decoder.embed(token_ids), self._weights.embedding_norm, eps)
        previous = self._kernels.rms_norm(hidden_states[metadata.slot_mapping], self._weights.hidden_norm, eps)
        joined = self._weights.join.forward(torch.cat((embedded, previous), dim=-1))
        return self._decoder.forward_embedded(joined, metadata, [(keys, values)])

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the logits of the tokens after those of rows of `forward`'s result, [num_rows, vocab_size]."""
        return self._decoder.compute_logits(hidden)
