"""Options of the grammar pool: plain data that `manta.cluster.config.EngineConfig` holds."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from manta.structured.host import num_cores

PoolForm = Literal["threads", "processes", "actors"]

GRAMMAR_CACHE_BYTES = 64 * 2**20
"""Maximum memory of the grammars that one worker caches."""
LEAST_WORKERS, MOST_WORKERS, PROCESSORS_OF_WORKER = 2, 8, 4
"""Bounds of `PoolConfig.num_workers_of`, and the processors for each process: the model needs some of them."""


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pool of workers that fill grammar masks."""

    form: Literal["auto", "threads", "processes", "actors"] = "auto"
    """Whether grammar workers are threads of the engine's process, processes that it starts, or Ray actors on its
    machine. `auto` takes processes for a GPU, beside which the engine's own interpreter is busy. Otherwise it takes
    threads, which were faster from 1 to 128 rows on two cores (`manta bench constraints`).
    """
    num_workers: Annotated[int, Meta(ge=1, le=16)] | None = None
    """Number of grammar workers that share the sessions. If absent, there are two, and of processes one for each four
    processors if that is more. Processes and actors have one warm spare in addition.
    """
    migrate_seconds: Annotated[float, Meta(gt=0)] = 0.02
    """Seconds that a row waits for a busy worker before its session moves to another one."""
    mask_seconds: Annotated[float, Meta(gt=0)] = 5.0
    """Seconds in which a worker must fill one row. A session that takes longer fails, and its worker is replaced."""

    def num_workers_of(self, form: PoolForm) -> int:
        """Returns the number of grammar workers that a pool of this form has."""
        if self.num_workers is not None:
            return self.num_workers
        share = num_cores() // PROCESSORS_OF_WORKER if form == "processes" else 0
        return min(max(LEAST_WORKERS, share), MOST_WORKERS)
