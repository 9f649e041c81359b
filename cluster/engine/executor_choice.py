"""Chooses the executor of an engine by its configuration, and by the device on which its model is loaded."""

from __future__ import annotations

import logging

from cluster.config import EngineConfig
from cluster.engine.executors.executor import Executor, SynchronousExecutor
from cluster.engine.executors.in_process import DeviceExecutor, InProcessExecutor
from cluster.engine.executors.thread_executor import ThreadExecutor

logger = logging.getLogger(__name__)


def make_executor(config: EngineConfig) -> Executor:
    """Loads the model. Raises `ModelError` or `ValueError` where it cannot be served as the configuration says."""
    if config.overlap == "on" and config.speculative is not None:
        raise ValueError(
            "overlap: on does not go with speculation, whose drafts are planned from tokens that are known; "
            "set overlap to auto, or leave speculation out"
        )
    if config.tensor_parallel_size == 1:
        return with_depth(InProcessExecutor(config), config)
    from cluster.engine.ranks.executor import RayExecutor  # imports Ray

    return with_depth(RayExecutor(config), config)


def with_depth(executor: SynchronousExecutor, config: EngineConfig) -> Executor:
    """Returns an executor around the given one that has a step under way behind another, where `config.overlap` asks
    for that or the device gains by it; else the given one.

    `auto` leaves a device whose calls wait to the given one: on a CPU the model takes every core, and the engine's work
    beside it would take one of them away.
    """
    if config.speculative is not None or config.overlap == "off":
        return executor
    if isinstance(executor, InProcessExecutor) and executor.runs_ahead:
        deeper: Executor = DeviceExecutor(executor)
    elif config.overlap == "on":
        deeper = ThreadExecutor(executor)
    else:
        return executor
    logger.info("a step is launched before the tokens of the one before it are known (overlap)")
    return deeper
