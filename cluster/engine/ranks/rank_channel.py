"""Frames over TCP between an engine and its ranks: the engine listens, and each rank connects and shows a secret.

The thread that steps drives the engine's end with a selector, so no other thread wakes for a step. The end of a
connection means that its rank has died. In a step of the tiny model, frames add 0.1 ms, a compiled graph of Ray 0.3 ms
and calls of Ray actors 0.9 ms (`benchmarks/results/2026-11-22.md`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import selectors
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterable

import msgspec

from manta.cluster.engine.ranks.rank_messages import Answer, Failed, Message
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
from manta.structured.frames import frame
from manta.structured.visible_logs import logger_of

logger = logger_of(__name__)

CONNECT_S = 30.0
"""Seconds in which all ranks must connect."""
FAILED_PATIENCE_S = 1.0
"""Seconds that the other ranks have to answer after one has failed: a healthy rank answers in this time, and a rank
that waits for the failed one never does.
"""
_CHUNK_BYTES = 1 << 18
_LENGTH = struct.Struct("<I")

_encoder = msgspec.msgpack.Encoder()
_answers = msgspec.msgpack.Decoder(Answer)


class RankLost(RuntimeError):
    """A rank died or hangs; the group must be restarted."""


class RankHello(Hello, array_like=True):
    """The hello of a rank."""

    rank: int
    pid: int
    version: str = ""
    """Version of Manta; empty from a version that does not tell it."""
    step_format: str = ""
    """Format of the messages that the rank understands (`step_format`)."""


@functools.cache
def step_format() -> str:
    """Returns the hash of all messages between an engine and its ranks; see `format_of`."""
    return format_of(Message, Answer)


class AcceptLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of what connects to an engine."""

    connect_s: float = CONNECT_S
    """Seconds in which all ranks must connect."""
    hello_s: float = 2.0
    """Seconds in which a new connection must show the secret."""
    max_unproven: int = 64
    """The most open connections that have not shown the secret; above it the oldest is closed."""


USUAL_LIMITS = AcceptLimits()


class Listener:
    """Accepts the connections of ranks that have just started. `host` is this node's address."""

    def __init__(self, host: str, limits: AcceptLimits = USUAL_LIMITS) -> None:
        self.limits = limits
        self._socket, self.address = listen(host)

    def accept(self, num_ranks: int) -> list[tuple[RankHello, socket.socket]]:
        """Returns a connection to each rank, in order.

        Raises `RankLost` if a rank does not connect within `connect_s`, or is of a version with other messages. Other
        connections cannot delay that: all are read concurrently, each has `hello_s` to send its whole hello, and at
        most `max_unproven` wait at a time.
        """
        found: dict[int, tuple[RankHello, socket.socket]] = {}
        deadline = time.monotonic() + self.limits.connect_s
        self._socket.setblocking(False)
        with selectors.DefaultSelector() as selector, contextlib.closing(self._socket):
            selector.register(self._socket, selectors.EVENT_READ)
            unproven: list[_Unproven] = []
            while len(found) < num_ranks:
                now = time.monotonic()
                if now >= deadline:
                    _close(connection for _, connection in found.values())
                    _close(each.socket for each in unproven)
                    missing = sorted(set(range(num_ranks)) - set(found))
                    seconds = f"{self.limits.connect_s:g} s"
                    raise RankLost(f"ranks {missing} did not connect to the engine within {seconds}")
                for key, _ in selector.select(min([deadline, *(each.deadline for each in unproven)]) - now):
                    if key.fileobj is self._socket:
                        self._admit(unproven, selector)
                        continue
                    each = key.data
                    if each in unproven and each.receive():
                        unproven.remove(each)
                        selector.unregister(each.socket)
                        hello = each.hello(self.address.secret)
                        if hello is None or not 0 <= hello.rank < num_ranks:
                            _turn_away(each)
                        elif hello.step_format != step_format():
                            _close([each.socket, *(connection for _, connection in found.values())])
                            _close(other.socket for other in unproven)
                            who = f"rank {hello.rank}, process {hello.pid}, is no rank of this engine"
                            raise RankLost(f"{who}: {versions_beside(hello.version)}")
                        else:
                            found[hello.rank] = hello, each.socket
                now = time.monotonic()
                for each in [each for each in unproven if each.deadline <= now]:
                    unproven.remove(each)
                    selector.unregister(each.socket)
                    _turn_away(each)
            _close(each.socket for each in unproven)
        return [found[rank] for rank in range(num_ranks)]

    def _admit(self, unproven: list[_Unproven], selector: selectors.BaseSelector) -> None:
        """Accepts one connection, and closes the oldest unproven one if there are too many."""
        with contextlib.suppress(OSError):  # the peer has already disconnected
            connection, _ = self._socket.accept()
            connection.setblocking(False)
            unproven.append(_Unproven(connection, self.limits.hello_s))
            selector.register(connection, selectors.EVENT_READ, unproven[-1])
        if len(unproven) > self.limits.max_unproven:
            oldest = unproven.pop(0)
            selector.unregister(oldest.socket)
            _turn_away(oldest)


class _Unproven:
    """A connection that has not shown the secret."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self.socket = connection
        self.deadline = time.monotonic() + seconds
        self._received = bytearray()

    def receive(self) -> bool:
        """Reads what has arrived. Returns True if the hello is complete or can never be."""
        try:
            # Read no further than the hello: the bytes after it belong to the owner of the connection.
            chunk = self.socket.recv(self._num_missing())
        except BlockingIOError:
            return False
        except OSError:
            return True
        self._received += chunk
        return not chunk or self._num_missing() <= 0 or len(self._received) > MAX_HELLO_BYTES

    def hello(self, secret: str) -> RankHello | None:
        """Returns the hello if it shows `secret`, else None."""
        try:
            return proven(self._received[_LENGTH.size :], RankHello, secret)
        except ValueError:
            return None

    def _num_missing(self) -> int:
        """Returns the number of missing bytes of the hello, as far as its length is known."""
        if len(self._received) < _LENGTH.size:
            return _LENGTH.size - len(self._received)
        (length,) = _LENGTH.unpack_from(self._received)
        return int(min(length, MAX_HELLO_BYTES)) + _LENGTH.size - len(self._received)


def _turn_away(stranger: _Unproven) -> None:
    logger.warning("a connection that is no rank's was closed")
    stranger.socket.close()


def connect(address: Address, rank: int) -> socket.socket:
    """Connects a rank to the engine and sends its hello. Returns a blocking socket."""
    connection = socket.create_connection((address.host, address.port), CONNECT_S)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    hello = RankHello(address.secret, rank, os.getpid(), own_version(), step_format())
    connection.sendall(frame(_encoder.encode(hello)))
    return connection


class RankChannel:
    """The engine's end of all connections; not thread-safe.

    If a rank owes several answers, the last one counts. After a `RankLost`, only `close` may be called.
    """

    def __init__(self, connections: list[tuple[RankHello, socket.socket]]) -> None:
        self._connections = [_Connection(hello, connection) for hello, connection in connections]
        self._selector = selectors.DefaultSelector()
        for connection in self._connections:
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        self._owed: Counter[int] = Counter()
        """Number of answers that each rank still owes."""
        self._patience_ends = math.inf
        """Time at which the wait for the other ranks ends after one has failed; infinite before."""
        self._answers: dict[int, Answer] = {}
        self._lost: RankLost | None = None

    @property
    def all(self) -> range:
        return range(len(self._connections))

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, each on the rank's own node."""
        return [connection.pid for connection in self._connections]

    @property
    def followers(self) -> range:
        """All ranks except rank 0."""
        return range(1, len(self._connections))

    def send(self, message: Message, ranks: Iterable[int], owing: Iterable[int]) -> None:
        """Sends a message, encoded once, to `ranks`; the ranks in `owing` will answer it.

        Raises `RankLost` if a rank is dead. Raises what msgspec raises if the message cannot be encoded; then nothing
        is sent.
        """
        data = frame(_encoder.encode(message))
        self._owed.update(owing)
        for rank in ranks:
            connection = self._connections[rank]
            connection.unsent += data
            self._flush(connection)

    def ask(self, message: Message, *ranks: int) -> None:
        """Sends a message to `ranks`, which all answer it. Raises as `send` does."""
        self.send(message, ranks, ranks)

    def collect(self, seconds: float) -> list[Answer]:
        """Waits for the answers of all ranks that owe one, and returns them in the order of ranks.

        Raises `RankLost` if a connection ends or a rank does not answer within `seconds`. After another rank's failure,
        that time shrinks to `FAILED_PATIENCE_S`.
        """
        deadline = time.monotonic() + seconds
        while self._owed:
            if self._lost is not None:
                raise self._lost
            left = min(deadline, self._patience_ends) - time.monotonic()
            if left <= 0:
                raise self._lose(f"ranks {sorted(self._owed)} did not answer within {seconds:.1f} s{self._failures()}")
            self._take(left)
        answers, self._answers, self._patience_ends = self._answers, {}, math.inf
        return [answers[rank] for rank in sorted(answers)]

    def owes(self, rank: int) -> bool:
        """Returns without waiting whether an answer of this rank may still come. Raises `RankLost` if a rank
        is dead.
        """
        self._take(0.0)
        return rank in self._owed and time.monotonic() < self._patience_ends

    def close(self) -> None:
        self._selector.close()
        _close(connection.socket for connection in self._connections)

    def _flush(self, connection: _Connection) -> None:
        try:
            connection.flush()
        except OSError as error:
            raise self._lose(f"rank {connection.rank}, process {connection.pid}, has died") from error
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        if events != connection.events:
            connection.events = events
            self._selector.modify(connection.socket, events, connection)

    def _take(self, seconds: float) -> None:
        """Waits up to `seconds` until a connection can be read or written, and takes the complete answers."""
        for key, _ in self._selector.select(seconds):
            connection: _Connection = key.data
            if connection.unsent:
                self._flush(connection)
            try:
                frames = connection.receive()
            except OSError as error:
                raise self._lose(f"rank {connection.rank}, process {connection.pid}, has died") from error
            for data in frames:
                self._note(connection.rank, _answers.decode(data))

    def _note(self, rank: int, answer: Answer) -> None:
        self._answers[rank] = answer
        self._owed -= Counter((rank,))  # subtraction drops ranks that owe nothing
        if isinstance(answer, Failed):
            self._patience_ends = min(self._patience_ends, time.monotonic() + FAILED_PATIENCE_S)

    def _failures(self) -> str:
        """Returns the failures of ranks as the end of an error message."""
        failed = [(rank, answer) for rank, answer in self._answers.items() if isinstance(answer, Failed)]
        return "".join(f", after rank {rank} had failed with {answer.reason}" for rank, answer in failed)

    def _lose(self, reason: str) -> RankLost:
        self._lost = self._lost or RankLost(reason)
        return self._lost


class _Connection:
    """A non-blocking connection to one rank."""

    def __init__(self, hello: RankHello, connection: socket.socket) -> None:
        self.rank = hello.rank
        self.pid = hello.pid
        self.socket = connection
        self.events = selectors.EVENT_READ
        self.unsent = b""
        self._received = bytearray()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def flush(self) -> None:
        try:
            while self.unsent:
                self.unsent = self.unsent[self.socket.send(self.unsent) :]
        except BlockingIOError:
            pass

    def receive(self) -> list[bytes]:
        """Returns the frames that are complete. Raises `OSError` if the connection has ended."""
        try:
            chunk = self.socket.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return []
        if not chunk:
            raise ConnectionResetError("the connection ended")
        self._received += chunk
        frames = []
        while (data := self._next_frame()) is not None:
            frames.append(data)
        return frames

    def _next_frame(self) -> bytes | None:
        received = self._received
        if len(received) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(received)[0]
        if len(received) < end:
            return None
        data = bytes(received[_LENGTH.size : end])
        del received[:end]
        return data


def _close(sockets: Iterable[socket.socket]) -> None:
    for each in sockets:
        each.close()
