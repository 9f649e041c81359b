"""Requests that find no engine: they wait within their deadline while one starts, or are told when to retry.

With `autoscaling.min_replicas` 0 the last engine stops when there are no requests, and a fixed number of engines may
all be down for a moment. One call through Serve, which waits in Serve, makes it start an engine. The requests wait
here, because only here their deadlines are known.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn

from manta.cluster.errors import Unavailable, refuse
from manta.cluster.serve.starting.start_failure import in_words
from manta.structured.client_shares import ClientShares, HoldingLost, held
from manta.structured.refusals import Refusal
from manta.structured.visible_logs import logger_of

logger = logger_of(__name__)

UNMEASURED_START_S = 60.0
"""Assumed duration of a start, in seconds, before one was measured."""
RETRY_PAUSE_S = 1.0
"""Seconds between two wake-up calls, if the first one failed."""


class Waker:
    """Wakes engines for one ingress. `is_asleep` returns whether there is no engine. `call` waits for an engine and
    returns the seconds that its start took.
    """

    def __init__(self, is_asleep: Callable[[], bool], call: Callable[[], Awaitable[float]], max_held: int) -> None:
        self._is_asleep = is_asleep
        self._call = call
        self._shares = ClientShares(max_held)
        self._told_s: float | None = None
        """Seconds that the slowest engine start took, as the engines report it."""
        self._waking_s = 0.0
        """Seconds that the last wake-up took here, including Serve's share."""
        self._waking: asyncio.Task[None] | None = None
        self._began = 0.0

    @property
    def num_held(self) -> int:
        """Requests that wait for an engine."""
        return self._shares.total

    def hold_at_most(self, max_held: int) -> None:
        """Changes the number of requests that may wait."""
        self._shares.resize(max_held)

    def measured(self, start_s: float) -> None:
        """Takes the duration of a start, in seconds, as an engine reports it."""
        self._told_s = start_s

    @property
    def remaining_s(self) -> float:
        """Seconds until an engine serves, estimated from the last start; the full duration if none is starting."""
        whole = UNMEASURED_START_S if self._told_s is None else max(self._told_s, self._waking_s)
        if self._waking is None:
            return whole
        return max(0.0, whole - (time.monotonic() - self._began))

    async def wait(self, deadline_s: float, client: str = "", is_new: bool = True) -> float:
        """Waits for an engine on behalf of `client`, and returns the seconds that are left of `deadline_s`.

        Raises `Unavailable` if none starts in time. For a request that `is_new` it raises at once: `Unavailable` if the
        estimated start takes too long, `QueueFull` if too many requests of the client wait. It also raises `QueueFull`
        when others need the place and the client has more than its share.
        """
        if not self._is_asleep():
            return deadline_s
        if self._waking is None:
            self._began = time.monotonic()
            self._waking = asyncio.ensure_future(self._wake())
        if is_new and self.remaining_s > deadline_s:
            why = f"the one that starts needs {self.remaining_s:.0f} s more, and a request has {deadline_s:.0f} s"
            raise self._too_late(why)
        started = time.monotonic()
        try:
            async with held(self._shares, client) as place:
                if not is_new:
                    place.add(1)
                elif not place.take(1):
                    self._refuse(client)
                async with asyncio.timeout(deadline_s):
                    await asyncio.shield(self._waking)
        except HoldingLost:
            self._refuse(client)
        except TimeoutError:
            raise self._too_late(f"none has started within {deadline_s:.0f} s, the time of a request") from None
        return deadline_s - (time.monotonic() - started)

    def _refuse(self, client: str) -> NoReturn:
        unit, remedy = "requests of yours wait for an engine to start", "retry later or raise max_num_waiting"
        more = {"unit": unit, "retry_after_s": self.remaining_s}
        refuse("queue_full", "", self._shares.held(client), self._shares.most(client), remedy, **more)

    def _too_late(self, why: str) -> Unavailable:
        cause, remedy = f"no engine runs, and {why} (request_timeout_s)", "retry later, and see manta status"
        refusal = Refusal("unavailable", cause=cause, remedy=remedy, retry_after_s=self.remaining_s)
        return Unavailable(refusal)

    async def _wake(self) -> None:
        """Calls until an engine has answered."""
        try:
            while self._is_asleep():
                try:
                    self.measured(await self._call())
                except Exception as error:  # the engine that came may have died at once
                    logger.warning("no engine woke: %s", in_words(error))
                    await asyncio.sleep(RETRY_PAUSE_S)
            self._waking_s = time.monotonic() - self._began
            logger.info("an engine serves again after %.1f s", self._waking_s)
        finally:
            self._waking = None

    async def close(self) -> None:
        if self._waking is not None:
            self._waking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._waking
