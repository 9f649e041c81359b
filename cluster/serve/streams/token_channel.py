"""The per-step channel between engines and ingresses: one frame a step and ingress, over a TCP connection of their own.

The ingress listens; an engine connects back to the address that comes with a request. Deltas travel one way, stop
strings and aborts the other. It is no Serve request: a Ray message between two actors costs about 0.5 ms and a frame
here about 0.05 ms, so a step for 32 streams costs one of these, not 32 of those. A connection that breaks says so to
both sides. While an engine runs anything it sends a frame at least every `BEAT_S`, if need be an empty one.

If Ray's own connections are encrypted (`RAY_USE_TLS`), this one is too, by the same certificates.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
import ssl
from collections.abc import Callable

import msgspec

from cluster.engine.request import FinishStatus, SequenceOutput, Usage
from cluster.serve.routing.reports import Report
from cluster.serve.streams.node_tls import client_context, server_context
from structured.frames import frame, receive_frame

logger = logging.getLogger(__name__)

GO_AHEAD = b"\n"
"""With TLS the ingress sends it first, and the engine waits for it before it shakes hands: otherwise the ingress might
take the first bytes of the handshake for a frame.
"""
MAX_FRAME_BYTES = 1 << 30
MAX_HELLO_BYTES = 1024
"""Nothing longer is read from a connection that has not shown the secret."""
CONNECT_TIMEOUT_S = 10.0
"""For a connection to be made, and for its secret to be shown."""
MAX_UNPROVEN = 64
"""Connections that have not shown the secret at a time."""
LINK_TIMEOUT_S = 60.0
"""A link may stand still for so long. Then an engine gives up an ingress whose machine is gone, and what it ran for it.
"""
BEAT_S = 0.15
"""Between two signs of life of an engine that runs requests."""


class Address(msgspec.Struct, frozen=True, array_like=True):
    """Where an ingress listens. `secret` must open every connection, so that nobody else can push tokens."""

    host: str
    port: int
    secret: str


class Hello(msgspec.Struct, array_like=True):
    """The first frame of a connection."""

    secret: str
    replica: str
    """The engine's, as Serve names its actor."""


class Frame(msgspec.Struct, array_like=True):
    """From engine to ingress: one step's deltas, or none."""

    outputs: list[SequenceOutput]
    report: Report | None = None
    is_away: bool = False
    """The engine starts its ranks anew: what it runs had better go on on another one if there is one."""


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
    retry_after_s: float | None = None
    """With `queue_full`: when to try again, as far as the engine can tell."""


class EngineFailed(RuntimeError):
    """The engine of this replica has ended, and with it all that it ran; another replica takes its place."""


_hello_decoder = msgspec.msgpack.Decoder(Hello)
_frame_decoder = msgspec.msgpack.Decoder(Frame)
_control_decoder = msgspec.msgpack.Decoder(Control)
_encoder = msgspec.msgpack.Encoder()


class Connection:
    """Frames over one socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.replica = ""
        """Of the engine at the other end."""
        self.is_away = False
        """As the engine at the other end last said."""
        self.has_sent = False
        """Since `OutputSender.beat`."""
        self._reader = reader
        self._writer = writer
        connection = writer.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # of Linux
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(LINK_TIMEOUT_S * 1000))

    async def secure(self, context: ssl.SSLContext, server: str | None = None) -> None:
        """Encrypts what follows. `server` is the host that was connected to; None at the listening end.

        Raises `OSError` if one end does not accept the certificate of the other.
        """
        if server is None:
            self._writer.write(GO_AHEAD)
        elif not await self._reader.read(len(GO_AHEAD)):
            raise ConnectionError(f"{server} closed the connection")
        await self._writer.start_tls(context, server_hostname=server)

    def send(self, message: object) -> None:
        """Queues a frame; it leaves at once if the socket takes it. Only the reader notices a broken connection."""
        if self._writer.is_closing():
            return
        self._writer.write(frame(_encoder.encode(message)))
        self.has_sent = True

    async def receive(self, limit: int = MAX_FRAME_BYTES) -> bytes:
        """The next frame, of at most `limit` bytes. Raises `asyncio.IncompleteReadError` or `OSError` at the end."""
        return await receive_frame(self._reader, limit)

    def close(self) -> None:
        self._writer.close()


class OutputReceiver:
    """The ingress's end: hands every delta to `on_outputs` and every report before it to `on_report`, with the
    connection that they came by.
    """

    def __init__(
        self,
        host: str,
        on_outputs: Callable[[list[SequenceOutput], Connection], None],
        on_lost: Callable[[Connection], None],
        on_report: Callable[[Report, Connection], None] = lambda _report, _connection: None,
    ) -> None:
        self._host = host
        self._on_outputs = on_outputs
        self._on_report = on_report
        self._on_lost = on_lost
        self._secret = secrets.token_hex(16)
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()
        self._connections: set[Connection] = set()
        self._tls: ssl.SSLContext | None = None
        self._unproven: dict[Connection, None] = {}
        """Those that have not shown the secret, the oldest first."""

    async def start(self) -> Address:
        """Listens on a free port, unless it does. Raises `OSError` if it cannot; the next call tries again."""
        async with self._starting:
            if self._server is None:
                # asyncio's own way to a socket raises nothing if none is to be had.
                family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
                self._tls = server_context()
                listening = socket.create_server((self._host, 0), family=family)
                self._server = await asyncio.start_server(self._serve, sock=listening)
        port = self._server.sockets[0].getsockname()[1]
        return Address(self._host, port, self._secret)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        self._connections.add(connection)
        try:
            connection.replica = await self._replica_of(connection)
            while True:
                message = _frame_decoder.decode(await connection.receive())
                connection.is_away = message.is_away
                if message.report is not None:
                    self._on_report(message.report, connection)
                self._on_outputs(message.outputs, connection)
        except (asyncio.IncompleteReadError, OSError):
            pass
        except ValueError:  # msgspec's are too
            logger.warning("a connection to the output channel did not show its secret", exc_info=True)
        finally:
            self._connections.discard(connection)
            self._on_lost(connection)
            connection.close()

    async def _replica_of(self, connection: Connection) -> str:
        """Returns the name of the engine at the other end. Raises `ValueError` if it does not show the secret.

        Of more than `MAX_UNPROVEN` connections that have not shown it the oldest is closed.
        """
        self._unproven[connection] = None
        if len(self._unproven) > MAX_UNPROVEN:
            next(iter(self._unproven)).close()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                if self._tls is not None:
                    await connection.secure(self._tls)
                hello = _hello_decoder.decode(await connection.receive(MAX_HELLO_BYTES))
        finally:
            del self._unproven[connection]
        if not hmac.compare_digest(hello.secret.encode(), self._secret.encode()):
            raise ValueError("another secret")
        return hello.replica

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
    """The engine's end: one connection an ingress, made at its first request or before. `replica` is the engine's name;
    `take_report` gives what an ingress is to be told beside its deltas, and `is_away` whether the engine starts its
    ranks anew.
    """

    def __init__(
        self,
        replica: str,
        on_control: Callable[[Control], None],
        on_lost: Callable[[Address], None],
        take_report: Callable[[Address], Report | None] = lambda _address: None,
        is_away: Callable[[], bool] = lambda: False,
    ) -> None:
        self._replica = replica
        self._on_control = on_control
        self._on_lost = on_lost
        self._take_report = take_report
        self._is_away = is_away
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
        context = client_context()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            connection = Connection(*await asyncio.open_connection(address.host, address.port))
            if context is not None:
                try:
                    await connection.secure(context, address.host)
                except BaseException:
                    connection.close()
                    raise
        connection.send(Hello(address.secret, self._replica))
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
        if task is not None and _is_open(task):
            task.result().send(Frame(outputs, self._take_report(address), self._is_away()))

    def beat(self) -> None:
        """A frame without deltas on each connection that had none since the last call, or that a report is due on."""
        for address, task in self._connections.items():
            if _is_open(task):
                connection, report = task.result(), self._take_report(address)
                if report is not None or not connection.has_sent:
                    connection.send(Frame([], report, self._is_away()))
                connection.has_sent = False


def _is_open(task: asyncio.Task[Connection]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
