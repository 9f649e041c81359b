"""Responses that WebSocket connections remember, each its latest one, so that the next may continue it unstored."""

from __future__ import annotations

from typing import Any

import msgspec

from manta.structured.client_shares import ClientShares

MAX_REMEMBERED_BYTES = 256 * 2**20
"""Bytes of conversations that one ingress remembers, as many as `max_bodies_bytes` allows bodies by default. Above its
part of them a client's oldest response is forgotten, and the client sends the conversation again.
"""


class RememberedResponses:
    """The memories of all connections of one ingress, together at most `max_bytes`. Clients share them."""

    def __init__(self, max_bytes: int = MAX_REMEMBERED_BYTES) -> None:
        self._shares = ClientShares(max_bytes, drops_own=True)

    @property
    def num_bytes(self) -> int:
        return self._shares.total

    def of_connection(self, client: str) -> Remembered:
        return Remembered(self._shares, client)


class Remembered:
    """The latest response of one connection of `client`, with the conversation up to it."""

    def __init__(self, shares: ClientShares, client: str) -> None:
        self._shares = shares
        self._client = client
        self._room = shares.hold(client)
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

    def items_by_id(self) -> dict[str, dict[str, Any]]:
        """Returns the items of the conversation that have an id."""
        items = msgspec.json.decode(self._content) if self._content else []
        return {item["id"]: item for item in items if "id" in item}

    def note(self, response_id: str, items: list[Any]) -> None:
        """Replaces the remembered response, or remembers none if it finds no room. `items` may hold structs."""
        self.forget()
        content = msgspec.json.encode(items)
        room = self._shares.hold(self._client, self.forget)
        if room.take(len(content)):
            self._room, self._response_id, self._content = room, response_id, content

    def forget(self) -> None:
        self._response_id, self._content = "", b""
        self._room.give_back()
