"""Places of the lines of batches that are answered at a time. Their number may change while lines wait."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable
from typing import Protocol


class Places(Protocol):
    """A limit of lines that are answered at a time; `asyncio.Semaphore` is one."""

    async def acquire(self) -> object:
        """Takes a place. Returns when there is one."""
        ...

    def release(self) -> None:
        """Gives a place back."""
        ...


class LinePlaces:
    """As many places as `most` returns, which is at least 1. Who has waited longest gets the next one."""

    def __init__(self, most: Callable[[], int]) -> None:
        self._most = most
        self._num_taken = 0
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()

    async def acquire(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it got a place at the same time
                self.release()
            raise

    def release(self) -> None:
        self._num_taken -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._num_taken < self._most():
            turn = self._waiting.popleft()
            if not turn.done():
                self._num_taken += 1
                turn.set_result(None)
