"""One HTTP request and its answer, over ASGI's messages. The application makes one exchange for each request.

A client may be slow, stop reading or leave. A body therefore has limits in bytes and time, a stream has a buffer of
limited size, and the work for a client ends when it leaves. `cluster/serve/listening/listener.py` times out clients
that do not take what was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import secrets
import time
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from manta.cluster.config import ServeConfig
from manta.cluster.errors import ServingError
from manta.cluster.http.access.addresses import network_of
from manta.cluster.http.access.rate_limits import KeyUse
from manta.cluster.http.exchange.codec import EVENTS, StreamForm
from manta.cluster.http.exchange.engines import Generation
from manta.cluster.http.exchange.identity import Identity
from manta.cluster.http.exchange.preparation import Preparation
from manta.cluster.http.exchange.recordings import Replay, Resumable, event_id
from manta.cluster.http.exchange.remembered import Remembered
from manta.cluster.protocol.api_errors import RETRIED_STATUSES, ApiError, api_error
from manta.cluster.telemetry.exporting import traceparent_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span

DRAINED_BODIES = 16
"""Multiple of `max_body_bytes` that is still read of a body that is too long, before the connection is given up."""
SLOW_START_S = 10.0
"""Seconds for which a body may arrive more slowly than `min_body_bytes_per_s`."""
SEND_BYTES = 65536
"""Bytes of the pieces in which an answer is sent, each after most of the previous one was taken."""

EVERYBODY = "everybody"

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Result = TypeVar("Result")


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


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
        """Appends an event. Raises `ApiError` if more than the limit waits already, so that a single event always
        fits. With `waits` it waits for the client instead.
        """
        while self._waits and len(self._bytes) > self._limit:
            self._taken.clear()
            await self._taken.wait()
        if len(self._bytes) > self._limit:
            await asyncio.sleep(0)  # many events may have come in one turn, before the first could be sent
        if len(self._bytes) > self._limit:
            raise ApiError(
                408,
                f"{len(self._bytes)} bytes of the stream wait for the client and the limit is {self._limit}; read "
                "faster, or raise client_buffer_bytes",
                type="timeout_error",
                code="client_too_slow",
            )
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


class BodyRoom:
    """Memory for bodies that are being received, for all requests together."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Takes room. Raises `ApiError` 503 if it exceeds the limit; even then it counts, and has to be given back."""
        self.num_bytes += num_bytes
        if self.num_bytes > self._max_bytes:
            raise ApiError(
                503,
                f"{self.num_bytes} bytes of bodies are being received and the limit is {self._max_bytes} "
                "(max_bodies_bytes); retry later",
                code="too_many_bodies",
            )

    def give_back(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes


class GenerationExchange(Protocol):
    """The part of an exchange that a generation needs. Lines of batches have another implementation
    (`cluster/http/exchange/whole_exchange.py`).
    """

    request_id: str
    headers_out: list[tuple[bytes, bytes]]
    span: Span | None
    route: str
    """Path of the route, as in the table of routes."""
    identity: Identity
    """Source of the answer's ids."""
    resumable: Resumable | None
    """Set if the output is to be recorded, which needs an `identity` with a stream's id."""
    replay: Replay | None
    """Set if the answer is written from a recording instead of being generated."""
    remembered: Remembered | None
    """Set if the request came on a WebSocket connection, which remembers its latest response."""

    @property
    def headers(self) -> Mapping[str, str]: ...

    @property
    def client(self) -> str: ...

    @property
    def sharer(self) -> str: ...

    @property
    def owner(self) -> str: ...

    @property
    def traceparent(self) -> str: ...

    @property
    def remaining_s(self) -> float:
        """Seconds until the request's deadline, at least 0."""
        ...

    def hand_over(self) -> None:
        """Hands the request and its deadline over to the engines."""
        ...

    async def send_json(self, body: bytes) -> None: ...

    async def stream(self, events: AsyncIterator[bytes], generation: Generation, form: StreamForm = EVENTS) -> None: ...

    def admit(self, num_prompt_tokens: int) -> None:
        """Raises `ApiError` 429 if the client's key has used up its requests or tokens per minute."""
        ...

    def note(self, generation: Generation) -> None: ...


class Exchange:
    """One HTTP request and its answer. `returns_id` says whether the answer has an x-request-id; otherwise Serve's
    proxy sets it.
    """

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, config: ServeConfig, room: BodyRoom, returns_id: bool
    ) -> None:
        self.method: str = scope["method"]
        self.root_path: str = scope.get("root_path", "").rstrip("/")
        """Prefix below which a proxy in front serves this application, such as Serve's `route_prefix`; usually
        empty.
        """
        self.path = _below(self.root_path, scope["path"])
        """Path as routes have it: without `root_path` and without a trailing slash."""
        self.headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
        given = self.headers.get("x-request-id", "")
        self.request_id = given if 0 < len(given) <= 128 and given.isprintable() else f"req-{secrets.token_hex(8)}"
        self.query = dict(urllib.parse.parse_qsl(scope.get("query_string", b"").decode("latin-1")))
        """Fields of the URL's query; of a repeated name, the last value."""
        self.path_parameter = ""
        """Value of the parameter in the route's path, if the route has one."""
        self.client = ""
        """Name of the API key that the request brought; empty without keys."""
        self.owner = EVERYBODY
        """Owner of the files, batches and cached prefixes that the request may use: that of its API key, or `EVERYBODY`
        if the server has no keys.
        """
        self.address = network_of((scope.get("client") or ("",))[0])
        """Address of the client, or of a proxy in front; for IPv6, the network of the address."""
        self.use: KeyUse | None = None
        """Rate limits of the API key; None if it has none."""
        self.status = 0
        self.headers_always: list[tuple[bytes, bytes]] = []
        """Headers of every answer."""
        self.headers_out: list[tuple[bytes, bytes]] = []
        """Further headers of an answer without an error."""
        self._id_header = [(b"x-request-id", self.request_id.encode("latin-1"))] if returns_id else []
        self._config = config
        self._room = room
        self._receive = receive
        self._send = send
        self._begun = time.perf_counter()
        self.notes: dict[str, Any] = {}
        """Token counts of the generation, for the log."""
        self.route = ""
        """Path of the route, as in the table of routes."""
        self.error_body: Callable[[ApiError], bytes] = ApiError.body
        """Function that writes an error in the shape of the route."""
        self.span: Span | None = None
        """Span of the request; None if it is not traced."""
        self.identity = Identity()
        self.resumable: Resumable | None = None
        self.replay: Replay | None = None
        self.remembered: Remembered | None = None
        self.is_websocket = scope["type"] == "websocket"
        """Whether the client asks for a WebSocket connection. An answer with status 101 opens it."""
        self.preparation: Preparation | None = None
        """Place among the requests that are prepared; set before the handler is called."""

    @property
    def remaining_s(self) -> float:
        assert self.preparation is not None
        return self.preparation.remaining_s

    def hand_over(self) -> None:
        assert self.preparation is not None
        self.preparation.end()

    @property
    def url_path(self) -> str:
        """Path as the client knows it."""
        return f"{self.root_path}{self.path}"

    @property
    def traceparent(self) -> str:
        """W3C's `traceparent` of the request's span; empty if it is not traced."""
        return "" if self.span is None else traceparent_of(self.span)

    @property
    def sharer(self) -> str:
        """Name under which the client takes turns with others: the name of its key, else its address."""
        return self.client or self.address

    # ---- the request ---------------------------------------------------------------------------------------------

    async def body(self) -> bytes:
        """Returns the whole body. Raises `ApiError`

        - 413 if it exceeds `max_body_bytes`; no more bytes than that are kept,
        - 408 if it takes longer than `client_timeout_s` or arrives more slowly than `min_body_bytes_per_s`,
        - 503 if too much is being received.
        """
        received, begun = bytearray(), asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(None) as deadline:
                await self._read_body(received, deadline, begun)
        except TimeoutError as error:
            raise self._too_slow(len(received), begun) from error
        finally:
            self._room.give_back(len(received))
        return bytes(received)

    async def _read_body(self, received: bytearray, deadline: asyncio.Timeout, begun: float) -> None:
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
                received += message["body"]
                self._room.take(len(message["body"]))
        if num_bytes > limit:
            raise _too_large(num_bytes, limit, more, "max_body_bytes")

    @contextlib.contextmanager
    def room(self, num_bytes: int) -> Iterator[None]:
        """Reserves memory for content that is sent or received in pieces. Raises `ApiError` 503 if there is none."""
        try:
            self._room.take(num_bytes)
            yield
        finally:
            self._room.give_back(num_bytes)

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
            raise _too_large(num_bytes, limit, more, "batches.max_file_bytes")

    def _too_slow(self, num_bytes: int, begun: float) -> ApiError:
        seconds = asyncio.get_running_loop().time() - begun
        option = "client_timeout_s" if seconds >= self._config.client_timeout_s else "min_body_bytes_per_s"
        change = "raise" if option == "client_timeout_s" else "lower"
        return ApiError(
            408,
            f"{num_bytes} bytes of the body came within {seconds:.1f} s and not its end; send it faster, or "
            f"{change} {option}, which is {getattr(self._config, option):g}",
            type="timeout_error",
            code="client_too_slow",
        )

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

    # ---- the answer ----------------------------------------------------------------------------------------------

    async def stream(self, events: AsyncIterator[bytes], generation: Generation, form: StreamForm = EVENTS) -> None:
        """Sends the parts of a stream in their `form`; an error after the first part becomes a part of its own.

        Events are taken from the engine as they come, whether or not the client reads; those of a recording as the
        client reads them.
        """
        stream_id = self.identity.stream_id
        if stream_id:
            events = _numbered(events, stream_id, -1 if self.replay is None else self.replay.after)
        buffer = StreamBuffer(self._config.client_buffer_bytes, waits=bool(stream_id))
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
            if not isinstance(error, ApiError | ServingError):
                logging.getLogger(__name__).exception("request %s failed in its stream", self.request_id)
            failure = api_error(error)
            self.status = failure.status
            event = form.before + self.error_body(failure) + form.after
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

    async def fail(self, error: ApiError) -> None:
        headers = []
        if error.status in RETRIED_STATUSES:
            headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s or 0))).encode()))
        if error.code in ("client_too_slow", "too_many_bodies"):
            headers.append((b"connection", b"close"))  # the start of the next request is unknown
        with contextlib.suppress(Exception):  # the client may be gone
            await self.send_body(self.error_body(error), "application/json", error.status, headers)

    async def _start(self, status: int, content_type: str, headers: list[tuple[bytes, bytes]]) -> None:
        if self.preparation is not None:  # from now on the client's own pace is timed
            self.preparation.end()
        self.status = status
        fixed = [(b"content-type", content_type.encode()), *self._id_header]
        fixed += self.headers_always
        await self._send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})

    # ---- the request log -----------------------------------------------------------------------------------------

    def admit(self, num_prompt_tokens: int) -> None:
        if self.use is not None:
            try:
                self.use.admit(num_prompt_tokens)
            finally:
                self.headers_always += self.use.headers()

    def note(self, generation: Generation) -> None:
        """Adds the token counts of a generation to the log line, and its output tokens to the key's rate limit."""
        usages = generation.usages
        if self.use is not None and not self.identity.stream_id:  # a recorded stream is charged when it ends
            self.use.charge_output(sum(usage.num_output_tokens for usage in usages))
        self.notes = {
            "choices": generation.num_choices,
            "prompt_tokens": sum(usage.num_prompt_tokens for usage in usages),
            "output_tokens": sum(usage.num_output_tokens for usage in usages),
        }

    def log_line(self) -> str:
        seconds = time.perf_counter() - self._begun
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "request_id": self.request_id,
            **({"client": self.client} if self.client else {}),
            "path": self.url_path,
            "status": self.status,
            "seconds": round(seconds, 4),
            **self.notes,
        }
        return json.dumps(entry)


def _below(root_path: str, path: str) -> str:
    """Returns `path` without `root_path`. ASGI leaves the prefix in the path, but a server may already have removed
    it.
    """
    if path == root_path or path.startswith(f"{root_path}/"):
        path = path[len(root_path) :]
    return path.rstrip("/") or "/"


def _too_large(num_bytes: int, limit: int, more: bool, option: str) -> ApiError:
    return ApiError(
        413,
        f"the body has {'more than ' if more else ''}{num_bytes} bytes and the limit is {limit}; send less, or raise "
        f"{option}",
        code="body_too_large",
    )


async def _numbered(events: AsyncIterator[bytes], stream_id: str, after: int) -> AsyncIterator[bytes]:
    """Gives each event its id, and leaves out those up to number `after`, which the client has."""
    number = 0
    async for event in events:
        if number > after:
            yield event_id(stream_id, number) + event
        number += 1


async def _fill(buffer: StreamBuffer, events: AsyncIterator[bytes], generation: Generation) -> None:
    try:
        async for event in events:
            await buffer.put(event)
    except Exception as error:
        buffer.end(error)
    else:
        buffer.end()
    finally:
        generation.close()  # at once, because the client may take long to read the error
