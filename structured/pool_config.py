"""Options of the grammar pool: plain data that `manta.cluster.config.EngineConfig` holds."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pool of workers that fill grammar masks."""

    form: Literal["auto", "threads", "processes", "actors"] = "auto"
    """Whether grammar workers are threads of the engine's process, processes that it starts, or Ray actors on its
    machine. `auto` takes processes for a GPU, beside which the engine's own interpreter is busy. Otherwise it takes
    threads, which were faster from 1 to 128 rows on two cores (`manta bench constraints`).
    """
    num_workers: Annotated[int, Meta(ge=1, le=16)] = 2
    """Number of grammar workers that share the sessions. Processes and actors have one warm spare in addition."""
    migrate_seconds: Annotated[float, Meta(gt=0)] = 0.02
    """Seconds that a row waits for a busy worker before its session moves to another one."""
    mask_seconds: Annotated[float, Meta(gt=0)] = 5.0
    """Seconds in which a worker must fill one row. A session that takes longer fails, and its worker is replaced."""
