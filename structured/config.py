"""Options of the grammar pool; plain data that `cluster.config.EngineConfig` holds."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How masks are filled. Times in seconds."""

    form: Literal["auto", "threads", "actors"] = "auto"
    """Threads of the engine's process, or Ray actors beside it. `auto` takes threads, which on two cores
    were the quicker ones from 1 to 128 rows (`benchmarks/results/`).
    """
    num_workers: Annotated[int, Meta(ge=1, le=16)] = 2
    """Workers that share the sessions; actors have one more as a warm spare."""
    migrate_seconds: Annotated[float, Meta(gt=0)] = 0.02
    """A row that waits this long behind another one moves to another worker."""
    mask_seconds: Annotated[float, Meta(gt=0)] = 5.0
    """Budget of one row once a worker is busy with it; a session that exceeds it fails, and the worker is replaced."""
