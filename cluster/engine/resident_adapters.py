"""The adapters that an engine holds in memory: which ones are there, and which one leaves when another one needs room.

The ranks hold the values. Here are only digests, so this imports no framework. Used between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from manta.cluster.engine.executors.executor import Executor
from manta.cluster.engine.scheduler import Scheduler
from manta.workers.adapter_key import AdapterKey
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
        self.digests = frozenset(self._fixed)
        """The digests of all that are here, as another object when they have changed. Any thread may ask."""
        self.find: Callable[[str], ReadAdapter] | None = None
        """Reads the adapter with a digest again; None if none may leave."""

    def __contains__(self, key: object) -> bool:
        """Returns whether the values of an adapter's key or digest are here."""
        digest = AdapterKey.of(key).digest if isinstance(key, str) else None
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

    def use(self, key: str) -> None:
        """Notes that a request has the adapter with a key. Does nothing for an adapter that is not here."""
        digest = AdapterKey.of(key).digest
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
            self._note()
        self.use(adapter.digest)
        return True

    def restore(self) -> None:
        """Has ranks that were started anew hold the adapters of all sequences. Others come back when a request names
        them. Raises what `find` raises, and `RuntimeError` if there is no room.
        """
        used = self._scheduler.adapters_in_use()
        lost, self._loaded = self._loaded, {}
        self._note()
        for digest in lost:
            if digest in used:
                assert self.find is not None, "whoever loads adapters can read them again"
                if not self.hold(self.find(digest)):
                    raise RuntimeError(f"the adapter {digest} finds no room any more")

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
        self._note()

    def _note(self) -> None:
        self.digests = frozenset((*self._fixed, *self._loaded))
