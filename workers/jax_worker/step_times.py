"""Measures the time of a model's step by its number of tokens, once, when a worker starts."""

from __future__ import annotations

import time

import jax
import numpy as np

from manta.workers.jax_worker.model_state import ModelState
from manta.workers.ranks.rank_worker import StepTimes

MOST_TOKENS = 128
"""Most tokens of a measured step."""
ROUNDS = 3
"""Number of timed steps of each size; the fastest counts."""


def measure_steps(model: ModelState) -> StepTimes:
    """Returns the seconds of the forward pass and the logits of every token, by number of tokens. Overwrites the first
    KV blocks.
    """
    table: StepTimes = []
    block_size = model.limits.block_size
    most = min(MOST_TOKENS, model.num_blocks * block_size, model.limits.max_points)
    for size in (shape.num_tokens for shape in model.limits.shapes if shape.num_tokens <= most):
        blocks = np.arange(-(-size // block_size), dtype=np.int32)[None]
        seconds = []
        for _ in range(ROUNDS + 1):
            started = time.perf_counter()
            model.measured_forward(np.arange(size) % 64, blocks)
            jax.block_until_ready(model.logits(np.arange(size)))
            seconds.append(time.perf_counter() - started)
        table.append((size, min(seconds[1:])))
    return table
