"""The requests that wait at the loader for models, and whose turn it is. Clients take turns with loads."""

from __future__ import annotations

import asyncio
import collections
import itertools
from collections.abc import Callable, Collection, Iterator
from typing import NoReturn

from manta.cluster.errors import refuse
from manta.structured.client_shares import ClientShares, HoldingLost, held

UNMEASURED_LOAD_S = 10.0
"""Assumed duration of a load, in seconds, before one was measured. Refusals tell it as the time to retry after."""
MOST_WAITING = 4096
"""Requests that may wait here, which clients share."""
MOST_CLIENTS = 1024
"""Clients whose last turn is remembered."""


class Waiting:
    """A request of the process `holder` that waits for a model."""

    def __init__(self, name: str, client: str, holder: str, since: float) -> None:
        self.name = name
        self.client = client
        self.holder = holder
        self.since = since
        self.loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the model is loaded, or has failed with an error."""

    def refuse(self, error: Exception) -> None:
        """Ends the wait with an error, unless it has ended."""
        if not self.loaded.done():
            self.loaded.set_exception(error)


class LoadQueue:
    """Requests that wait, oldest first. `now` is a clock in seconds, and `news` is set whenever a request comes."""

    def __init__(self, now: Callable[[], float], news: asyncio.Event) -> None:
        self.load_s = UNMEASURED_LOAD_S
        """Duration of the last load in seconds, after which refused clients may come again."""
        self._now = now
        self._news = news
        self._waiting: list[Waiting] = []
        self._places = ClientShares(MOST_WAITING)
        self._turns: dict[str, float] = {}
        """Time at which each client last made a model load, oldest first."""

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, name: str, client: str, holder: str, timeout_s: float) -> None:
        """Returns when the model is loaded. Raises what the wait ends with, and `TimeoutError` after `timeout_s`.
        Refuses with 429 if too many requests of the client wait.
        """
        try:
            async with held(self._places, client) as place:
                if not place.take(1):
                    self._refuse_place(client)
                await self._wait(Waiting(name, client, holder, self._now()), timeout_s)
        except HoldingLost:
            self._refuse_place(client)

    async def _wait(self, entry: Waiting, timeout_s: float) -> None:
        self._waiting.append(entry)
        self._news.set()
        try:
            async with asyncio.timeout(timeout_s):
                await entry.loaded
        finally:
            self._waiting.remove(entry)

    def _refuse_place(self, client: str) -> NoReturn:
        shares, unit = self._places, "requests of yours wait for models to load"
        more = {"unit": unit, "retry_after_s": self.load_s}
        refuse("queue_full", "", shares.held(client), shares.most(client), "retry later", **more)

    def refuse(self, name: str, error: Callable[[], Exception]) -> None:
        """Ends the waits for a model, each with an error of its own."""
        for entry in self._waiting:
            if entry.name == name:
                entry.refuse(error())

    def is_awaited(self, name: str) -> bool:
        """Returns whether a request waits for a model."""
        return any(entry.name == name for entry in self._waiting)

    def num_by_holder(self, name: str) -> collections.Counter[str]:
        """Returns the number of requests of each process that wait for a model and have no answer yet."""
        return collections.Counter(
            entry.holder for entry in self._waiting if entry.name == name and not entry.loaded.done()
        )

    def longest_wait_s(self, there: Collection[str]) -> float:
        """Returns the seconds for which a request has waited for a model that is not among those that are `there`."""
        now = self._now()
        return max((now - entry.since for entry in self._waiting if entry.name not in there), default=0.0)

    def wanted(self, there: Collection[str]) -> dict[str, str]:
        """Returns the models that requests wait for and that are not `there`, next one first, each with the client
        whose turn it is. Clients take turns, the one first whose last turn is the longest ago.
        """
        by_client: dict[str, dict[str, None]] = {}
        for entry in self._waiting:
            if entry.name not in there and not entry.loaded.done():
                by_client.setdefault(entry.client, {})[entry.name] = None
        clients = sorted(by_client, key=lambda client: self._turns.get(client, float("-inf")))
        wanted: dict[str, str] = {}
        for turn in itertools.zip_longest(*(by_client[client] for client in clients)):
            for client, name in zip(clients, turn, strict=True):
                if name is not None:
                    wanted.setdefault(name, client)
        return wanted

    def note_turn(self, client: str) -> None:
        """Notes that a model loads for a client."""
        self._turns.pop(client, None)
        self._turns[client] = self._now()
        if len(self._turns) > MOST_CLIENTS:
            self._turns.pop(next(iter(self._turns)))
