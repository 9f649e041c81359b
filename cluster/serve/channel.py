"""The per-step channel between engines and ingresses: one frame a step and ingress, over a TCP connection of their own.

The ingress listens; an engine connects back to the address that comes with a request. Deltas travel one way, stop
strings and aborts the other. It is no Serve request: a Ray message between two actors costs about 0.5 ms and a frame
here about 0.05 ms, so a step for 32 streams costs one of these, not 32 of those. A connection that breaks says so to
both sides.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
from collections.abc import Callable

import msgspec

from cluster.engine.request import FinishStatus, SequenceOutput, Usage

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 1 << 30
MAX_SECRET_BYTES = 1024
"""Nothing longer is read from a connection that has not shown the secret."""
CONNECT_TIMEOUT_S = 10.0
"""For a connection to be made, and for its secret to be shown."""
_LENGTH_BYTES = 4


class Address(msgspec.Struct, frozen=True, array_like=True):
    """Where an ingress listens. `secret` must open every connection, so that nobody else can push tokens."""

    host: str
    port: int
    secret: str


class Control(msgspec.Struct, array_like=True):
    """From ingress to engine: end a choice at a stop string, or, with `index` None, abort the request."""

    request_id: str
    index: int | None = None
    num_kept_tokens: int = 0


class RequestResult(msgspec.Struct, kw_only=True):
    """How a request ended: what the Serve call that ran it returns. Its tokens came by the channel."""

    finish: FinishStatus | None = None
    """Of the choice that ended last."""
    usage: Usage | None = None
    """The prompt once, the output tokens of all choices."""
    refused: str | None = None
    """Why it can never be served (HTTP 400), and the field at fault."""
    param: str | None = None
    queue_full: str | None = None
    """Why it cannot be served now (HTTP 429)."""


_outputs_decoder = msgspec.msgpack.Decoder(list[SequenceOutput])
_control_decoder = msgspec.msgpack.Decoder(Control)
_encoder = msgspec.msgpack.Encoder()


class Connection:
    """Length-prefixed frames over one socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        connection = writer.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: object) -> None:
        """Queues a frame; it leaves at once if the socket takes it. Only the reader notices a broken connection."""
        if self._writer.is_closing():
            return
        frame = _encoder.encode(message)
        self._writer.write(len(frame).to_bytes(_LENGTH_BYTES, "big") + frame)

    async def receive(self, limit: int = MAX_FRAME_BYTES) -> bytes:
        """The next frame, of at most `limit` bytes. Raises `asyncio.IncompleteReadError` or `OSError` at the end."""
        length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
        if length > limit:
            raise ConnectionError(f"a frame of {length} bytes exceeds {limit}")
        return await self._reader.readexactly(length)

    def close(self) -> None:
        self._writer.close()


class OutputReceiver:
    """The ingress's end: hands every delta to `on_outputs`, with the connection that it came by."""

    def __init__(
        self,
        host: str,
        on_outputs: Callable[[list[SequenceOutput], Connection], None],
        on_lost: Callable[[Connection], None],
    ) -> None:
        self._host = host
        self._on_outputs = on_outputs
        self._on_lost = on_lost
        self._secret = secrets.token_hex(16)
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()
        self._connections: set[Connection] = set()

    async def start(self) -> Address:
        """Listens on a free port, unless it does. Raises `OSError` if it cannot; the next call tries again."""
        async with self._starting:
            if self._server is None:
                # asyncio's own way to a socket raises nothing if none is to be had.
                family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
                listening = socket.create_server((self._host, 0), family=family)
                self._server = await asyncio.start_server(self._serve, sock=listening)
        port = self._server.sockets[0].getsockname()[1]
        return Address(self._host, port, self._secret)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        self._connections.add(connection)
        try:
            shown = await asyncio.wait_for(connection.receive(MAX_SECRET_BYTES), CONNECT_TIMEOUT_S)
            if not hmac.compare_digest(shown, self._secret.encode()):
                logger.warning("a connection to the output channel had the wrong secret")
                return
            while True:
                self._on_outputs(_outputs_decoder.decode(await connection.receive()), connection)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self._connections.discard(connection)
            self._on_lost(connection)
            connection.close()

    async def close(self) -> None:
        """Listens no more, and ends what is connected."""
        if self._server is None:
            return
        self._server.close()
        for connection in self._connections:
            connection.close()
        while self._connections:
            await asyncio.sleep(0)


class OutputSender:
    """The engine's end: one connection an ingress, made at its first request."""

    def __init__(self, on_control: Callable[[Control], None], on_lost: Callable[[Address], None]) -> None:
        self._on_control = on_control
        self._on_lost = on_lost
        self._connections: dict[Address, asyncio.Task[Connection]] = {}
        self._readers: set[asyncio.Task[None]] = set()

    async def connect(self, address: Address) -> None:
        """Makes sure that there is a connection. Raises `OSError` if the ingress cannot be reached; the next call
        tries again.
        """
        task = self._connections.get(address)
        if task is None:
            task = self._connections[address] = asyncio.ensure_future(self._open(address))
            task.add_done_callback(lambda opened: self._forget_failed(address, opened))
        await asyncio.shield(task)

    def _forget_failed(self, address: Address, opened: asyncio.Task[Connection]) -> None:
        if opened.cancelled() or opened.exception() is not None:
            del self._connections[address]

    async def _open(self, address: Address) -> Connection:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            connection = Connection(*await asyncio.open_connection(address.host, address.port))
        secret = address.secret.encode()
        connection._writer.write(len(secret).to_bytes(_LENGTH_BYTES, "big") + secret)
        reader = asyncio.ensure_future(self._read(address, connection))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        return connection

    async def _read(self, address: Address, connection: Connection) -> None:
        try:
            while True:
                self._on_control(_control_decoder.decode(await connection.receive()))
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            del self._connections[address]
            connection.close()
            self._on_lost(address)

    def send(self, address: Address, outputs: list[SequenceOutput]) -> None:
        """Sends one step's deltas; those for an ingress that is gone are dropped."""
        task = self._connections.get(address)
        if task is not None and task.done() and not task.cancelled() and task.exception() is None:
            task.result().send(outputs)
