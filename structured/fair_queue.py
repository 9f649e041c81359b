"""A queue that several clients share: its takers go from one client to the next, and none of them gets them all.

Within one client what came first is taken first. The client "" stands for a caller who shares with nobody: no bound and
no turn holds it back. Any thread may call.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class QueueFullError(RuntimeError):
    """As many wait as may wait; the message says how many and what bounds them."""


class FairQueue(Generic[Item]):
    """Of `num_takers` takers a client holds one less at most, if there are several. Of the `max_waiting` items a
    client's may be half.
    """

    def __init__(self, num_takers: int, max_waiting: int) -> None:
        self._max_taken = max(1, num_takers - 1)
        self._max_waiting = max_waiting
        self._waiting: OrderedDict[str, deque[Item]] = OrderedDict()
        """By client, whose turn is next first."""
        self._num_taken: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, client: str, item: Item) -> None:
        """Raises `QueueFullError`."""
        with self._changed:
            own = self._waiting.get(client, ())
            if client and len(own) >= max(1, self._max_waiting // 2):
                raise QueueFullError(f"{len(own)} of this client wait, and half of {self._max_waiting} may")
            if client and len(self) >= self._max_waiting:
                raise QueueFullError(f"{len(self)} wait, and {self._max_waiting} may")
            self._waiting.setdefault(client, deque()).append(item)
            self._changed.notify()

    def take(self, timeout_s: float | None = None) -> tuple[str, Item] | None:
        """The next item and whose it is, which `done` is told of later. None at the end. Raises `TimeoutError`."""
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
        """One of its items needs its taker no longer."""
        with self._changed:
            self._num_taken[client] -= 1
            if not self._num_taken[client]:
                del self._num_taken[client]
            self._changed.notify()

    def close(self) -> None:
        """What waits is taken before takers get None."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _next_client(self) -> str | None:
        for client in self._waiting:
            if not client or self._num_taken[client] < self._max_taken:
                return client
        return None
