"""The per-step channel between engines and ingresses: one frame per step and ingress, over a TCP connection of its own.

The ingress listens, and an engine connects to the address that comes with a call. Outputs and results travel from
engine to ingress; requests, stop strings and aborts back. The channel bypasses Serve, whose calls cost
both processes far more than a frame does (`manta bench --workloads http`), and one frame serves all streams of a step.
Both ends notice a broken connection. While an engine runs anything, it sends a frame at least every `BEAT_S`, possibly
an empty one.

If Ray's own connections are encrypted (`RAY_USE_TLS`), this one is too, with the same certificates.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
from collections.abc import Callable, Sequence

import msgspec

from manta.cluster.engine.request import EngineRequest, FinishStatus, SequenceOutput, Usage
from manta.cluster.handshake import (
    MAX_HELLO_BYTES,
    Address,
    Hello,
    format_of,
    listen,
    own_version,
    proven,
    versions_beside,
)
from manta.cluster.serve.channel.keeping import FromKeeper, ToKeeper, stream_format
from manta.cluster.serve.channel.node_tls import client_context, server_context
from manta.cluster.serve.routing.reports import Report
from manta.structured.frames import frame, receive_frame
from manta.structured.refusals import Refusal
from manta.structured.visible_logs import logger_of

logger = logger_of(__name__)

GO_AHEAD = b"\n"
"""Byte that the ingress sends first under TLS, and that the engine awaits before its handshake. Otherwise the ingress
might read the start of the handshake as a frame.
"""
MAX_FRAME_BYTES = 1 << 30
CONNECT_TIMEOUT_S = 10.0
"""Seconds that a connection gets to be made and to show the secret."""
MAX_UNPROVEN = 64
"""Connections that may be open without having shown the secret."""
LINK_TIMEOUT_S = 60.0
"""Seconds that sent bytes may stay unacknowledged (`TCP_USER_TIMEOUT`). Then an engine gives up an ingress whose
machine is gone, and aborts its requests.
"""
PROBE_S = 0.3
"""Longest time, in seconds, in which `has_died` finds out that a process has ended."""
PROBE_AGAIN_S = 0.01
"""Seconds after which `has_died` connects again to a process that is about to end."""
BEAT_S = 0.15
"""Seconds between two heartbeats of an engine that runs requests."""


class EngineHello(Hello, array_like=True):
    """The hello of an engine."""

    replica: str
    """Name of the engine replica, as Serve names its actor."""
    node: str = ""
    """Id of the Ray node that the engine runs on."""
    stream_format: str = ""
    """Format of the keeper's messages (`keeping.stream_format`); empty from a version that does not tell it."""
    version: str = ""
    """Version of Manta; empty from a version that does not tell it."""
    request_format: str = ""
    """Format of requests and their results (`request_format`); empty from a version that takes none here."""


class RequestResult(msgspec.Struct, kw_only=True):
    """The end of a request. The tokens travel in frames of their own."""

    finish: FinishStatus | None = None
    """Finish status of the choice that ended last."""
    usage: Usage | None = None
    """The prompt counted once, and the output tokens of all choices."""
    refusal: Refusal | None = None
    """Why the engine did not take the request, if it did not."""
    failure: str = ""
    """Why the engine has failed, if it has. A call through Serve raises `EngineFailed` instead."""


class Frame(msgspec.Struct, array_like=True):
    """A message from engine to ingress: the outputs of one step, possibly none."""

    outputs: list[SequenceOutput]
    report: Report | None = None
    is_away: bool = False
    """Whether the engine completes no step for some seconds. Its requests should continue on another one, if possible.
    """
    kept: list[FromKeeper] = []
    """Messages of the keeper of recordings in the engine's process."""
    results: list[tuple[str, RequestResult]] = []
    """Ids and results of requests that came over this channel and have ended."""


class Run(msgspec.Struct, array_like=True, tag="run"):
    """A message from ingress to engine: run a request as `EngineReplica.generate` does. A `Frame` has its result."""

    request: EngineRequest


class Control(msgspec.Struct, array_like=True, tag="control"):
    """A message from ingress to engine: end a choice at a stop string or, with `index` None, abort the request."""

    request_id: str
    index: int | None = None
    num_kept_tokens: int = 0


@functools.cache
def request_format() -> str:
    """Returns a hash of the fields of a request and its result. Requests come over the channel if both ends have the
    same.
    """
    return format_of(Run, RequestResult)


class EngineFailed(RuntimeError):
    """The engine of this replica has failed, and its requests with it. Serve starts another replica."""


_UNREADABLE = "%s sent a message that cannot be read here (%s); it is disconnected"
_frame_decoder = msgspec.msgpack.Decoder(Frame)
_to_engine_decoder: msgspec.msgpack.Decoder[Control | Run | ToKeeper] = msgspec.msgpack.Decoder(
    Control | Run | ToKeeper
)
_encoder = msgspec.msgpack.Encoder()


class Connection:
    """Frames over one socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.replica = self.node = self.version = ""
        """Names of the engine replica, of its node, and its version of Manta, at the other end."""
        self.stream_format = ""
        """Format of messages that the keeper at the other end understands."""
        self.takes_requests = False
        """Whether the engine at the other end understands a `Run`."""
        self.is_away = False
        """Whether the engine at the other end last said that it completes no step for some seconds."""
        self.has_sent = False
        """Whether a frame was sent since the last `OutputSender.beat`."""
        self._reader = reader
        self._writer = writer
        connection = writer.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # of Linux
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(LINK_TIMEOUT_S * 1000))

    async def secure(self, context: ssl.SSLContext, server: str | None = None) -> None:
        """Encrypts the connection. `server` is the host that was connected to; None at the listening end.

        Raises `OSError` if one end does not accept the certificate of the other.
        """
        if server is None:
            self._writer.write(GO_AHEAD)
        elif not await self._reader.read(len(GO_AHEAD)):
            raise ConnectionError(f"{server} closed the connection")
        await self._writer.start_tls(context, server_hostname=server)

    def send(self, message: object) -> None:
        """Queues a frame, which leaves at once if the socket takes it. A broken connection raises nothing here; the
        reader notices it. Raises `OverflowError` or `ValueError` if msgpack has no form of a number or a text.
        """
        if self._writer.is_closing():
            return
        self._writer.write(frame(_encoder.encode(message)))
        self.has_sent = True

    async def receive(self, limit: int = MAX_FRAME_BYTES) -> bytes:
        """Returns the next frame, of at most `limit` bytes. Raises `asyncio.IncompleteReadError` or `OSError` when the
        connection ends.
        """
        return await receive_frame(self._reader, limit)

    def close(self) -> None:
        self._writer.close()


class OutputReceiver:
    """The ingress's end. It passes each frame's report to `on_report`, then its keeper's messages to `on_kept`, then
    its outputs to `on_outputs`, all with the connection, and then its results to `on_results`.
    """

    def __init__(
        self,
        host: str,
        on_outputs: Callable[[list[SequenceOutput], Connection], None],
        on_lost: Callable[[Connection], None],
        on_report: Callable[[Report, Connection], None] = lambda _report, _connection: None,
        on_kept: Callable[[FromKeeper, Connection], None] = lambda _message, _connection: None,
        on_connected: Callable[[Connection], None] = lambda _connection: None,
        on_results: Callable[[list[tuple[str, RequestResult]]], None] = lambda _results: None,
    ) -> None:
        self._host = host
        self._on_results = on_results
        self._on_outputs = on_outputs
        self._on_report = on_report
        self._on_kept = on_kept
        self._on_connected = on_connected
        self._on_lost = on_lost
        self._address: Address | None = None
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()
        self.connections: set[Connection] = set()
        """The open ones."""
        self._tls: ssl.SSLContext | None = None
        self._unproven: dict[Connection, None] = {}
        """Connections that have not shown the secret, oldest first."""

    async def start(self) -> Address:
        """Listens on a free port, unless it already does, and returns the address. Raises `OSError` on failure; the
        next call tries again.
        """
        async with self._starting:
            if self._server is None:
                self._tls = server_context()
                listening, self._address = listen(self._host)  # asyncio's own way raises nothing on failure
                self._server = await asyncio.start_server(self._serve, sock=listening)
        assert self._address is not None
        return self._address

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        self.connections.add(connection)
        is_known = False
        try:
            hello = await self._hello_of(connection)
            connection.replica, connection.node = hello.replica, hello.node
            connection.stream_format, connection.version = hello.stream_format, hello.version
            connection.takes_requests = hello.request_format == request_format()
            is_known = True
            self._on_connected(connection)
            while True:
                message = _frame_decoder.decode(await connection.receive())
                connection.is_away = message.is_away
                if message.report is not None:
                    self._on_report(message.report, connection)
                for kept in message.kept:
                    self._on_kept(kept, connection)
                self._on_outputs(message.outputs, connection)
                if message.results:
                    self._on_results(message.results)
        except (asyncio.IncompleteReadError, OSError):
            pass
        except ValueError:  # msgspec's errors are ValueErrors too
            if connection.replica:
                why = versions_beside(connection.version)
                logger.warning(_UNREADABLE, f"engine {connection.replica}", why, exc_info=True)
            else:
                logger.warning("a connection to the output channel did not show its secret")
        finally:
            self.connections.discard(connection)
            if is_known:
                self._on_lost(connection)
            connection.close()

    async def _hello_of(self, connection: Connection) -> EngineHello:
        """Returns the first frame of the engine at the other end. Raises `ValueError` if it does not show the secret.

        If more than `MAX_UNPROVEN` connections have not shown the secret, the oldest of them is closed.
        """
        self._unproven[connection] = None
        if len(self._unproven) > MAX_UNPROVEN:
            next(iter(self._unproven)).close()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                if self._tls is not None:
                    await connection.secure(self._tls)
                data = await connection.receive(MAX_HELLO_BYTES)
        finally:
            del self._unproven[connection]
        assert self._address is not None
        return proven(data, EngineHello, self._address.secret)

    async def close(self) -> None:
        """Stops listening and closes all connections."""
        if self._server is None:
            return
        self._server.close()
        for connection in self.connections:
            connection.close()
        while self.connections:
            await asyncio.sleep(0)


class OutputSender:
    """The engine's end, with one connection per ingress, opened at the ingress's first request or before.

    `replica` is the engine's name and `node` the id of its Ray node. `take_report` returns the report that an ingress
    gets beside its outputs. `is_away` says whether the engine completes no step for some seconds. `on_keep` gets the
    messages for the keeper of recordings, and `on_request` the requests.
    """

    def __init__(
        self,
        replica: str,
        node: str,
        on_control: Callable[[Control], None],
        on_lost: Callable[[Address], None],
        take_report: Callable[[Address], Report | None] = lambda _address: None,
        is_away: Callable[[], bool] = lambda: False,
        on_keep: Callable[[Address, ToKeeper], None] = lambda _address, _message: None,
        on_request: Callable[[Address, EngineRequest], None] = lambda _address, _request: None,
    ) -> None:
        self._replica = replica
        self._node = node
        self._on_control = on_control
        self._on_lost = on_lost
        self._take_report = take_report
        self._is_away = is_away
        self._on_keep = on_keep
        self._on_request = on_request
        self.connections: dict[Address, asyncio.Task[Connection]] = {}
        """Those that are open or being opened, by the address of the ingress."""
        self._readers: set[asyncio.Task[None]] = set()

    async def connect(self, address: Address) -> None:
        """Opens a connection unless there is one. Raises `OSError` if the ingress cannot be reached; the next call
        tries again.
        """
        task = self.connections.get(address)
        if task is None:
            task = self.connections[address] = asyncio.ensure_future(self._open(address))
            task.add_done_callback(lambda opened: self._forget_failed(address, opened))
        await asyncio.shield(task)

    def _forget_failed(self, address: Address, opened: asyncio.Task[Connection]) -> None:
        if opened.cancelled() or opened.exception() is not None:
            del self.connections[address]

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
        formats = stream_format(), own_version(), request_format()
        connection.send(EngineHello(address.secret, self._replica, self._node, *formats))
        reader = asyncio.ensure_future(self._read(address, connection))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        return connection

    async def _read(self, address: Address, connection: Connection) -> None:
        """Hands on an ingress's requests, its controls and its messages to the keeper until the connection breaks."""
        try:
            while True:
                message = _to_engine_decoder.decode(await connection.receive())
                if isinstance(message, Control):
                    self._on_control(message)
                elif isinstance(message, Run):
                    self._on_request(address, message.request)
                else:
                    self._on_keep(address, message)
        except (asyncio.IncompleteReadError, OSError):
            pass
        except ValueError:
            why = versions_beside(address.version)
            logger.warning(_UNREADABLE, f"the ingress at {address.host}:{address.port}", why, exc_info=True)
        finally:
            del self.connections[address]
            connection.close()
            self._on_lost(address)

    def send(
        self, address: Address, outputs: list[SequenceOutput], results: Sequence[tuple[str, RequestResult]] = ()
    ) -> None:
        """Sends one step's outputs and results, or drops them if the ingress is gone."""
        task = self.connections.get(address)
        if task is not None and _is_open(task):
            task.result().send(Frame(outputs, self._take_report(address), self._is_away(), results=list(results)))

    def send_kept(self, address: Address, message: FromKeeper) -> None:
        """Sends a message of the keeper, or drops it if the ingress is gone."""
        task = self.connections.get(address)
        if task is not None and _is_open(task):
            task.result().send(Frame([], None, self._is_away(), [message]))

    def beat(self) -> None:
        """Sends an empty frame on each connection that had no frame since the last call or has a report due."""
        for address, task in self.connections.items():
            if _is_open(task):
                connection, report = task.result(), self._take_report(address)
                if report is not None or not connection.has_sent:
                    connection.send(Frame([], report, self._is_away()))
                connection.has_sent = False


async def has_died(address: Address) -> bool:
    """Returns whether the process that listened at an ingress's address has ended, so that its machine refuses
    connections. A process that hangs accepts them, and of a machine that does not answer nobody knows.
    """
    try:
        async with asyncio.timeout(PROBE_S):
            while not await _lasts(address):  # a process that is just ending may close its port after its connections
                await asyncio.sleep(PROBE_AGAIN_S)
    except ConnectionRefusedError:
        return True
    except OSError:  # it did not answer in time, or cannot be reached
        return False
    return False


async def _lasts(address: Address) -> bool:
    """Returns whether the other end of a new connection sends anything before it closes the connection. Raises
    `ConnectionRefusedError` if nobody listens.
    """
    try:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        try:
            return bool(await reader.read(1))
        finally:
            writer.close()
    except ConnectionRefusedError:
        raise
    except ConnectionError:  # it was reset
        return False


def _is_open(task: asyncio.Task[Connection]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
