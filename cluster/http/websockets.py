"""WebSocket connections to `/v1/responses`: each message of a client is answered as a POST with that body would be.

A message becomes an `Exchange` like any HTTP request, so keys, rate limits, deadlines, the request log and the events
are those of the POST. This module carries bodies and events between the two, and the connection remembers its latest
response. Messages are answered one after the other.

Source: https://developers.openai.com/api/docs/guides/websocket-mode. `response.cancel` is an addition.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import msgspec

from manta.cluster.config import ServeConfig
from manta.cluster.errors import ServingError, refuse
from manta.cluster.http.exchange.codec import body_of_event, encode
from manta.cluster.http.exchange.exchange import Exchange
from manta.cluster.http.exchange.incoming import BodyRoom, Receive, Scope
from manta.cluster.http.exchange.remembered import RememberedResponses
from manta.cluster.http.exchange.reply import Send
from manta.cluster.protocol.error_bodies import ErrorBody, answer_of, openai_body
from manta.structured.refusals import Refusal

MAX_OPEN_S = 3600.0
"""Seconds for which a connection may be open, as in OpenAI's API. A response that is running then still ends."""
MAX_WAITING = 16
"""Messages of one connection that may wait while a response is running. Together they may have `max_body_bytes`."""
CANCEL_BYTES = 256
"""Longest message that may be a `response.cancel`; longer ones are decoded only when their turn comes."""
REST = "manta.rest"
"""ASGI extension and message: the application tells the listener that no response is running on the connection."""
_NOT_OF_A_MESSAGE = (b"x-request-id", b"x-resumable-s", b"last-event-id", b"content-length")
"""Headers of the handshake that say nothing about a message on the connection."""

Answer = Callable[[Exchange], Awaitable[None]]
"""Function that answers one exchange."""


class _EventType(msgspec.Struct):
    type: str = ""


class WebSockets:
    """The WebSocket connections of one application. `new_exchange` makes an exchange; its last argument says whether
    the answer has an x-request-id. `answer_handshake` answers a connection's HTTP request, and opens the connection
    with status 101. `answer_message` answers one message.
    """

    def __init__(
        self,
        config: ServeConfig,
        room: BodyRoom,
        new_exchange: Callable[[Scope, Receive, Send, bool], Exchange],
        answer_handshake: Answer,
        answer_message: Answer,
    ) -> None:
        self.config = config
        self.room = room
        self.new_exchange = new_exchange
        self.answer_message = answer_message
        self.remembered = RememberedResponses()
        self._answer_handshake = answer_handshake

    async def serve(self, scope: Scope, receive: Receive, send: Send, returns_id: bool) -> None:
        """Serves one connection until it ends."""
        await receive()  # the handshake, which `scope` describes
        refusal = _Refusal(scope, send)
        request = {**scope, "method": "GET"}
        exchange = self.new_exchange(request, _nothing, refusal.send, returns_id)
        await self._answer_handshake(exchange)
        if exchange.reply.status == 101:
            await _Connection(self, scope, receive, send).serve()


async def _nothing() -> NoReturn:
    """Waits for further messages of a handshake, which has none."""
    await asyncio.Future()
    raise AssertionError


class _Refusal:
    """Carries the HTTP answer of a handshake. A server without ASGI's denial responses sends its own 403 instead."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._send = send
        self._can_explain = "websocket.http.response" in (scope.get("extensions") or {})
        self._status = 0

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            if self._status == 101:
                await self._send({"type": "websocket.accept", "headers": message["headers"]})
                return
            if not self._can_explain:
                await self._send({"type": "websocket.close", "code": 1008})
        if self._status != 101 and self._can_explain:
            await self._send({**message, "type": f"websocket.{message['type']}"})


class _Connection:
    """One open connection."""

    def __init__(self, sockets: WebSockets, scope: Scope, receive: Receive, send: Send) -> None:
        self._sockets = sockets
        headers = [(name, value) for name, value in scope["headers"] if name not in _NOT_OF_A_MESSAGE]
        self._scope = {**scope, "type": "http", "method": "POST", "headers": headers}
        self._rests = REST in (scope.get("extensions") or {})
        self._receive = receive
        self._send = send
        self._remembered = sockets.remembered.of_connection()
        self._waiting: deque[bytes] = deque()
        self._num_waiting_bytes = 0
        self._turn: _Turn | None = None
        """Message that is being answered."""
        self._changed = asyncio.Event()
        """Set when a message has come or the client has left."""
        self._is_gone = False

    async def serve(self) -> None:
        reading = asyncio.ensure_future(self._read())
        try:
            if await self._answer_all():
                too_old = Refusal("connection_too_old", bound=MAX_OPEN_S, remedy="open a new one", unit="s")
                await self._send_error(too_old)
                await self._send_unless_gone({"type": "websocket.close", "code": 1000})
        finally:
            reading.cancel()
            self._remembered.forget()
            self._sockets.room.give_back(self._num_waiting_bytes)

    async def _answer_all(self) -> bool:
        """Answers messages as they come. Returns whether the connection has reached its limit of time; otherwise the
        client has left.
        """
        ends_at = asyncio.get_running_loop().time() + MAX_OPEN_S
        while not self._is_gone:
            if self._waiting:
                await self._answer(self._waiting.popleft())
                continue
            if self._rests:
                await self._send_unless_gone({"type": REST})
            self._changed.clear()
            try:
                async with asyncio.timeout_at(ends_at):
                    await self._changed.wait()
            except TimeoutError:
                return True
        return False

    async def _answer(self, message: bytes) -> None:
        self._num_waiting_bytes -= len(message)
        self._sockets.room.give_back(len(message))
        self._turn = turn = _Turn(message, self.send_event)
        self._remembered.is_continued = False
        turn.exchange = self._sockets.new_exchange(self._scope, turn.receive, turn.send, False)
        turn.exchange.remembered = self._remembered
        answering = asyncio.ensure_future(self._sockets.answer_message(turn.exchange))
        try:
            await asyncio.wait({answering})
        finally:
            answering.cancel()
        self._turn = None
        if turn.is_cancelled:
            await self._send_error(Refusal("cancelled_by_client"))
        elif turn.has_failed and self._remembered.is_continued:
            self._remembered.forget()

    # ---- reading ---------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        """Reads messages until the client leaves, also while one is being answered."""
        while (received := await self._receive())["type"] == "websocket.receive":
            text = received.get("text")
            message: bytes = received["bytes"] if text is None else text.encode()
            if _is_cancel(message):
                if self._turn is not None:
                    self._turn.cancel()
                continue
            try:
                self._take(message)
            except ServingError as error:
                await self._send_error(error.refusal)
        self._is_gone = True
        if self._turn is not None:
            self._turn.leave()
        self._changed.set()

    def _take(self, message: bytes) -> None:
        """Adds a message to those that wait. Raises `ServingError` if there is no room for it."""
        limit = self._sockets.config.max_body_bytes
        if len(self._waiting) >= MAX_WAITING:
            self._refuse(len(self._waiting), "messages wait on this connection", MAX_WAITING)
        if self._waiting and self._num_waiting_bytes + len(message) > limit:
            num_bytes = self._num_waiting_bytes + len(message)
            self._refuse(num_bytes, "bytes of messages would wait on this connection", limit, "max_body_bytes")
        try:
            self._sockets.room.take(len(message))
        except ServingError:
            self._sockets.room.give_back(len(message))
            raise
        self._num_waiting_bytes += len(message)
        self._waiting.append(message)
        self._changed.set()

    # ---- writing ---------------------------------------------------------------------------------------------------

    async def send_event(self, event: bytes) -> None:
        """Sends an event, which is JSON."""
        await self._send_unless_gone({"type": "websocket.send", "text": event.decode()})

    def _refuse(self, value: int, unit: str, bound: int, option: str = "") -> NoReturn:
        refuse("too_many_messages", "", value, bound, "wait for the end of a response", cause=option, unit=unit)

    async def _send_error(self, refusal: Refusal) -> None:
        await self.send_event(_error_event(answer_of(refusal).status, openai_body(refusal)))

    async def _send_unless_gone(self, message: dict[str, Any]) -> None:
        if not self._is_gone:
            with contextlib.suppress(OSError):  # the client has just left, and `_read` will see it
                await self._send(message)


class _Turn:
    """One message, as the body of a POST, and its answer, whose events are sent as they come."""

    exchange: Exchange
    """Exchange that reads the body and writes the answer."""

    def __init__(self, message: bytes, send_event: Callable[[bytes], Awaitable[None]]) -> None:
        self._message: bytes | None = message
        self._send_event = send_event
        self._over = asyncio.Event()
        self._streams = False
        """Whether the answer is a stream of events, as opposed to the body of an error."""
        self._unsent = b""
        self.has_failed = False
        self.is_cancelled = False

    def leave(self) -> None:
        """Ends the answer, because the client has left."""
        self._over.set()

    def cancel(self) -> None:
        """Ends the answer, because the client wants no more of it."""
        self.is_cancelled = True
        self._over.set()

    async def receive(self) -> dict[str, Any]:
        if self._message is not None:
            body, self._message = self._message, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._over.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        """Takes a part of the HTTP answer, and sends what it completes: the events of a stream, or a whole error."""
        if self._over.is_set():
            return
        if message["type"] == "http.response.start":
            self._streams = message["status"] == 200
            return
        self._unsent += message["body"]
        if self._streams:
            *events, self._unsent = self._unsent.split(b"\n\n")
            for event in events:
                await self._send_part(event)
        elif not message["more_body"]:
            await self._send_failure(self._unsent)

    async def _send_part(self, event: bytes) -> None:
        if event.startswith(b"event: error\n"):
            await self._send_failure(body_of_event(event))
        else:
            await self._send_event(body_of_event(event))

    async def _send_failure(self, body: bytes) -> None:
        self.has_failed = True
        await self._send_event(_error_event(self.exchange.reply.status, body))


def _is_cancel(message: bytes) -> bool:
    if len(message) > CANCEL_BYTES:
        return False
    try:
        return msgspec.json.decode(message, type=_EventType).type == "response.cancel"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def _error_event(status: int, body: bytes) -> bytes:
    """Returns an `error` event from the body of an error. Its `code` is never null here, as OpenAI documents it."""
    error = msgspec.json.decode(body, type=ErrorBody).error
    error.code = error.code or error.type
    return encode({"type": "error", "status": status, "error": error})
