"""The models that one process uses, an ingress or the runner of batches, and its side of the loader (`loader.py`).

A process that holds a model on demand uses it without asking anybody. For one that it does not hold, each request asks
the loader and waits. The loader makes the process let go of a model before it leaves.

Between the loader's answer and the moment when it arrives here, nobody would count the request. So the loader says how
many requests wait at it, and if more ask here, some have got their answer or will: the model is in use.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, NoReturn, Protocol

from manta.cluster.config import ServedModel
from manta.cluster.errors import ServingError, error_of, refuse
from manta.cluster.serve.adapters.adapter_directory import tell_nobody
from manta.cluster.serve.requests.engine_client import answer_of
from manta.cluster.serve.starting.start_failure import in_words
from manta.structured.visible_logs import logger_of

logger = logger_of(__name__)

ATTEMPT_S = 0.5
"""Seconds between two attempts to reach the loader, or to find a model that it has loaded."""
ANSWER_S = 1.0
"""Seconds of a request's deadline that are left for its answer when the wait for its model is given up."""


class Served(Protocol):
    """The models as the process finds them in Serve. `Fleet` implements it."""

    def is_served(self, name: str) -> bool:
        """Returns whether the model's engines can be called, or it cannot be served in this process at all."""
        ...

    def is_running(self, name: str) -> bool:
        """Returns whether engines work for this process, also for clients that have left."""
        ...

    async def look(self) -> None:
        """Asks Serve for the models."""
        ...


class Holds:
    """The models that the process `own_id` uses. `loader` is a handle, `now` is a clock in seconds. `tell_others` makes
    the other processes that serve look for models. Implements `manta.cluster.http.exchange.on_demand.OnDemand`.
    """

    def __init__(
        self,
        served: Served,
        loader: Any,
        own_id: str,
        now: Callable[[], float] = time.monotonic,
        tell_others: Callable[[], Awaitable[None]] = tell_nobody,
    ) -> None:
        self._served = served
        self._loader = loader
        self._own_id = own_id
        self._now = now
        self._tell_others = tell_others
        self._held: set[str] = set()
        self._using: collections.Counter[str] = collections.Counter()
        """Requests that use each model."""
        self._asking: collections.Counter[str] = collections.Counter()
        """Requests that ask the loader for each model."""
        self._used: dict[str, float] = {}
        """Time at which the last request for each model ended."""

    @contextlib.asynccontextmanager
    async def use(self, name: str, client: str, timeout_s: float) -> AsyncIterator[None]:
        """Keeps a model loaded during the body of the `async with`, which begins when it is loaded."""
        if name in self._held and self._served.is_served(name):
            self._using[name] += 1
        else:
            await self._take(name, client, timeout_s)
        try:
            yield
        finally:
            self._end_use(name)

    @contextlib.contextmanager
    def using(self, name: str) -> Iterator[None]:
        self._using[name] += 1
        try:
            yield
        finally:
            self._end_use(name)

    def _end_use(self, name: str) -> None:
        self._using[name] -= 1
        self._used[name] = self._now()

    async def load(self, name: str, timeout_s: float) -> None:
        await self._retried(lambda: self._call("begin_load", name, timeout_s), self._now())

    async def unload(self, name: str) -> None:
        await self._retried(lambda: self._call("begin_unload", name), self._now())

    async def add(self, entry: ServedModel) -> None:
        await self._change("add", entry)

    async def update(self, name: str, fields: dict[str, Any]) -> None:
        await self._change("update", name, fields)

    async def remove(self, name: str) -> None:
        await self._change("remove", name)

    async def _change(self, method: str, *arguments: object) -> None:
        """Has the loader change the list of models. Returns when all processes that serve know it. Refuses with 503 if
        one does not learn of it, which says that the change is made.
        """
        await self._retried(lambda: self._call(method, *arguments), self._now())
        try:
            await self._served.look()
        except Exception as error:  # Serve's controller or the store does not answer; Ray raises many types
            cause = f"the change is made, and this process cannot read it yet: {in_words(error)}"
            refuse("unavailable", cause=cause, remedy="it looks again every half second")
        await self._tell_others()

    # ---- what the loader asks --------------------------------------------------------------------------------------

    def idle_seconds(self) -> dict[str, float]:
        """Returns the seconds since the last request of each model that was used here; 0 for one that is in use."""
        now = self._now()
        idle = {name: now - used for name, used in self._used.items()}
        return idle | {name: 0.0 for name in (*self._using, *self._used) if self._is_busy(name)}

    def let_go(self, name: str, num_waiting: Mapping[str, int]) -> bool:
        """Makes requests ask the loader again from now on. `num_waiting` is the number of requests of each process that
        wait for the model at the loader. Returns whether nothing here uses the model.
        """
        self._held.discard(name)
        return not self._is_busy(name) and self._asking[name] <= num_waiting.get(self._own_id, 0)

    def _is_busy(self, name: str) -> bool:
        return self._using[name] > 0 or self._served.is_running(name)

    # ---- asking the loader -----------------------------------------------------------------------------------------

    async def _take(self, name: str, client: str, timeout_s: float) -> None:
        """Waits until the model is loaded and can be called from here, and counts its use. Raises what the loader
        refuses with.
        """
        deadline = self._now() + max(0.0, timeout_s - ANSWER_S)
        await self._retried(lambda: self._take_once(name, client, deadline), deadline)
        self._held.add(name)

    async def _take_once(self, name: str, client: str, deadline: float) -> None:
        self._asking[name] += 1
        try:
            await self._call("load", name, client, max(0.0, deadline - self._now()), self._own_id)
        finally:
            self._asking[name] -= 1
        self._using[name] += 1
        try:
            await self._served.look()
            if not self._served.is_served(name):
                raise LookupError(f"Serve does not tell of the model {name}")
        except BaseException:
            self._using[name] -= 1
            raise

    async def _retried(self, attempt: Callable[[], Awaitable[None]], deadline: float) -> None:
        """Makes attempts until one succeeds or is refused. Refuses with 503 at the deadline."""
        while True:
            try:
                await attempt()
                return
            except ServingError:
                raise
            except Exception as error:  # the loader or Serve's controller is being replaced; Ray raises many types
                logger.info("the loader of models is asked again: %s", in_words(error))
                if self._now() >= deadline:
                    _unreachable(error)
            await asyncio.sleep(ATTEMPT_S)

    async def _call(self, method: str, *arguments: object) -> None:
        try:
            await answer_of(getattr(self._loader, method).remote(*arguments))
        except ServingError as error:  # Ray raises a copy whose text is a whole traceback
            raise error_of(error.refusal) from error


def _unreachable(error: Exception) -> NoReturn:
    refuse("unavailable", cause=f"what loads models cannot be reached: {in_words(error)}", remedy="retry later")
