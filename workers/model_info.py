"""What a rank tells the driver about the model that it loaded. Plain data, so that readers need no torch."""

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
    """The form of the CPU kernels (`workers/kernels/processor.py`), or `torch` without a compiler."""
    load_seconds: float
    load_phases: dict[str, float] = {}
    """Seconds of each part of `load_seconds`, in order."""
    advice: str | None = None
    """One line: what keeps the device from its full speed, and the remedy."""
    weights: str | None = None
    """What the option `weights` does, in words; None if it changes nothing."""
    is_asynchronous: bool = False
    """Whether the device computes by itself, on none of the host's cores."""
    step_costs: tuple[tuple[int, float], ...] = ()
    """(tokens, seconds) of steps, tokens ascending; measured only if the number of drafts is adaptive."""
