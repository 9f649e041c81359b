"""Transports of messages to a grammar worker: a thread of this process, a process, or a Ray actor on this machine.

All run the same worker. A process maps the engine's mask buffer, so a pool spreads over processes but never over
machines.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from typing import Any, BinaryIO, Protocol

import msgspec

from manta.structured.frames import frame, read_frame
from manta.structured.grammar_pool.grammar_worker import GrammarWorker, Message
from manta.structured.masks import BufferShape, MaskBuffer
from manta.structured.vocabulary import Vocabulary

SEND_SECONDS = 1.0
"""Seconds after which a message that an actor does not take is dropped; the actor counts as hanging."""
_PID = struct.Struct("i")
"""Layout of the first message of an actor or a process, its process id."""


class Transport(Protocol):
    """One worker, from the pool's side."""

    pid: int | None
    """Process id of the worker, once known; None for a thread. Tests and benchmarks kill it."""
    stops_between_sessions: bool
    """Whether a killed worker writes only for the session that it is busy with (`MaskBuffer.current`). If False, it may
    write for any of its sessions until it is dead.
    """

    def send(self, message: Message) -> None:
        """Returns at once."""

    def is_ready(self) -> bool:
        """Whether the worker has started."""

    def is_alive(self) -> bool:
        """Whether the worker may still answer. The call costs time, so the pool makes it only if something is late."""

    def kill(self) -> None:
        """Ends the worker. A thread inside a backend cannot be ended, but it publishes nothing more."""


class ThreadTransport:
    """A daemon thread. If its backend hangs, the pool abandons the thread and starts another."""

    pid: int | None = None
    stops_between_sessions = True

    def __init__(self, vocabulary: Vocabulary, buffer: MaskBuffer, index: int) -> None:
        self._worker = GrammarWorker(vocabulary, buffer, index)
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"grammar-{index}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._worker.warm_up()
        while (message := self._inbox.get()) is not None and not self._worker.stopped:
            self._worker.handle(message)

    def send(self, message: Message) -> None:
        self._inbox.put(message)

    def is_ready(self) -> bool:
        return True

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def kill(self) -> None:
        self._worker.stopped = True
        self._inbox.put(None)


class WorkerSetup(msgspec.Struct, frozen=True, array_like=True):
    """The arguments of a `GrammarWorker` in another process."""

    vocabulary: Vocabulary
    shape: BufferShape
    index: int


def serve_worker(setup: WorkerSetup, connection: socket.socket, stream: BinaryIO) -> None:
    """Makes a worker, says that it has started, and handles the messages of the connection's `stream` until it ends."""
    worker = GrammarWorker(setup.vocabulary, MaskBuffer(setup.shape), setup.index)
    worker.warm_up()
    decoder = msgspec.msgpack.Decoder(Message)
    with contextlib.suppress(ConnectionError), connection, stream:
        connection.sendall(_PID.pack(os.getpid()))  # because not every system tells which process has connected
        while (message := read_frame(stream)) is not None:
            worker.handle(decoder.decode(message))


class GrammarActor:
    """The body of the Ray actor. Ray places, starts and ends it; messages come over a local socket.

    A call through Ray would take processor time that the engine's steps need: row e of `manta bench constraints` was
    0.90 with calls and is 0.98 with the socket.
    """

    def __init__(self, setup: bytes, address: str) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address)
        arguments = msgspec.msgpack.decode(setup, type=WorkerSetup), connection, connection.makefile("rb")
        # When it ends, the connection closes and the pool replaces the actor
        threading.Thread(target=serve_worker, args=arguments, daemon=True).start()

    def started(self) -> None:
        """Returns once the constructor has succeeded, or raises its error."""


class SocketTransport:
    """A worker in another process, which answers on a socket once it has started."""

    stops_between_sessions = False

    def __init__(self) -> None:
        self.pid: int | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._connection: socket.socket | None = None
        self._unsent = b""
        """Frames that wait for the worker's start."""

    def send(self, message: Message) -> None:
        """Waits up to `SEND_SECONDS` for a worker that does not read. The message is then lost, and `is_alive` or a
        spent budget tells the pool.
        """
        self._unsent += frame(self._encoder.encode(message))
        self._flush()

    def _flush(self) -> None:
        if self._unsent and self.is_ready():
            assert self._connection is not None
            unsent, self._unsent = self._unsent, b""
            self._connection.settimeout(SEND_SECONDS)
            with contextlib.suppress(OSError):  # the worker is dead or hangs
                self._connection.sendall(unsent)
            self._connection.setblocking(False)

    def is_ready(self) -> bool:
        if self.pid is None:
            self._look_for_start()
        return self.pid is not None

    def _look_for_start(self) -> None:
        """Connects if the worker has connected, and reads its first message if that has come. Unread, the message would
        hide the connection's end from `is_alive`.
        """
        if self._connection is None:
            self._connection = self._accept()
        if self._connection is not None:
            self._connection.setblocking(False)
            with contextlib.suppress(OSError, struct.error):  # it has not come, or the worker died first
                self.pid = _PID.unpack(self._connection.recv(_PID.size))[0]
                self._flush()

    def _accept(self) -> socket.socket | None:
        """Returns the connection with the worker if there is one."""
        raise NotImplementedError

    def _is_connecting(self) -> bool:
        """Whether a worker without a connection may still connect."""
        raise NotImplementedError

    def is_alive(self) -> bool:
        """A closed connection tells that the process died."""
        self.is_ready()
        if self._connection is None:
            return self._is_connecting()
        try:
            return self._connection.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def kill(self) -> None:
        raise NotImplementedError


def _send_setup(connection: socket.socket, setup: bytes) -> None:
    with contextlib.suppress(OSError), connection:
        connection.sendall(frame(setup))


class ProcessTransport(SocketTransport):
    """A process that this one starts, for engines whose own interpreter is busy while the device computes."""

    def __init__(self, vocabulary: Vocabulary, buffer: MaskBuffer, index: int) -> None:
        super().__init__()
        self._connection, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [sys.executable, "-m", "manta.structured.grammar_pool.worker_process"]
        with theirs:
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), env=environment)
        # The vocabulary has megabytes, which the socket takes once the process has started
        setup = msgspec.msgpack.encode(WorkerSetup(vocabulary, buffer.shape, index))
        threading.Thread(target=_send_setup, args=(self._connection.dup(), setup), daemon=True).start()

    def kill(self) -> None:
        """Ends the process. The connection stays open, because its end tells that the process is gone."""
        self._process.kill()
        self._process.wait()


class ActorTransport(SocketTransport):
    """A Ray actor with `num_cpus=0` on this node. Ray must be initialised."""

    def __init__(self, vocabulary: Vocabulary, buffer: MaskBuffer, index: int) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        super().__init__()
        self._ray = ray
        self._folder = tempfile.TemporaryDirectory(prefix="manta-")  # only this user may enter it
        address = f"{self._folder.name}/{index}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(1)
        self._listener.setblocking(False)
        node = ray.get_runtime_context().get_node_id()
        actor_class: Any = ray.remote(num_cpus=0, max_restarts=0)(GrammarActor)
        self._actor = actor_class.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
            msgspec.msgpack.encode(WorkerSetup(vocabulary, buffer.shape, index)), address
        )
        self._started: Any = self._actor.started.remote()

    def _accept(self) -> socket.socket | None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return None
        self._listener.close()
        self._folder.cleanup()
        return connection

    def _is_connecting(self) -> bool:
        """Before there is a connection, Ray tells whether the actor lives."""
        done, _ = self._ray.wait([self._started], timeout=0)
        if not done:
            return True
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.get(done[0])
            return True
        return False

    def kill(self) -> None:
        """Ends the actor. The connection stays open, because its end tells that the process is gone. If Ray has ended,
        so has the actor, and a call would start another Ray.
        """
        if self._ray.is_initialized():
            with contextlib.suppress(self._ray.exceptions.ActorHandleNotFoundError):
                self._ray.kill(self._actor)
