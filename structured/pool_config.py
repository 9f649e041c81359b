"""Options of the grammar pool; plain data that `cluster.config.EngineConfig` holds."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How masks are filled. Times in seconds."""

    form: Literal["auto", "threads", "actors"] = "auto"
    """Threads of the engine's process, or Ray actors on the same machine. `auto` takes threads: on two cores they were
    quicker than actors from 1 to 128 rows (`benchmarks/results/`).
    """
    num_workers: Annotated[int, Meta(ge=1, le=16)] = 2
    """Grammar workers that share the sessions. With actors there is one more, a warm spare."""
    migrate_seconds: Annotated[float, Meta(gt=0)] = 0.02
    """If a row waits this long while its worker fills another one, its session moves to another worker."""
    mask_seconds: Annotated[float, Meta(gt=0)] = 5.0
    """Budget of one row, from when a worker begins it. A session that exceeds it fails, and the worker is replaced."""
