"""The replica of whatever model the configuration names: one that generates, or one that pools.

The checkpoint decides, or the option `task`, when the replica starts. A node that only deploys need not have it.
"""

from __future__ import annotations

from typing import Any

from manta.cluster.config import EngineConfig
from manta.cluster.serve.engine.engine_replica import EngineReplica
from manta.cluster.serve.engine.pooling_replica import PoolingReplica
from manta.cluster.serve.starting.start_failure import told_in_words
from manta.workers.checkpoints.model_folder import resolve_model_folder
from manta.workers.checkpoints.pooling_folder import read_pooling
from manta.workers.phases import Phases


def make_replica(
    config: EngineConfig, is_alone: bool = False, seconds_before: float = 0.0, is_awaited: bool = False
) -> EngineReplica | PoolingReplica:
    """Returns the replica for a configuration; see `EngineReplica`."""
    with told_in_words():
        pools = read_pooling(resolve_model_folder(config.model), config.task) is not None
    if pools:
        return PoolingReplica(config, Phases(process=seconds_before))
    return EngineReplica(config, is_alone, seconds_before, is_awaited)


class ModelReplica:
    """Passes every remote call on to the replica that `make_replica` returns."""

    def __init__(self, config: EngineConfig, is_alone: bool = False, is_awaited: bool = False) -> None:
        self._replica = make_replica(config, is_alone, self.seconds_before(), is_awaited)

    @staticmethod
    def seconds_before() -> float:
        """Returns the seconds that this replica's process ran before the constructor; 0 if the process is shared."""
        return 0.0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._replica, name)
