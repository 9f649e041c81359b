"""An HTTP answer, over ASGI's messages: whole, in pieces, as a stream, or an error.

A client may stop reading or leave, so a stream has a buffer of limited size. `cluster/serve/listening/listener.py`
times out clients that do not take what was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol

from manta.cluster.config import ServeConfig
from manta.cluster.errors import ServingError, refuse
from manta.cluster.http.exchange.codec import EVENTS, StreamForm
from manta.cluster.http.exchange.engines import Generation
from manta.cluster.protocol.error_bodies import RETRIED_STATUSES, Writer, answer_of, openai_body, refusal_of
from manta.cluster.protocol.foreign_fields import IGNORED, ignored_header
from manta.structured.refusals import Refusal
from manta.structured.visible_logs import logger_of

SEND_BYTES = 65536
"""Bytes of the pieces in which an answer is sent, each after most of the previous one was taken."""

NOT_ENFORCED = b"x-manta-not-enforced"
"""Header of an answer that lists the demands of the body's constraint that the answer may break."""
MAX_HEADER_CHARACTERS = 4000
"""Most characters of that header's value; many clients refuse more than 8 KiB of headers."""

Send = Callable[[dict[str, Any]], Awaitable[None]]


class StreamBuffer:
    """Bytes of a stream that its connection has not taken yet. One task fills the buffer, another one empties it. With
    `waits` the task that fills it may wait, because the stream is recorded.
    """

    def __init__(self, limit: int, waits: bool = False) -> None:
        self._limit = limit
        self._waits = waits
        self._taken = asyncio.Event()
        self._bytes = bytearray()
        self._changed = asyncio.Event()
        self._ended = False
        self._error: Exception | None = None

    async def put(self, event: bytes) -> None:
        """Appends an event. Raises `ServingError` if more than the limit waits already, so that a single event always
        fits. With `waits` it waits for the client instead.
        """
        while self._waits and len(self._bytes) > self._limit:
            self._taken.clear()
            await self._taken.wait()
        if len(self._bytes) > self._limit:
            await asyncio.sleep(0)  # many events may have come in one turn, before the first could be sent
        if len(self._bytes) > self._limit:
            unit, remedy = "bytes of the stream wait for the client", "read faster, or raise client_buffer_bytes"
            refuse("client_too_slow", "", len(self._bytes), self._limit, remedy, unit=unit)
        self._bytes += event
        self._changed.set()

    def end(self, error: Exception | None = None) -> None:
        """Ends the stream; `take` raises `error` after the last bytes."""
        self._ended, self._error = True, error
        self._changed.set()

    async def take(self) -> bytes:
        """Returns the next bytes, at most `SEND_BYTES`; empty at the end."""
        while not self._bytes and not self._ended:
            self._changed.clear()
            await self._changed.wait()
        if not self._bytes and self._error is not None:
            raise self._error
        taken = bytes(self._bytes[:SEND_BYTES])
        del self._bytes[:SEND_BYTES]
        self._taken.set()
        return taken


class EventIds:
    """Names the events of a stream `STREAM_ID:NUMBER`, and leaves out those up to number `after`, which the client
    has.
    """

    def __init__(self, stream_id: str, after: int = -1) -> None:
        self._stream_id = stream_id
        self._after = after

    async def numbered(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        number = 0
        async for event in events:
            if number > self._after:
                yield f"id: {self._stream_id}:{number}\n".encode() + event
            number += 1


class Closing(Protocol):
    """The source of a stream's events."""

    def close(self) -> None:
        """Frees what the source holds. The reply calls it after the last event, also when the client has left."""
        ...


class GenerationReply(Protocol):
    """The part of a reply that a generation needs."""

    headers_always: list[tuple[bytes, bytes]]
    """Headers of every answer."""
    headers_out: list[tuple[bytes, bytes]]
    """Further headers of an answer without an error."""
    event_ids: EventIds | None
    """Ids of a stream's events; None if they have none."""
    not_enforced: Sequence[str]
    """Demands of the body's constraint that the answer may break."""

    async def send_json(self, body: bytes) -> None: ...

    async def stream(self, events: AsyncIterator[bytes], generation: Generation, form: StreamForm = EVENTS) -> None: ...


class WholeReply:
    """A reply that keeps a whole answer."""

    def __init__(self) -> None:
        self.headers_always: list[tuple[bytes, bytes]] = []
        self.headers_out: list[tuple[bytes, bytes]] = []
        self.event_ids: EventIds | None = None
        self.not_enforced: Sequence[str] = ()
        self.answer = b""

    async def send_json(self, body: bytes) -> None:
        self.answer = body

    async def stream(self, events: AsyncIterator[bytes], generation: Generation, form: StreamForm = EVENTS) -> None:
        raise AssertionError("this exchange takes whole answers only")


class Reply:
    """The answer to one request. `request_id` is its x-request-id with `returns_id`; otherwise Serve's proxy sets it.

    `on_start` is called when the answer begins.
    """

    def __init__(self, send: Send, config: ServeConfig, request_id: str, returns_id: bool) -> None:
        self.status = 0
        self.headers_always: list[tuple[bytes, bytes]] = []
        self.headers_out: list[tuple[bytes, bytes]] = []
        self.ignored: Sequence[str] = ()
        """Fields of the body that have no effect, which a header names."""
        self.not_enforced: Sequence[str] = ()
        self.error_body: Writer = openai_body
        """Function that writes an error in the shape of the route."""
        self.event_ids: EventIds | None = None
        self.refusal: Refusal | None = None
        """Why the request was not served, for the log."""
        self.on_start: Callable[[], None] = lambda: None
        self._config = config
        self._request_id = request_id
        self._id_header = [(b"x-request-id", request_id.encode("latin-1"))] if returns_id else []
        self._send = send

    async def stream(self, events: AsyncIterator[bytes], generation: Closing, form: StreamForm = EVENTS) -> None:
        """Sends the parts of a stream in their `form`; an error after the first part becomes a part of its own.

        Events are taken from the engine as they come, whether or not the client reads. Events with ids can be read
        again, so they are taken as the client reads them.
        """
        if self.event_ids is not None:
            events = self.event_ids.numbered(events)
        buffer = StreamBuffer(self._config.client_buffer_bytes, waits=self.event_ids is not None)
        filling = asyncio.ensure_future(_fill(buffer, events, generation))
        try:
            await self._send_stream(buffer, form)
        finally:
            filling.cancel()

    async def _send_stream(self, buffer: StreamBuffer, form: StreamForm) -> None:
        piece = await buffer.take()  # until the first token a refusal can still be an HTTP status
        fixed = [(b"cache-control", b"no-cache")]
        await self._start(200, form.media_type, fixed + self.headers_out)
        try:
            while piece:
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})
                piece = await buffer.take()
        except Exception as error:
            if not isinstance(error, ServingError):
                logger_of(__name__).exception("request %s failed in its stream", self._request_id)
            self.refusal = refusal = refusal_of(error)
            self.status = answer_of(refusal).status
            event = form.before + self.error_body(refusal) + form.after
            await self._send({"type": "http.response.body", "body": event, "more_body": True})
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send_json(self, body: bytes) -> None:
        await self.send_body(body, "application/json", headers=self.headers_out)

    async def send_body(self, body: bytes, content_type: str, status: int = 200, headers: Any = ()) -> None:
        await self._start(status, content_type, [(b"content-length", str(len(body)).encode()), *headers])
        for begin in range(0, len(body) or 1, SEND_BYTES):
            end = begin + SEND_BYTES
            message = {"type": "http.response.body", "body": body[begin:end], "more_body": end < len(body)}
            await self._send(message)

    async def send_events(self, events: AsyncIterator[bytes]) -> None:
        """Sends server-sent events as they come, each after the one before was taken. The client has no deadline."""
        await self._start(200, EVENTS.media_type, [(b"cache-control", b"no-cache")])
        async for event in events:
            await self._send({"type": "http.response.body", "body": event, "more_body": True})
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send_pieces(self, pieces: AsyncIterator[bytes], num_bytes: int, content_type: str) -> None:
        """Sends content that is never in memory as a whole, `num_bytes` in all."""
        await self._start(200, content_type, [(b"content-length", str(num_bytes).encode())])
        async for piece in pieces:
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send_empty(self, headers: list[tuple[bytes, bytes]], status: int = 204) -> None:
        """Sends an answer without a body."""
        self.status = status
        headers = [*self._id_header, *self.headers_always, *headers]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, refusal: Refusal) -> None:
        self.refusal = refusal
        headers, status = [], answer_of(refusal).status
        if status in RETRIED_STATUSES:
            headers.append((b"retry-after", str(max(1, math.ceil(refusal.retry_after_s or 0))).encode()))
        if refusal.kind in ("client_too_slow", "too_many_bodies"):
            headers.append((b"connection", b"close"))  # the start of the next request is unknown
        with contextlib.suppress(Exception):  # the client may be gone
            await self.send_body(self.error_body(refusal), "application/json", status, headers)

    async def _start(self, status: int, content_type: str, headers: list[tuple[bytes, bytes]]) -> None:
        self.on_start()
        self.status = status
        fixed = [(b"content-type", content_type.encode()), *self._id_header]
        fixed += self.headers_always
        if self.ignored:
            fixed.append((IGNORED, ignored_header(self.ignored)))
        if self.not_enforced:
            fixed.append((NOT_ENFORCED, not_enforced_header(self.not_enforced)))
        await self._send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})


def not_enforced_header(demands: Sequence[str]) -> bytes:
    """Returns the value of the header: ASCII without control characters, cut at `MAX_HEADER_CHARACTERS`."""
    value = ", ".join(demand.encode("unicode_escape").decode() for demand in demands)
    return (value if len(value) <= MAX_HEADER_CHARACTERS else f"{value[:MAX_HEADER_CHARACTERS]} ...").encode()


async def _fill(buffer: StreamBuffer, events: AsyncIterator[bytes], generation: Closing) -> None:
    try:
        async for event in events:
            await buffer.put(event)
    except Exception as error:
        buffer.end(error)
    else:
        buffer.end()
    finally:
        generation.close()  # at once, because the client may take long to read the error
