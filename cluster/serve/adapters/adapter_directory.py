"""The loaded adapters as an ingress or the runner of batches knows them, and the changes that it makes for everybody.

A load goes in this order, so that a failure before the third step changes nothing:

1. Every engine reads the adapter, checks it in full, keeps a copy and holds it. Nobody can name it yet. While no engine
   runs, a process of its own does that, but for holding it (`apart_check.py`).
2. All engines must have found the same values.
3. The registry gets the new table. From here on engines and ingresses that start know the adapter.
4. Every other ingress reads the table. Then the operator gets the answer.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError

from manta.cluster.config import ServeConfig
from manta.cluster.engine.adapter_table import AdapterTable, AppliedAdapter, LoadedAdapter
from manta.cluster.errors import Unavailable, error_of, refuse
from manta.cluster.serve.adapters import adapter_registry
from manta.cluster.serve.adapters.adapter_registry import AdapterRegistry
from manta.cluster.serve.adapters.apart_check import can_check_apart, check_apart
from manta.cluster.serve.adapters.shared_call import SharedCall
from manta.cluster.serve.starting.start_failure import in_words
from manta.structured.refusals import Refusal
from manta.structured.visible_logs import logger_of

logger = logger_of(__name__)

KEEP_SLACK_S = 60.0
"""Seconds for which values stay after the last request that may have begun with them is overdue."""
TELLING_S = 10.0
"""Longest time, in seconds, that a process gets to learn of a change."""
ENDING_PAUSE_S = 0.2
"""Seconds between two questions whether requests with an unloaded adapter have ended."""
TELLING_PAUSE_S = 0.2
"""Seconds between two attempts to tell it."""
SETTLING_S = 10.0
"""Seconds after its start in which an ingress may not be told of changes, because Serve does not name it to the others
yet.
"""

Change = Callable[[AdapterTable], AdapterTable]
"""Function that returns the next table. Raises `ServingError` if the table cannot be changed so."""


class AdapterEngines(Protocol):
    """The engines of one model."""

    application: str
    """Name of the application with the engines."""

    async def read_adapter(self, path: str, wakes: bool) -> list[Any]:
        """Makes every engine read the adapter in a folder. If none runs, it waits for one to start if it `wakes`.
        Returns for each the `LoadedAdapter`, the `Refusal`, or the exception.
        """
        ...

    async def uses_adapter(self, digest: str) -> bool:
        """Returns whether a request has the adapter with these values."""
        ...


class NoEngines:
    """Stands for the engines of a model that is not loaded. Implements `AdapterEngines`."""

    def __init__(self, application: str) -> None:
        self.application = application

    async def read_adapter(self, path: str, wakes: bool) -> list[Any]:
        return []

    async def uses_adapter(self, digest: str) -> bool:
        return False


async def ask_every(broadcast: Callable[[], Any], patience_s: float = TELLING_S) -> None:
    """Calls `broadcast`, which calls a method of every replica of a deployment, until each one has answered or died.
    Raises `Unavailable` if one does not answer within `patience_s`.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            left_s = max(TELLING_PAUSE_S, deadline - time.monotonic())
            answers = await broadcast().results_async(timeout_s=left_s, return_exceptions=True)
        except Exception as error:  # Ray raises many types
            answers = [error]
        silent = _silent(answers)
        if not silent:
            return
        if time.monotonic() > deadline:
            cause = f"the change is made, and a process of the server does not answer: {in_words(silent[0])}"
            raise Unavailable(Refusal("unavailable", cause=cause, remedy="it learns of the change when it answers"))
        await asyncio.sleep(TELLING_PAUSE_S)


def _silent(answers: list[Any]) -> list[BaseException]:
    """Returns the exceptions that tell of a process that may live and has not answered."""
    return [each for each in answers if isinstance(each, BaseException) and not _is_gone(each)]


def _is_gone(answer: object) -> bool:
    """Returns whether an answer stands for a process that lives no more."""
    return isinstance(answer, RayActorError | DeploymentUnavailableError)


async def tell_nobody() -> None:
    """Tells nobody, for the only process that serves."""


class AdapterDirectory:
    """The loaded adapters of the model that `engines` serve. `keep_s` is the longest time of a request. `tell_others`
    makes all other processes that serve read the table, and raises `Unavailable` if one does not. `configured` are the
    names of the adapters that the configuration has. `check_apart` returns what a process of its own finds in a folder
    while no engine runs; None wakes an engine for that. Implements
    `manta.cluster.http.exchange.loaded_adapters.LoadedAdapters`.
    """

    def __init__(
        self,
        engines: AdapterEngines,
        registry: AdapterRegistry,
        keep_s: float,
        tell_others: Callable[[], Awaitable[None]] = tell_nobody,
        settling_s: float = SETTLING_S,
        configured: Collection[str] = (),
        check_apart: Callable[[str], Awaitable[Any]] | None = None,
    ) -> None:
        self.tell: Callable[[Collection[str]], None] = lambda names: None
        self._engines = engines
        self._registry = registry
        self._keep_s = keep_s + KEEP_SLACK_S
        self._tell_others = tell_others
        self._configured = configured
        self._check_apart = check_apart
        self._checking = asyncio.Lock()
        """Lock of the load for which a process of its own runs."""
        self._table = AdapterTable()
        self._is_read = False
        self._following: asyncio.Task[None] | None = None
        self._reading = SharedCall(self._read_table)
        self._settled = time.monotonic() + settling_s

    @property
    def paths(self) -> Mapping[str, str]:
        return {name: each.path for name, each in self._table.loaded.items()}

    @property
    def applied(self) -> Sequence[AppliedAdapter]:
        return self._table.scaled

    @property
    def is_settling(self) -> bool:
        return time.monotonic() < self._settled

    def digest_of(self, name: str) -> str | None:
        loaded = self._table.loaded.get(name)
        return None if loaded is None else loaded.digest

    async def refresh(self) -> None:
        await self._reading()

    async def _read_table(self) -> None:
        self._take(await asyncio.to_thread(self._registry.read))

    async def follow(self) -> None:
        """Reads the table before it returns if it was never read, and otherwise later. Raises what the registry raises
        the first time.
        """
        if not self._is_read:
            await self.refresh()
        elif self._following is None or self._following.done():
            self._following = asyncio.ensure_future(self._follow())

    async def _follow(self) -> None:
        try:
            await self.refresh()
        except Exception as error:  # Ray raises many types when its store does not answer
            logger.warning("the table of loaded adapters cannot be read: %s", in_words(error))

    def _take(self, table: AdapterTable) -> None:
        if self._is_read and table.version <= self._table.version:
            return
        self._table, self._is_read = table, True
        self.tell(table.loaded)

    # ---- changes -----------------------------------------------------------------------------------------------------

    async def load(self, name: str, path: str, in_place: bool) -> None:
        found = await self._read_everywhere(path)

        def put(table: AdapterTable) -> AdapterTable:
            if name in table.loaded and not in_place:
                refuse("name_taken", "lora_name", name, "an adapter that is loaded", "send load_inplace: true")
            return self._with_loaded(table, {**table.loaded, name: found})

        await self._change(put)
        logger.info("the adapter %r has the values %s, from %s", name, found.digest, found.path)

    async def unload(self, name: str, waits: bool = False) -> None:
        removed = ""

        def remove(table: AdapterTable) -> AdapterTable:
            nonlocal removed
            if name not in table.loaded:
                refuse("unknown_model", "lora_name", name, tuple(table.loaded) or "no adapter")
            removed = table.loaded[name].digest
            return self._with_loaded(table, {other: each for other, each in table.loaded.items() if other != name})

        await self._change(remove)
        logger.info("the adapter %r is unloaded", name)
        while waits and removed not in self._table.digests and await self._engines.uses_adapter(removed):
            await asyncio.sleep(ENDING_PAUSE_S)

    async def apply(self, applied: Sequence[AppliedAdapter]) -> None:
        def put(table: AdapterTable) -> AdapterTable:
            for each in applied:
                if each.name not in (*self._configured, *table.loaded):
                    cause = f"the adapter {each.name!r} was unloaded meanwhile"
                    refuse("unfit", cause=cause, remedy="read the list of adapters again")
            return table.applying(applied)

        await self._change(put)
        logger.info("requests that name the model have the adapters %r", [*applied])

    async def _read_everywhere(self, path: str) -> LoadedAdapter:
        """Returns what every engine has found in a folder. Raises `ServingError` if one refuses it, if they differ, or
        if one does not answer. An engine that died does not count: the one in its place reads the registry. If none is
        left, a process of its own reads the folder.
        """
        answers = await self._engines.read_adapter(path, wakes=self._check_apart is None)
        if self._check_apart is not None and all(map(_is_gone, answers)):
            async with self._checking:
                answers = [await self._check_apart(path)]
        for refusal in (each for each in answers if isinstance(each, Refusal)):
            raise error_of(refusal)
        found = {each for each in answers if isinstance(each, LoadedAdapter)}
        silent = _silent(answers)
        if silent or not found:
            cause = f"an engine has not read it: {in_words(silent[0])}" if silent else "no engine runs"
            raise Unavailable(Refusal("unavailable", "lora_path", cause=cause, remedy="load it again"))
        if len({each.digest for each in found}) > 1:
            cause, remedy = "it has other values on other nodes", "copy it there again"
            refuse("unfit", "lora_path", path, remedy=remedy, cause=cause)
        return next(iter(found))

    def _with_loaded(self, table: AdapterTable, loaded: Mapping[str, LoadedAdapter]) -> AdapterTable:
        return table.changed(loaded, time.time(), self._keep_s)

    async def _change(self, change: Change) -> None:
        """Changes the table for everybody. Once it is changed, a client that leaves stops nothing."""
        while True:
            changed = change(await asyncio.to_thread(self._registry.read))
            if await asyncio.shield(asyncio.ensure_future(self._publish(changed))):
                return

    async def _publish(self, table: AdapterTable) -> bool:
        if not await asyncio.to_thread(self._registry.replace, table):
            return False
        self._take(table)
        await self._tell_others()
        return True


def open_directory(
    config: ServeConfig,
    engines: AdapterEngines,
    tell_others: Callable[[], Awaitable[None]] = tell_nobody,
    settling_s: float = SETTLING_S,
) -> AdapterDirectory | None:
    """Returns the loaded adapters of the model that the engines serve; None if the configuration lets nobody load
    any. For `settling_s` others may not tell this process of changes.
    """
    if not config.engine.adapter_roots:
        return None
    registry = adapter_registry.open_registry(engines.application, config.engine.model)
    apart = functools.partial(check_apart, config.engine, registry.server) if can_check_apart(config.engine) else None
    names, longest_s = config.engine.adapters, config.request_timeout_s
    return AdapterDirectory(engines, registry, longest_s, tell_others, settling_s, names, apart)
