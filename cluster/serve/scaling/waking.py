"""Requests that find no engine: held within their deadline while one starts, or told when to come again.

With `autoscaling.min_replicas` 0 the last engine stops when nobody asks; a fixed number of engines may be gone for the
moment too. One call through Serve, which waits there, makes Serve start one; requests wait here, for here their
deadlines are known.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

from cluster.errors import QueueFull, Unavailable
from cluster.serve.starting.start_failure import in_words

logger = logging.getLogger(__name__)

UNMEASURED_START_S = 60.0
"""What a start is thought to take before one was measured."""
RETRY_PAUSE_S = 1.0
"""Between two calls that were to wake an engine, if the first one failed."""


class Waker:
    """Of one ingress. `is_asleep` says whether there is no engine; `call` reaches one when there is one again, and
    returns the seconds that its start took.
    """

    def __init__(self, is_asleep: Callable[[], bool], call: Callable[[], Awaitable[float]], max_held: int) -> None:
        self._is_asleep = is_asleep
        self._call = call
        self._max_held = max_held
        self.num_held = 0
        """Requests that wait for an engine."""
        self._told_s: float | None = None
        """What engines said of their start."""
        self._waking_s = 0.0
        """How long the last one was waited for here, Serve's share included."""
        self._waking: asyncio.Task[None] | None = None
        self._began = 0.0

    def measured(self, start_s: float) -> None:
        """What an engine said of its start."""
        self._told_s = start_s

    @property
    def is_measured(self) -> bool:
        return self._told_s is not None

    @property
    def remaining_s(self) -> float:
        """Until an engine serves, by what the last start took; the whole of it if none is starting."""
        whole = UNMEASURED_START_S if self._told_s is None else max(self._told_s, self._waking_s)
        if self._waking is None:
            return whole
        return max(0.0, whole - (time.monotonic() - self._began))

    async def wait(self, deadline_s: float, is_new: bool = True) -> float:
        """Returns when there is an engine: the seconds that are left of `deadline_s`.

        Raises `Unavailable` if that is too late; of a request that `is_new` also if it will be, and `QueueFull` if too
        many are held.
        """
        if not self._is_asleep():
            return deadline_s
        if self._waking is None:
            self._began = time.monotonic()
            self._waking = asyncio.ensure_future(self._wake())
        if is_new:
            self._check(deadline_s)
        started = time.monotonic()
        self.num_held += 1
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.shield(self._waking)
        except TimeoutError:
            raise self._too_late(f"none has started within {deadline_s:.0f} s, the time of a request") from None
        finally:
            self.num_held -= 1
        return deadline_s - (time.monotonic() - started)

    def _check(self, deadline_s: float) -> None:
        if self.remaining_s > deadline_s:
            raise self._too_late(
                f"the one that starts needs {self.remaining_s:.0f} s more, and a request has {deadline_s:.0f} s"
            )
        if self.num_held >= self._max_held:
            raise QueueFull(
                f"{self.num_held} requests wait for an engine to start and the limit is {self._max_held}; retry later "
                "or raise max_num_waiting",
                retry_after_s=self.remaining_s,
            )

    def _too_late(self, why: str) -> Unavailable:
        message = f"no engine runs, and {why} (request_timeout_s); retry later, and see manta status"
        return Unavailable(message, retry_after_s=self.remaining_s)

    async def _wake(self) -> None:
        """Until an engine has answered."""
        try:
            while self._is_asleep():
                try:
                    self.measured(await self._call())
                except Exception as error:  # the one that came may have died at once
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
