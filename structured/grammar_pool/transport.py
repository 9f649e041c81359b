"""Two transports of messages to a grammar worker: a thread of this process, or a Ray actor on this machine.

Both run the same worker. An actor maps the engine's mask buffer, so a pool spreads over processes but never over
machines.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import tempfile
import threading
from typing import Any, Protocol

import msgspec

from manta.structured.frames import frame, read_frame
from manta.structured.grammar_pool.grammar_worker import GrammarWorker, Message
from manta.structured.masks import BufferShape, MaskBuffer
from manta.structured.vocabulary import Vocabulary

SEND_SECONDS = 1.0
"""Seconds after which a message that an actor does not take is dropped; the actor counts as hanging."""
_PID = struct.Struct("i")
"""Layout of an actor's first message, its process id."""


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


class GrammarActor:
    """The body of the Ray actor. Ray places, starts and ends it; messages come over a local socket.

    A call through Ray would take processor time that the engine's steps need: row e of `manta bench constraints` was
    0.90 with calls and is 0.98 with the socket.
    """

    def __init__(self, vocabulary: bytes, shape: bytes, index: int, address: str) -> None:
        buffer = MaskBuffer(msgspec.msgpack.decode(shape, type=BufferShape))
        self._worker = GrammarWorker(msgspec.msgpack.decode(vocabulary, type=Vocabulary), buffer, index)
        self._worker.warm_up()
        self._decoder = msgspec.msgpack.Decoder(Message)
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(address)
        self._connection.sendall(_PID.pack(os.getpid()))  # because not every system tells which process has connected
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        """Serves the connection. When the loop ends, the connection closes and the pool replaces the actor."""
        with contextlib.suppress(ConnectionError), self._connection, self._connection.makefile("rb") as stream:
            while (message := read_frame(stream)) is not None:
                self._worker.handle(self._decoder.decode(message))

    def started(self) -> None:
        """Returns once the constructor has succeeded, or raises its error."""


class ActorTransport:
    """A Ray actor with `num_cpus=0` on this node. Ray must be initialised."""

    stops_between_sessions = False

    def __init__(self, vocabulary: Vocabulary, buffer: MaskBuffer, index: int) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._ray = ray
        self.pid: int | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._connection: socket.socket | None = None
        self._unsent = b""
        """Frames that wait for the connection."""
        self._folder = tempfile.TemporaryDirectory(prefix="manta-")  # only this user may enter it
        address = f"{self._folder.name}/{index}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(1)
        self._listener.setblocking(False)
        node = ray.get_runtime_context().get_node_id()
        actor_class: Any = ray.remote(num_cpus=0, max_restarts=0)(GrammarActor)
        self._actor = actor_class.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
            msgspec.msgpack.encode(vocabulary), msgspec.msgpack.encode(buffer.shape), index, address
        )
        self._started: Any = self._actor.started.remote()

    def send(self, message: Message) -> None:
        """Waits up to `SEND_SECONDS` for an actor that does not read. The message is then lost, and `is_alive` or a
        spent budget tells the pool.
        """
        self._unsent += frame(self._encoder.encode(message))
        self._flush()

    def _flush(self) -> None:
        if self._unsent and self.is_ready():
            assert self._connection is not None
            unsent, self._unsent = self._unsent, b""
            self._connection.settimeout(SEND_SECONDS)
            with contextlib.suppress(OSError):  # the actor is dead or hangs
                self._connection.sendall(unsent)
            self._connection.setblocking(False)

    def is_ready(self) -> bool:
        if self._connection is None:
            with contextlib.suppress(BlockingIOError):
                self._connection, _ = self._listener.accept()
                self._connection.setblocking(False)
                self._listener.close()
                self._folder.cleanup()
                self._flush()
        self._read_pid()
        return self._connection is not None

    def _read_pid(self) -> None:
        """Reads the actor's first message when it has come. Unread, it would hide the connection's end from
        `is_alive`.
        """
        if self.pid is None and self._connection is not None:
            with contextlib.suppress(OSError, struct.error):  # it has not come, or the actor died first
                self.pid = _PID.unpack(self._connection.recv(_PID.size))[0]

    def is_alive(self) -> bool:
        """A closed connection tells that the process died; before there is one, Ray tells."""
        if self._connection is None and not self.is_ready():
            done, _ = self._ray.wait([self._started], timeout=0)
            if done:
                with contextlib.suppress(self._ray.exceptions.RayError):
                    self._ray.get(done[0])
                    return True
                return False
            return True
        assert self._connection is not None
        self._read_pid()
        try:
            return self._connection.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def kill(self) -> None:
        """Ends the actor. The connection stays open, because its end tells that the process is gone. If Ray has ended,
        so has the actor, and a call would start another Ray.
        """
        if self._ray.is_initialized():
            with contextlib.suppress(self._ray.exceptions.ActorHandleNotFoundError):
                self._ray.kill(self._actor)
