"""Runs the largest step that a rank can have, so that its platform sees what memory a step takes beside the weights and
the KV cache. Called by the worker before it plans the cache; draws no token that anybody gets.
"""

from __future__ import annotations

import numpy as np
import torch

from workers.models.protocol import LoadedModel
from workers.platforms import Platform


@torch.inference_mode()
def run_largest_step(
    loaded: LoadedModel, platform: Platform, dtype: str, block_size: int, num_tokens: int, num_rows: int
) -> None:
    """A forward pass over `num_tokens`, as far as the model has positions, and logits of `num_rows` of them, over KV
    blocks of its own.
    """
    config, model = loaded
    num_tokens = min(num_tokens, config.max_position_embeddings)
    num_blocks = -(-num_tokens // block_size)
    kv_cache = platform.allocate_kv(config, num_blocks, block_size, platform.torch_dtype(dtype))
    tables = np.arange(num_blocks, dtype=np.int32)[None]
    metadata = platform.build_metadata(np.array([0]), np.array([num_tokens]), tables, block_size)
    token_ids = platform.place(np.zeros(num_tokens, dtype=np.int64))
    hidden = model.forward(token_ids, metadata, [(layer[0], layer[1]) for layer in kv_cache])
    # Filters and log-probabilities read logits in float32
    model.compute_logits(hidden[:num_rows]).float()
