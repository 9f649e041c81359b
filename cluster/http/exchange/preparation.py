"""Requests that an ingress prepares: it reads and checks them; no engine has them yet, and no answer has begun.

Everything that the ingress awaits for such a request is bounded by the request's deadline, and is cancelled when its
client leaves (`Exchange.unless_gone`). The requests share one limit. `cluster/http/app.py` applies all this, so that
endpoints need not.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from manta.cluster.config import ServeConfig
from manta.cluster.errors import Overdue, refuse
from manta.structured.refusals import Refusal


class Preparation:
    """One request under preparation. Until `end`, it has a deadline here and counts against the limit."""

    def __init__(self, preparing: Preparing, timeout: asyncio.Timeout, is_counted: bool) -> None:
        self._preparing = preparing
        self._timeout: asyncio.Timeout | None = timeout
        self._deadline = time.monotonic() + preparing.timeout_s
        self._is_counted = is_counted

    @property
    def remaining_s(self) -> float:
        """Seconds until the request's deadline, at least 0."""
        return max(0.0, self._deadline - time.monotonic())

    def end(self) -> None:
        """Ends the preparation, because an engine has the request and its deadline, or its answer begins. Later calls
        do nothing.
        """
        if self._timeout is None:
            return
        if not self._timeout.expired():
            self._timeout.reschedule(None)
        self._timeout = None
        self._preparing.num_requests -= self._is_counted


class Preparing:
    """All requests that one ingress prepares: at most as many as all its engines may run and queue."""

    def __init__(self, config: ServeConfig) -> None:
        engine = config.engine
        self.max_requests = config.max_engines * (engine.max_num_sequences + engine.max_num_waiting)
        self.timeout_s = config.request_timeout_s
        self.num_requests = 0
        """Requests that count against the limit now."""

    @contextlib.asynccontextmanager
    async def one(self, is_counted: bool) -> AsyncIterator[Preparation]:
        """Prepares one request in the body of the `async with`. Endpoints about the server's own state need not count.

        Raises `QueueFull` if the limit is reached, and `Overdue` if `request_timeout_s` passes before
        `Preparation.end`.
        """
        if is_counted and self.num_requests >= self.max_requests:
            unit, remedy = "requests wait here for an engine", "retry later, or raise engine.max_num_waiting"
            refuse("queue_full", "", self.num_requests, self.max_requests, remedy, unit=unit)
        self.num_requests += is_counted
        try:
            async with asyncio.timeout(self.timeout_s) as timeout:
                preparation = Preparation(self, timeout, is_counted)
                try:
                    yield preparation
                finally:
                    preparation.end()
        except TimeoutError as error:
            if not timeout.expired():
                raise
            cause, place = "no engine took the request within its time", f"request_timeout_s, {self.timeout_s:g}"
            raise Overdue(Refusal("deadline", bound=self.timeout_s, cause=cause, place=place)) from error
