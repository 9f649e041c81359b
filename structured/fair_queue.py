"""A bounded queue that is shared fairly by several clients: takers serve one client after another.

Each client's items leave in the order in which they came. The client "" is a caller without competitors; no bound
applies to it. Thread-safe.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from typing import Generic, TypeVar

from manta.structured.client_shares import ClientShares

Item = TypeVar("Item")


class QueueFullError(RuntimeError):
    """`num_waiting` items of this client wait, and no more than `bound` may."""

    def __init__(self, num_waiting: int, bound: int) -> None:
        super().__init__(f"{num_waiting} wait, and {bound} may")
        self.num_waiting, self.bound = num_waiting, bound


class FairQueue(Generic[Item]):
    """A queue in which clients take turns. Of several takers one client occupies at most `num_takers - 1`. At most
    `max_waiting` items wait, and clients share these places.
    """

    def __init__(self, num_takers: int, max_waiting: int) -> None:
        self._max_taken = max(1, num_takers - 1)
        self._places = ClientShares(max_waiting)
        self._waiting: OrderedDict[str, deque[Item]] = OrderedDict()
        """Each client's items; the next client to serve is first."""
        self._num_taken: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, client: str, item: Item) -> None:
        """Raises `QueueFullError` if the client may have no more places."""
        with self._changed:
            if client and not self._places.take(client, 1):
                raise QueueFullError(self._places.held(client), self._places.most(client))
            self._waiting.setdefault(client, deque()).append(item)
            self._changed.notify()

    def take(self, timeout_s: float | None = None) -> tuple[str, Item] | None:
        """Returns the next item and its client, or None once the queue is closed and empty. The taker must call
        `done(client)` when it has finished. Raises `TimeoutError` after `timeout_s`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._next_client() is not None or self._closed, timeout_s):
                raise TimeoutError
            client = self._next_client()
            if client is None:
                return None
            item = self._waiting[client].popleft()
            if client:
                self._places.give_back(client, 1)
            if self._waiting[client]:
                self._waiting.move_to_end(client)
            else:
                del self._waiting[client]
            self._num_taken[client] += 1
            return client, item

    def done(self, client: str) -> None:
        """Reports that a taker has finished an item of this client."""
        with self._changed:
            self._num_taken[client] -= 1
            if not self._num_taken[client]:
                del self._num_taken[client]
            self._changed.notify()

    def close(self) -> None:
        """Refuses nothing that waits: takers get it, then None."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _next_client(self) -> str | None:
        """The first client that has an item and may occupy another taker."""
        for client in self._waiting:
            if not client or self._num_taken[client] < self._max_taken:
                return client
        return None
