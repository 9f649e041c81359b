"""Responses that WebSocket connections remember, each its latest one, so that the next may continue it unstored."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec

MAX_REMEMBERED_BYTES = 256 * 2**20
"""Bytes of conversations that one ingress remembers, as many as `max_bodies_bytes` allows bodies by default. Above it
the connection forgets whose latest response is oldest, and its client sends the conversation again.
"""


class RememberedResponses:
    """The memories of all connections of one ingress, together at most `max_bytes`."""

    def __init__(self, max_bytes: int = MAX_REMEMBERED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._sizes: OrderedDict[Remembered, int] = OrderedDict()
        """Bytes of each memory that holds a response, oldest response first."""
        self.num_bytes = 0

    def of_connection(self) -> Remembered:
        return Remembered(self)

    def keep(self, memory: Remembered, num_bytes: int) -> None:
        """Counts the new response of a memory, and empties the oldest memories if there are too many bytes."""
        self.remove(memory)
        self._sizes[memory] = num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            next(iter(self._sizes)).forget()

    def remove(self, memory: Remembered) -> None:
        self.num_bytes -= self._sizes.pop(memory, 0)


class Remembered:
    """The latest response of one connection, with the conversation up to it."""

    def __init__(self, others: RememberedResponses) -> None:
        self._others = others
        self._response_id = ""
        self._content = b""
        """The conversation's items as JSON, which takes a fraction of the memory of decoded ones."""
        self.is_continued = False
        """Whether the request that is being answered continues the response."""

    def items(self, response_id: str) -> list[dict[str, Any]] | None:
        """Returns the conversation up to a response, its output included; None if another one, or none, is here."""
        if not self._response_id or response_id != self._response_id:
            return None
        self.is_continued = True
        found: list[dict[str, Any]] = msgspec.json.decode(self._content)
        return found

    def note(self, response_id: str, items: list[Any]) -> None:
        """Replaces the remembered response. `items` may hold structs."""
        self._response_id, self._content = response_id, msgspec.json.encode(items)
        self._others.keep(self, len(self._content))

    def forget(self) -> None:
        self._response_id, self._content = "", b""
        self._others.remove(self)
