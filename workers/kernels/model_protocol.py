"""The protocol of a model: all that the model runner needs of any implementation."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.protocol import Forward, KVCaches
from manta.workers.models.model_config import ModelConfig


class Model(Protocol):
    """`workers/decoders/decoder.py` and `workers/decoders/transformers_model.py`."""

    config: ModelConfig
    """Configuration of this rank's share of the model."""
    compiled: Forward | None
    """The layers as the platform compiled them (`Platform.compile_decoder`); None if it did not."""

    sliding_windows: tuple[int | None, ...]
    """The window of each layer in positions, the token's own included; None for all."""

    def forward(self, token_ids: torch.Tensor, metadata: AttentionMetadata, kv_caches: KVCaches) -> torch.Tensor:
        """Final hidden states [num_tokens, hidden] of int64 token_ids [num_tokens]; fills the layers' KV caches."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, vocab_size] of final hidden states [num_rows, hidden]."""
        ...


class LoadedModel(NamedTuple):
    config: ModelConfig
    """Configuration of this rank's share of the model."""
    model: Model
    dtype: torch.dtype
    """Dtype of activations."""
    kv_dtype: torch.dtype
    """Dtype of cached keys and values."""
