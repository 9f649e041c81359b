"""Work that is spread over the turns of an event loop, so that every other task gets its share of each turn."""

from __future__ import annotations

import asyncio
import collections
import heapq
import itertools


class TurnBudget:
    """Lets tasks do at most `most` units of work in each turn of the event loop. The others wait for a later turn.

    Clients share a turn by start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): the client that was granted
    least goes on first, however many of its tasks wait. Tasks of one client go on in the order in which they came.
    """

    def __init__(self, most: int) -> None:
        self._most = self._left = most
        self._waiting: dict[str, collections.deque[tuple[asyncio.Future[None], int]]] = {}
        """The tasks of each client that wait, and how much each wants. No client is without tasks."""
        self._next: list[tuple[int, int, str]] = []
        """A heap of the clients that wait: where the next task of each starts, a number for ties, and the client."""
        self._numbers = itertools.count()
        self._served = 0
        """Where the last task that was let go on started: the virtual time."""
        self._ends: dict[str, int] = {}
        """Where the last task of each client ends, as far as it is behind the virtual time."""

    async def take(self, client: str, amount: int = 1) -> None:
        """Returns in a turn of which some budget is left, and takes `amount` of it, which may be more than is left."""
        if self._left > 0 and not self._waiting:
            if self._left == self._most:
                asyncio.get_running_loop().call_soon(self._begin_turn)
            self._grant(client, amount)
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if client not in self._waiting:
            self._waiting[client] = collections.deque()
            self._queue(client)
        self._waiting[client].append((granted, amount))
        await granted

    def _queue(self, client: str) -> None:
        heapq.heappush(self._next, (self._start(client), next(self._numbers), client))

    def _start(self, client: str) -> int:
        return max(self._served, self._ends.get(client, 0))

    def _grant(self, client: str, amount: int) -> None:
        self._served = self._start(client)
        self._ends[client] = self._served + amount
        self._left -= amount

    def _begin_turn(self) -> None:
        """Wakes those for whom the next turn has budget. They run before the turn after it begins."""
        self._left = self._most
        while self._next and self._left > 0:
            client = heapq.heappop(self._next)[-1]
            granted, amount = self._waiting[client].popleft()
            if not granted.done():
                self._grant(client, amount)
                granted.set_result(None)
            if self._waiting[client]:
                self._queue(client)
            else:
                del self._waiting[client]
        self._forget()
        if self._left < self._most:
            asyncio.get_running_loop().call_soon(self._begin_turn)

    def _forget(self) -> None:
        """Drops what decides nothing any more: everything if nobody waits, else the clients that have fallen behind."""
        if not self._next:
            self._served = 0
        ends = self._ends.items() if self._next else ()
        self._ends = {client: end for client, end in ends if end > self._served}
