"""Engine replicas in this process, as Serve would run each in one of its own."""

from __future__ import annotations

from typing import Any

from manta.cluster.config import EngineConfig
from manta.cluster.serve.engine.engine_replica import EngineReplica
from tests.checkpoints import checkpoint


class Replicas:
    """Makes replicas, and ends all of them at `close`: their threads and the processes that compile constraints."""

    def __init__(self) -> None:
        self._made: list[EngineReplica] = []

    def __call__(self, config: EngineConfig | None = None, is_awaited: bool = False, **options: Any) -> EngineReplica:
        """Returns a replica with a configuration, or with the tests' usual one and `options`."""
        defaults = {"model": str(checkpoint("llama")), "dtype": "float32", "kv_cache_bytes": 8 << 20}
        options = {**defaults, **options}
        self._made.append(EngineReplica(config or EngineConfig(**options), is_awaited=is_awaited))
        return self._made[-1]

    def close(self) -> None:
        for replica in self._made:
            replica.close()
