"""A queue that several clients share: takers serve one client after another, and no client has all takers.

What a client put first is taken first. The client "" stands for a caller who shares with nobody, and no bound holds it
back. Any thread may call.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class QueueFullError(RuntimeError):
    """As many items wait as may wait; the message says how many, and what the bound is."""


class FairQueue(Generic[Item]):
    """If there are several takers, a client has at most `num_takers - 1` of them at a time. At most `max_waiting` items
    wait, and half as many of one client.
    """

    def __init__(self, num_takers: int, max_waiting: int) -> None:
        self._max_taken = max(1, num_takers - 1)
        self._max_waiting = max_waiting
        self._waiting: OrderedDict[str, deque[Item]] = OrderedDict()
        """By client; first the one whose turn is next."""
        self._num_taken: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, client: str, item: Item) -> None:
        """Raises `QueueFullError` if the client, or all together, have as many items waiting as they may."""
        with self._changed:
            own = self._waiting.get(client, ())
            if client and len(own) >= max(1, self._max_waiting // 2):
                raise QueueFullError(f"{len(own)} of this client wait, and half of {self._max_waiting} may")
            if client and len(self) >= self._max_waiting:
                raise QueueFullError(f"{len(self)} wait, and {self._max_waiting} may")
            self._waiting.setdefault(client, deque()).append(item)
            self._changed.notify()

    def take(self, timeout_s: float | None = None) -> tuple[str, Item] | None:
        """The next item and its client; the taker later calls `done(client)`. None once the queue is closed and empty.
        Raises `TimeoutError` if nothing can be taken within `timeout_s`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._next_client() is not None or self._closed, timeout_s):
                raise TimeoutError
            client = self._next_client()
            if client is None:
                return None
            item = self._waiting[client].popleft()
            if self._waiting[client]:
                self._waiting.move_to_end(client)
            else:
                del self._waiting[client]
            self._num_taken[client] += 1
            return client, item

    def done(self, client: str) -> None:
        """The taker of one of the client's items is free again."""
        with self._changed:
            self._num_taken[client] -= 1
            if not self._num_taken[client]:
                del self._num_taken[client]
            self._changed.notify()

    def close(self) -> None:
        """Takers still get what waits, then None."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _next_client(self) -> str | None:
        """The first client with a waiting item and a taker left to it; None if there is none."""
        for client in self._waiting:
            if not client or self._num_taken[client] < self._max_taken:
                return client
        return None
