"""Measures the time of a model's step by its number of tokens, once, when a rank starts and before anything is cached.

`specdecode/lengths.py` weighs drafts against these times.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from manta.workers.kernels.model_protocol import Model
from manta.workers.kernels.protocol import KVCaches
from manta.workers.kernels.query_tokens import QueryTokens
from manta.workers.platforms import Platform
from manta.workers.ranks.rank_worker import StepTimes

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Tokens of the measured steps."""
ROUNDS = 3
"""Fewest timed steps of each size; the fastest counts."""
LEAST_SECONDS = 0.02
"""Shortest total time of the steps of one size in seconds, because disturbances affect the short steps of small models
most.
"""


@torch.inference_mode()
def measure_steps(
    model: Model, kv_layers: KVCaches, num_blocks: int, block_size: int, platform: Platform, has_states: bool = False
) -> StepTimes:
    """Returns the seconds of the forward pass, the logits of every token and their argmax, by number of tokens.

    Overwrites the first of the `num_blocks` KV blocks. `has_states` says whether the model has recurrent states.
    """
    table: StepTimes = []
    for size in SIZES:
        if size > num_blocks * block_size:
            break
        token_ids = platform.place(np.arange(size) % 64)
        seconds: list[float] = []
        while len(seconds) < ROUNDS + 1 or sum(seconds) < LEAST_SECONDS:
            started = time.perf_counter()
            metadata = platform.build_metadata(QueryTokens.measuring(size, block_size, has_states))
            model.compute_logits(model.forward(token_ids, metadata, kv_layers)).argmax(dim=-1).tolist()
            seconds.append(time.perf_counter() - started)
        table.append((size, min(seconds[1:])))
    return table
