"""An HTTP request as it comes, over ASGI's messages: its path, headers and query, and its body within limits.

A client may be slow, stop sending or leave. A body therefore has limits in bytes and time, and the work for a client
ends when it leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeVar

from manta.cluster.config import ServeConfig
from manta.cluster.errors import ServingError, error_of, refuse
from manta.structured.client_shares import ClientShares, Holding, HoldingLost, held
from manta.structured.refusals import Refusal

DRAINED_BODIES = 16
"""Multiple of `max_body_bytes` that is still read of a body that is too long, before the connection is given up."""
SLOW_START_S = 10.0
"""Seconds for which a body may arrive more slowly than `min_body_bytes_per_s`."""

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Result = TypeVar("Result")


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


def bodies_refusal(room: ClientShares, client: str, num_bytes: int) -> Refusal:
    """Returns why a client gets no room in memory for `num_bytes` more of its bodies."""
    wanted, most = room.held(client) + num_bytes, min(room.most(client), room.share(client))
    unit, remedy = "bytes of your bodies are being received", "retry later, or raise max_bodies_bytes"
    return Refusal("too_many_bodies", "", wanted, most, remedy, unit=unit)


class Incoming:
    """One HTTP request. `room` is the memory in bytes for bodies that are being received, which all clients share."""

    def __init__(self, scope: Scope, receive: Receive, config: ServeConfig, room: ClientShares) -> None:
        self.method: str = scope["method"]
        self.root_path: str = scope.get("root_path", "").rstrip("/")
        """Prefix below which a proxy in front serves this application, such as Serve's `route_prefix`; usually
        empty.
        """
        self.path = _below(self.root_path, scope["path"])
        """Path as routes have it: without `root_path` and without a trailing slash."""
        self.path_parameter = ""
        """Value of the parameter in the route's path, if the route has one. `cluster/http/app.py` sets it."""
        self.headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
        given = self.headers.get("x-request-id", "")
        self.request_id = given if 0 < len(given) <= 128 and given.isprintable() else f"req-{secrets.token_hex(8)}"
        self.query = dict(urllib.parse.parse_qsl(scope.get("query_string", b"").decode("latin-1")))
        """Fields of the URL's query; of a repeated name, the last value."""
        self.is_websocket = scope["type"] == "websocket"
        """Whether the client asks for a WebSocket connection. An answer with status 101 opens it."""
        self._config = config
        self._room = room
        self._receive = receive

    @property
    def url_path(self) -> str:
        """Path as the client knows it."""
        return f"{self.root_path}{self.path}"

    async def body(self, client: str) -> bytes:
        """Returns the whole body, which `client` sends. Refuses it with

        - 415 if it is compressed,
        - 413 if it exceeds `max_body_bytes`; no more bytes than that are kept,
        - 408 if it takes longer than `client_timeout_s` or arrives more slowly than `min_body_bytes_per_s`,
        - 503 if too much of this client is being received, or if others need the room and it has more than its share.
        """
        encoding = self.headers.get("content-encoding", "identity")
        if encoding != "identity":
            refuse("foreign_encoding", "", encoding[:40], remedy="send it without content-encoding")
        received, begun = bytearray(), asyncio.get_running_loop().time()
        try:
            async with held(self._room, client) as room, asyncio.timeout(None) as deadline:
                await self._read_body(received, room, deadline, begun)
        except HoldingLost as error:
            raise error_of(bodies_refusal(self._room, client, len(received))) from error
        except TimeoutError as error:
            raise self._too_slow(len(received), begun) from error
        return bytes(received)

    async def _read_body(self, received: bytearray, room: Holding, deadline: asyncio.Timeout, begun: float) -> None:
        limit = self._config.max_body_bytes
        num_bytes, more = 0, True
        # A body that is too long is read and dropped for a while, because a client that is still sending would miss the
        # answer.
        while more and num_bytes <= DRAINED_BODIES * limit:
            paid_s = SLOW_START_S + num_bytes / self._config.min_body_bytes_per_s
            deadline.reschedule(begun + min(paid_s, self._config.client_timeout_s))
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            num_bytes += len(message.get("body", b""))
            more = message.get("more_body", False)
            if num_bytes <= limit:
                self._take(room, len(message["body"]))
                received += message["body"]
        if num_bytes > limit:
            _refuse_large(num_bytes, limit, more, "max_body_bytes")

    @contextlib.asynccontextmanager
    async def room(self, client: str, num_bytes: int) -> AsyncIterator[None]:
        """Reserves memory for content that `client` sends or receives in pieces. Refuses with 503 if there is none, or
        if others need it and the client has more than its share.
        """
        try:
            async with held(self._room, client) as room:
                self._take(room, num_bytes)
                yield
        except HoldingLost as error:
            raise error_of(bodies_refusal(self._room, client, num_bytes)) from error

    def _take(self, room: Holding, num_bytes: int) -> None:
        if not room.take(num_bytes):
            raise error_of(bodies_refusal(self._room, room.client, num_bytes))

    async def pieces(self, limit: int) -> AsyncIterator[bytes]:
        """Yields the body as it arrives, for a caller that keeps only a piece of it in memory.

        Raises as `body` does, except that `limit` bounds the bytes and each `max_body_bytes` of the body may take
        `client_timeout_s`.
        """
        num_bytes, more, begun = 0, True, asyncio.get_running_loop().time()
        while more:
            paid_s = SLOW_START_S + num_bytes / self._config.min_body_bytes_per_s
            most_s = self._config.client_timeout_s * (1 + num_bytes // self._config.max_body_bytes)
            try:
                async with asyncio.timeout_at(begun + min(paid_s, most_s)):
                    message = await self._receive()
            except TimeoutError as error:
                raise self._too_slow(num_bytes, begun) from error
            if message["type"] == "http.disconnect":
                raise ClientGone
            piece = message.get("body", b"")
            num_bytes += len(piece)
            more = message.get("more_body", False)
            if num_bytes <= limit:
                yield piece
            elif num_bytes > limit + DRAINED_BODIES * self._config.max_body_bytes:
                break
        if num_bytes > limit:
            _refuse_large(num_bytes, limit, more, "batches.max_file_bytes")

    def _too_slow(self, num_bytes: int, begun: float) -> ServingError:
        seconds = asyncio.get_running_loop().time() - begun
        option = "client_timeout_s" if seconds >= self._config.client_timeout_s else "min_body_bytes_per_s"
        change = "raise" if option == "client_timeout_s" else "lower"
        unit, remedy = f"bytes of the body came within {seconds:.1f} s", f"send it faster, or {change} {option}"
        bound = getattr(self._config, option)
        return error_of(Refusal("client_too_slow", "", num_bytes, bound, remedy, unit=unit))

    async def unless_gone(self, work: Awaitable[Result]) -> Result:
        """Returns the result of `work`. If the client closes the connection first, cancels `work` and raises
        `ClientGone`.
        """
        task, gone = asyncio.ensure_future(work), asyncio.ensure_future(self._gone())
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGone
            return task.result()
        finally:
            for each in (task, gone):
                each.cancel()

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


def _below(root_path: str, path: str) -> str:
    """Returns `path` without `root_path`. ASGI leaves the prefix in the path, but a server may already have removed
    it.
    """
    if path == root_path or path.startswith(f"{root_path}/"):
        path = path[len(root_path) :]
    return path.rstrip("/") or "/"


def _refuse_large(num_bytes: int, limit: int, more: bool, option: str) -> NoReturn:
    unit = "bytes and more" if more else "bytes"
    refuse("body_too_large", "", num_bytes, limit, f"send less, or raise {option}", unit=unit)
