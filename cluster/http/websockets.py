"""WebSocket connections to `/v1/responses`: each message of a client is answered as a POST with that body would be.

A message becomes an `Exchange` like any HTTP request, so keys, rate limits, deadlines, the request log and the events
are those of the POST. This module carries bodies and events between the two, and the connection remembers its latest
response. Messages are answered one after the other, and each has exactly one last event: the end of its response, or an
`error`. So a client knows which message an error answers, refusals of messages that found no room included.

Sources: https://developers.openai.com/api/docs/guides/websocket-mode, and for `response.cancel` and `event_id` OpenAI's
Realtime API, https://platform.openai.com/docs/api-reference/realtime-client-events.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import msgspec

from manta.cluster.config import ServeConfig
from manta.cluster.errors import ServingError, error_of, refuse
from manta.cluster.http.access.request_admission import decode
from manta.cluster.http.exchange.codec import body_of_event, encode
from manta.cluster.http.exchange.exchange import Exchange
from manta.cluster.http.exchange.incoming import Receive, Scope, bodies_refusal
from manta.cluster.http.exchange.remembered import RememberedResponses
from manta.cluster.http.exchange.reply import NOT_ENFORCED, Send
from manta.cluster.protocol.error_bodies import ErrorDetail, answer_of, openai_body
from manta.cluster.protocol.foreign_fields import IGNORED
from manta.cluster.protocol.responses_api import MAX_EVENT_ID, ResponseCancelEvent
from manta.structured.client_shares import ClientShares, Holding
from manta.structured.refusals import Refusal

MAX_OPEN_S = 3600.0
"""Seconds for which a connection may be open, as in OpenAI's API. A response that is running then still ends."""
MAX_WAITING = 16
"""Messages of one connection that may wait while a response is running. Together they may have `max_body_bytes`."""
MAX_REFUSED = 256
"""Further messages that may wait for their refusal; a client that sends more loses the connection."""
POLICY = 1008
"""Code with which such a connection is closed, from the registry of RFC 6455."""
_LAST_EVENTS = (b"event: response.completed", b"event: response.incomplete", b"event: response.failed")
"""First lines of the events that end a response."""
REST = "manta.rest"
"""ASGI extension and message: the application tells the listener that no response is running on the connection."""
_NOT_OF_A_MESSAGE = (b"x-request-id", b"x-resumable-s", b"last-event-id", b"content-length")
"""Headers of the handshake that say nothing about a message on the connection."""

Answer = Callable[[Exchange], Awaitable[None]]
"""Function that answers one exchange."""


class _Envelope(msgspec.Struct):
    """The fields of a message that are read before its turn comes."""

    type: str = ""
    event_id: str | None = None


class _Created(msgspec.Struct):
    """The part of a `response.created` event that names the response."""

    class Response(msgspec.Struct):
        id: str

    response: Response


class _ErrorDetail(ErrorDetail, omit_defaults=True, kw_only=True):
    """An error on a connection. `event_id` is that of the message that it answers, as in OpenAI's Realtime API."""

    event_id: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorDetail


class _ErrorEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The last event of a message that has failed. `response_id` is there if its response had been created."""

    type: str
    status: int
    error: _ErrorDetail
    response_id: str = ""


class WebSockets:
    """The WebSocket connections of one application. `new_exchange` makes an exchange; its last argument says whether
    the answer has an x-request-id. `answer_handshake` answers a connection's HTTP request, and opens the connection
    with status 101. `answer_message` answers one message.
    """

    def __init__(
        self,
        config: ServeConfig,
        room: ClientShares,
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
            await _Connection(self, scope, receive, send, exchange.caller.sharer).serve()


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
    """One open connection of `client`."""

    def __init__(self, sockets: WebSockets, scope: Scope, receive: Receive, send: Send, client: str) -> None:
        self._sockets = sockets
        self._client = client
        headers = [(name, value) for name, value in scope["headers"] if name not in _NOT_OF_A_MESSAGE]
        self._scope = {**scope, "type": "http", "method": "POST", "headers": headers}
        self._rests = REST in (scope.get("extensions") or {})
        self._receive = receive
        self._send = send
        self._remembered = sockets.remembered.of_connection(client)
        self._waiting: deque[_Turn] = deque()
        """Messages whose turn has not come, oldest first."""
        self._num_waiting_bytes = 0
        self._running: _Turn | None = None
        """Message that is being answered."""
        self._changed = asyncio.Event()
        """Set when a message has come or the client has left."""
        self._is_gone = False

    async def serve(self) -> None:
        reading = asyncio.ensure_future(self._read())
        try:
            if await self._answer_all():
                too_old = Refusal("connection_too_old", bound=MAX_OPEN_S, remedy="open a new one", unit="s")
                await self.send_event(_error_event(answer_of(too_old).status, openai_body(too_old)))
                await self._send_unless_gone({"type": "websocket.close", "code": 1000})
        finally:
            reading.cancel()
            self._remembered.forget()
            for turn in self._waiting:
                self._give_room(turn)

    async def _answer_all(self) -> bool:
        """Answers messages as they come. Returns whether the connection has reached its limit of time; otherwise the
        client has left.
        """
        ends_at = asyncio.get_running_loop().time() + MAX_OPEN_S
        while not self._is_gone:
            if self._waiting:
                self._running = turn = self._waiting.popleft()
                await self._answer(turn)
                self._running = None
                continue
            if self._rests:
                await self._send_unless_gone({"type": REST, "client": self._client})
            self._changed.clear()
            try:
                async with asyncio.timeout_at(ends_at):
                    await self._changed.wait()
            except TimeoutError:
                return True
        return False

    async def _answer(self, turn: _Turn) -> None:
        self._give_room(turn)
        if turn.refusal is None:
            await self._generate(turn)
        if turn.refusal is not None:
            await turn.refuse()
        elif turn.has_failed and self._remembered.is_continued:
            self._remembered.forget()

    async def _generate(self, turn: _Turn) -> None:
        """Answers a message as a POST, until the client cancels it or leaves."""
        self._remembered.is_continued = False
        turn.exchange = self._sockets.new_exchange(self._scope, turn.receive, turn.send, False)
        turn.exchange.remembered = self._remembered
        answering = asyncio.ensure_future(self._sockets.answer_message(turn.exchange))
        try:
            await asyncio.wait({answering})
        finally:
            answering.cancel()

    # ---- reading ---------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        """Reads messages until the client leaves, also while one is being answered."""
        while (received := await self._receive())["type"] == "websocket.receive":
            text = received.get("text")
            message: bytes = received["bytes"] if text is None else text.encode()
            envelope = _envelope_of(message)
            try:
                if envelope.type == "response.cancel":
                    self._cancel(decode(ResponseCancelEvent, message, self._sockets.config.body))
                else:
                    self._take(message, envelope.event_id)
            except ServingError as error:
                self._waiting.append(_Turn(b"", envelope.event_id, self.send_event, error.refusal))
                self._changed.set()
            if len(self._waiting) > MAX_WAITING + MAX_REFUSED:
                reason = f"more than {MAX_WAITING + MAX_REFUSED} messages wait; wait for the end of a response"
                await self._send_unless_gone({"type": "websocket.close", "code": POLICY, "reason": reason})
                break
        self._is_gone = True
        if self._running is not None:
            self._running.leave()
        self._changed.set()

    def _take(self, message: bytes, event_id: str | None) -> None:
        """Adds a message to those that wait. Raises `ServingError` if there is no room for it."""
        limit = self._sockets.config.max_body_bytes
        if len(self._waiting) >= MAX_WAITING:
            self._refuse(len(self._waiting), "messages wait on this connection", MAX_WAITING)
        if self._num_waiting_bytes and self._num_waiting_bytes + len(message) > limit:
            num_bytes = self._num_waiting_bytes + len(message)
            self._refuse(num_bytes, "bytes of messages would wait on this connection", limit, "max_body_bytes")
        shared, turn = self._sockets.room, _Turn(message, event_id, self.send_event)
        turn.room = shared.hold(self._client, lambda: self._lose(turn))
        if not turn.room.take(len(message)):
            raise error_of(bodies_refusal(shared, self._client, len(message)))
        self._num_waiting_bytes += len(message)
        self._waiting.append(turn)
        self._changed.set()

    def _lose(self, turn: _Turn) -> None:
        """Refuses a message that waits, because others need its room."""
        turn.drop(bodies_refusal(self._sockets.room, self._client, turn.num_waiting_bytes))
        self._give_room(turn)

    def _cancel(self, event: ResponseCancelEvent) -> None:
        """Ends the response that `event` names, or that of the latest message before it. It does nothing if that has
        ended, because its client then has its last event, or will read it next.
        """
        latest = self._waiting[-1] if self._waiting else self._running
        named = self._running if event.response_id is not None else latest
        if named is None or event.response_id not in (None, named.response_id):
            return
        named.drop(Refusal("cancelled_by_client"))
        if named is not self._running:
            self._give_room(named)

    def _give_room(self, turn: _Turn) -> None:
        """Gives back the room of a message that no longer waits."""
        self._num_waiting_bytes -= turn.num_waiting_bytes
        turn.num_waiting_bytes = 0
        if turn.room is not None:
            turn.room.give_back()

    # ---- writing ---------------------------------------------------------------------------------------------------

    async def send_event(self, event: bytes) -> None:
        """Sends an event, which is JSON."""
        await self._send_unless_gone({"type": "websocket.send", "text": event.decode()})

    def _refuse(self, value: int, unit: str, bound: int, option: str = "") -> NoReturn:
        refuse("too_many_messages", "", value, bound, "wait for the end of a response", cause=option, unit=unit)

    async def _send_unless_gone(self, message: dict[str, Any]) -> None:
        if not self._is_gone:
            with contextlib.suppress(OSError):  # the client has just left, and `_read` will see it
                await self._send(message)


class _Turn:
    """One message, as the body of a POST, and its answer, whose events are sent as they come. With a `refusal` the
    answer is that alone.
    """

    exchange: Exchange
    """Exchange that reads the body and writes the answer; set when the turn comes."""

    def __init__(
        self,
        message: bytes,
        event_id: str | None,
        send_event: Callable[[bytes], Awaitable[None]],
        refusal: Refusal | None = None,
    ) -> None:
        self.num_waiting_bytes = len(message)
        """Bytes that count as waiting."""
        self.room: Holding | None = None
        """Room that the message takes while it waits; None for a refusal."""
        self.refusal = refusal
        self.response_id = ""
        """Id of the response; empty before it is created."""
        self.has_failed = False
        self._message: bytes | None = message
        self._event_id = event_id
        self._send_event = send_event
        self._over = asyncio.Event()
        """Set when nobody wants more of the answer."""
        self._has_ended = False
        """Whether the last event was sent."""
        self._streams = False
        """Whether the answer is a stream of events, as opposed to the body of an error."""
        self._notes: dict[str, str] = {}
        """The headers of an HTTP answer that say which parts of the message have no effect."""
        self._unsent = b""

    def leave(self) -> None:
        """Ends the answer, because the client has left."""
        self._over.set()

    def drop(self, refusal: Refusal) -> None:
        """Ends the answer with a refusal, unless its last event was sent."""
        if self.refusal is None and not self._has_ended:
            self.refusal, self._message = refusal, None
            self._over.set()

    async def refuse(self) -> None:
        """Sends the refusal as the last event."""
        assert self.refusal is not None
        status = answer_of(self.refusal).status
        await self._send_event(_error_event(status, openai_body(self.refusal), self._event_id, self.response_id))

    async def receive(self) -> dict[str, Any]:
        if self._message is not None:
            body, self._message = self._message, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._over.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        """Takes a part of the HTTP answer, and sends what it completes: the events of a stream, or a whole error."""
        if message["type"] == "http.response.start":
            self._streams = message["status"] == 200
            headers = dict(message["headers"])
            self._notes = {name.decode(): headers[name].decode() for name in (IGNORED, NOT_ENFORCED) if name in headers}
            return
        self._unsent += message["body"]
        if self._streams:
            *events, self._unsent = self._unsent.split(b"\n\n")
            for event in events:
                await self._send_part(event)
        elif not message["more_body"]:
            await self._fail(self._unsent)

    async def _send_part(self, event: bytes) -> None:
        name, body = event.partition(b"\n")[0], body_of_event(event)
        if name == b"event: error":
            await self._fail(body)
            return
        if name == b"event: response.created":
            self.response_id = msgspec.json.decode(body, type=_Created).response.id
            if self._notes:
                body = encode(msgspec.json.decode(body) | self._notes)
        await self._send(body, is_last=name in _LAST_EVENTS)

    async def _fail(self, body: bytes) -> None:
        self.has_failed = True
        event = _error_event(self.exchange.reply.status, body, self._event_id, self.response_id)
        await self._send(event, is_last=True)

    async def _send(self, event: bytes, is_last: bool) -> None:
        if not self._over.is_set():
            self._has_ended = is_last
            await self._send_event(event)


def _envelope_of(message: bytes) -> _Envelope:
    """Returns what is read of a message before its turn comes; of a message that has another form, nothing."""
    try:
        found = msgspec.json.decode(message, type=_Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Envelope()
    if found.event_id is not None and len(found.event_id) > MAX_EVENT_ID:
        found.event_id = None
    return found


def _error_event(status: int, body: bytes, event_id: str | None = None, response_id: str = "") -> bytes:
    """Returns an `error` event from the body of an error. Its `code` is never null here, as OpenAI documents it."""
    error = msgspec.json.decode(body, type=_ErrorBody).error
    error.code = error.code or error.type
    error.event_id = event_id
    return encode(_ErrorEvent(type="error", status=status, error=error, response_id=response_id))
