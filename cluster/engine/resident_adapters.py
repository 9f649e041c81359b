"""The adapters that an engine holds in memory: which ones are there, and which one leaves when another one needs room.

The ranks hold the values. Here are only digests, so this imports no framework. Used between two steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from manta.cluster.engine.executors.executor import Executor
from manta.cluster.engine.scheduler import Scheduler
from manta.workers.model_info import AdapterInfo
from manta.workers.ranks.rank_worker import ReadAdapter


class ResidentAdapters:
    """The digests of the adapters that the ranks of `executor` hold. Those of the configuration (`fixed`) stay. Another
    one stays while a sequence of `scheduler` has it.
    """

    def __init__(self, executor: Executor, scheduler: Scheduler, fixed: Iterable[AdapterInfo]) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._fixed = {each.digest: each.num_bytes for each in fixed}
        self._loaded: dict[str, None] = {}
        """Digests of those that may leave, least recently used first."""

    def __contains__(self, digest: object) -> bool:
        return digest in self._fixed or digest in self._loaded

    def __iter__(self) -> Iterator[str]:
        return iter((*self._fixed, *self._loaded))

    def __len__(self) -> int:
        return len(self._fixed) + len(self._loaded)

    @property
    def loaded(self) -> tuple[str, ...]:
        """The digests of the adapters that may leave. Any thread may ask."""
        return tuple(self._loaded)

    @property
    def num_fixed_bytes(self) -> int:
        """Bytes of the adapters that never leave."""
        return sum(self._fixed.values())

    def use(self, digest: str) -> None:
        """Notes that a request has an adapter. Does nothing for an adapter that is not here."""
        if digest in self._loaded:
            self._loaded[digest] = self._loaded.pop(digest)

    def hold(self, adapter: ReadAdapter) -> bool:
        """Holds an adapter, in the place of the least recently used ones if need be. Returns False if those that
        sequences have leave no room.
        """
        if adapter.digest not in self:
            used = self._scheduler.adapters_in_use()
            unused = (each for each in list(self._loaded) if each not in used)
            while not self._executor.hold_adapter(adapter):
                leaving = next(unused, None)
                if leaving is None:
                    return False
                self._forget(leaving)
            self._loaded[adapter.digest] = None
        self.use(adapter.digest)
        return True

    def drop(self, digest: str) -> bool:
        """Forgets an adapter, unless the configuration names it. Returns False if a sequence still has it."""
        if digest in self._loaded:
            if digest in self._scheduler.adapters_in_use():
                return False
            self._forget(digest)
        return True

    def _forget(self, digest: str) -> None:
        self._executor.drop_adapter(digest)
        del self._loaded[digest]
