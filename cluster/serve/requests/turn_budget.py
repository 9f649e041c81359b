"""Work that is spread over the turns of an event loop, so that every other task gets its share of each turn."""

from __future__ import annotations

import asyncio
import collections


class TurnBudget:
    """Lets tasks do at most `most` units of work in each turn of the event loop. The others wait for a later turn, in
    the order in which they came.
    """

    def __init__(self, most: int) -> None:
        self._most = self._left = most
        self._waiting: collections.deque[tuple[asyncio.Future[None], int]] = collections.deque()

    async def take(self, amount: int = 1) -> None:
        """Returns in a turn of which some budget is left, and takes `amount` of it, which may be more than is left."""
        if self._left > 0 and not self._waiting:
            if self._left == self._most:
                asyncio.get_running_loop().call_soon(self._begin_turn)
            self._left -= amount
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((granted, amount))
        await granted

    def _begin_turn(self) -> None:
        """Wakes those for whom the next turn has budget. They run before the turn after it begins."""
        self._left = self._most
        while self._waiting and self._left > 0:
            granted, amount = self._waiting.popleft()
            if not granted.done():
                granted.set_result(None)
                self._left -= amount
        if self._left < self._most:
            asyncio.get_running_loop().call_soon(self._begin_turn)
