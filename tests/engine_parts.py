"""What lies inside an engine whose model runs in this process."""

from __future__ import annotations

from typing import Any

from cluster.engine.engine import Engine
from specdecode.speculative_worker import SpeculativeWorker


def device_of(engine: Engine) -> Any:
    """Returns the executor that holds the worker; in the overlapped loop another thread calls it."""
    return getattr(engine.executor, "inner", engine.executor)


def speculative_worker_of(engine: Engine) -> Any:
    """Returns the engine's `SpeculativeWorker`."""
    return device_of(engine)._worker


def worker_of(engine: Engine) -> Any:
    """Returns the worker that holds the model; of an engine that speculates, the target."""
    worker = device_of(engine)._worker
    return worker.target if isinstance(worker, SpeculativeWorker) else worker
