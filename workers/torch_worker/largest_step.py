"""Runs the largest step of a rank at start, so that the platform sees how much memory a step takes and compiles the
sampler.

The worker calls it after the weights are loaded and before it plans the KV cache. Its tokens are dropped.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from manta.structured.masks import MaskBatch, row_words
from manta.workers.kernels.layer_caches import (
    allocate_hidden,
    allocate_states,
    draft_head_caches,
    layer_caches,
)
from manta.workers.kernels.model_protocol import LoadedModel
from manta.workers.kernels.query_tokens import QueryTokens
from manta.workers.kv_groups import one_group
from manta.workers.platforms import Platform
from manta.workers.sampling.sampling_state import SamplingState
from manta.workers.sampling_params import SamplingParams
from manta.workers.step import NUM_FIXED_STATES, SamplePoint, SequenceStart
from manta.workers.torch_worker.sampler import sample

_EDITS: dict[str, Any] = {"repetition_penalty": 1.1, "logit_bias": {0: 1.0}, "min_tokens": 1}
_FILTERS: dict[str, Any] = {"top_p": 0.9}


@torch.inference_mode()
def run_largest_step(
    loaded: LoadedModel, platform: Platform, block_size: int, num_tokens: int, num_rows: int, draws: bool
) -> None:
    """Runs a forward pass over `num_tokens`, at most the model's positions, with a temporary KV cache.

    Computes the logits of `num_rows` rows. If this rank `draws`, also draws one row under every combination of edits,
    filters and a mask, and all rows under all of them.
    """
    config, model, dtype, kv_dtype = loaded
    num_tokens = min(num_tokens, config.max_position_embeddings)
    num_blocks = -(-num_tokens // block_size)
    layers = one_group(config.attends)
    kv_cache = platform.allocate_kv(config, num_blocks, block_size, kv_dtype, layers.layers_per_block)
    if config.is_draft_head:
        hidden_states = allocate_hidden(config.hidden_size, num_blocks, block_size, dtype, platform.device)
        caches = draft_head_caches(kv_cache, hidden_states)
    else:
        caches = layer_caches(kv_cache, layers, allocate_states(config.states, NUM_FIXED_STATES, platform.device))
    has_states = bool(config.state_bytes)
    metadata = platform.build_metadata(QueryTokens.measuring(num_tokens, block_size, has_states))
    token_ids = platform.place(np.zeros(num_tokens, dtype=np.int64))
    hidden = model.forward(token_ids, metadata, caches)
    logits = model.compute_logits(hidden[:num_rows])
    if draws:
        # Rows with logits processors are drawn from in float32
        rows = (logits[:1],) if logits.dtype == torch.float32 else (logits[:1], logits[:1].float())
        for row, edits, filters, has_masks in itertools.product(rows, ({}, _EDITS), ({}, _FILTERS), (False, True)):
            _draw(row, platform, SamplingParams(**edits, **filters), has_masks)
        _draw(logits, platform, SamplingParams(**_EDITS, **_FILTERS, logprobs=1), has_masks=True)


def _draw(logits: torch.Tensor, platform: Platform, params: SamplingParams, has_masks: bool) -> None:
    num_rows, vocab_size = logits.shape
    state = SamplingState(vocab_size)
    for row in range(num_rows):
        state.start(SequenceStart(row, params, 0, [0], 1, eos_token_ids=(0,)))
    everything = np.full((num_rows, row_words(vocab_size)), -1, dtype=np.int32)
    masks = MaskBatch(0, list(range(num_rows)), everything, {}) if has_masks else None
    points = [SamplePoint(row, row, 1) for row in range(num_rows)]
    sample(platform.sampler, logits, points, state, masks)
