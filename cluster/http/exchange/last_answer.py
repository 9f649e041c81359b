"""Keeps the last answer of others that answer late, or not at all, such as engines during an update.

Whoever asks gets an answer within seconds: a new one, or the last one with its age. `GET /status` and `GET /metrics`
use it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, NamedTuple, TypeVar

from manta.cluster.errors import ServingError

T = TypeVar("T")


class Known(NamedTuple, Generic[T]):
    """An answer, and how far to trust it."""

    value: T
    age_s: float
    """Seconds since the answer came; 0.0 for one that came to this question."""
    problem: ServingError | None
    """Reason why the last question was not answered; None if it was, or if its answer is still to come."""


class LastAnswer(Generic[T]):
    """The last answer to `ask`. All readers share one call, which goes on after they have stopped waiting for it.
    Before the first answer the value is `first`, whose age counts from the start.
    """

    def __init__(self, ask: Callable[[], Awaitable[T]], first: T) -> None:
        self._ask = ask
        self._value = first
        self._answered_at = time.monotonic()
        self._problem: ServingError | None = None
        self._asking: asyncio.Task[None] | None = None

    async def read(self, patience_s: float) -> Known[T]:
        """Returns the answer that comes within `patience_s`, else the last one."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._call())
        asking, before = self._asking, self._answered_at
        await asyncio.wait([asking], timeout=patience_s)
        if asking.done():
            asking.result()
        age_s = time.monotonic() - self._answered_at if self._answered_at == before else 0.0
        return Known(self._value, age_s, self._problem)

    async def _call(self) -> None:
        try:
            value = await self._ask()
        except ServingError as error:
            self._problem = error
        else:
            self._value, self._answered_at, self._problem = value, time.monotonic(), None
