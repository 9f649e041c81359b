"""Chooses the executor of an engine by its configuration and by the device that holds the model."""

from __future__ import annotations

from manta.cluster.config import EngineConfig
from manta.cluster.engine.executors.executor import Executor, SynchronousExecutor
from manta.cluster.engine.executors.in_process import InProcessExecutor
from manta.cluster.engine.executors.thread_executor import ThreadExecutor
from manta.structured.visible_logs import logger_of

logger = logger_of(__name__)


def make_executor(config: EngineConfig) -> Executor:
    """Loads the model and returns its executor. Raises `ModelError` or `ValueError` if the model cannot be served as
    configured.
    """
    if config.num_ranks == 1:
        return with_depth(InProcessExecutor(config), config)
    from manta.cluster.engine.ranks.ray_executor import RayExecutor  # imports Ray

    return with_depth(RayExecutor(config), config)


def with_depth(executor: SynchronousExecutor, config: EngineConfig) -> Executor:
    """Returns the given executor, or a wrapper that keeps a step under way while the engine does its own work.

    `overlap: auto` overlaps on a device that computes asynchronously. On a CPU the model uses every core, and the
    engine's work beside it would take one of them. A thread calls workers that cannot run ahead of the host, such as
    ranks.
    """
    overlaps = config.overlaps(executor.model.is_asynchronous)
    chosen = ThreadExecutor(executor) if overlaps and executor.depth == 0 else executor
    if chosen.depth > 0:
        logger.info("the engine plans a step while the device computes the one before it (overlap)")
    return chosen
