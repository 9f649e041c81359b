"""What lies inside an engine whose model runs in this process."""

from __future__ import annotations

from typing import Any

from manta.cluster.engine.engine import Engine
from manta.cluster.engine.executors.thread_executor import ThreadExecutor
from manta.specdecode.speculative_worker import SpeculativeWorker


def device_of(engine: Engine) -> Any:
    """Returns the executor that holds the worker; in the overlapped loop another thread calls it."""
    return getattr(engine.executor, "inner", engine.executor)


def speculative_worker_of(engine: Engine) -> Any:
    """Returns the engine's `SpeculativeWorker`."""
    return device_of(engine).worker


def worker_of(engine: Engine) -> Any:
    """Returns the worker that holds the model; of an engine that speculates, the target."""
    worker = device_of(engine).worker
    return worker.target if isinstance(worker, SpeculativeWorker) else worker


def poison_block(engine: Engine, block: int) -> None:
    """Fills a block of the KV cache with NaN, in every layer. A thread that calls the worker does it."""

    def fill() -> None:
        runner = worker_of(engine).runner
        if hasattr(runner, "kv_cache"):
            runner.kv_cache[:, :, block] = float("nan")
        else:  # JAX's arrays cannot be written to
            runner.model.pages = [pages.at[block].set(float("nan")) for pages in runner.model.pages]

    if isinstance(engine.executor, ThreadExecutor):
        engine.executor._thread.submit(fill).result()
    else:
        fill()
