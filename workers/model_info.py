"""What a worker tells the driver of the model that it loaded. Plain data, so that whoever reads it needs no torch."""

from __future__ import annotations

import msgspec


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver must know of the loaded model."""

    folder: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    block_size: int
    kv_cache_bytes: int
    dtype: str
    platform: str
    kernels: str
    """What multiplies: the form of the CPU kernels (`workers/kernels/processor.py`), or `torch` without a compiler."""
    load_seconds: float
    advice: str | None = None
    """What keeps the device from its full speed, and the remedy, in a line."""
    step_costs: tuple[tuple[int, float], ...] = ()
    """(tokens, seconds) of steps, tokens ascending; measured where drafts are weighed against them."""
