"""How messages reach a grammar worker: a thread of this process, or a Ray actor on this machine.

Both run the same worker over the same memory. A grammar actor maps the engine's mask buffer, so it lives beside the
engine: what is distributed is the processes, and with the engine replicas the machines.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from typing import Any, Protocol

import msgspec

from structured.grammar_worker import GrammarWorker, Message
from structured.masks import BufferShape, MaskBuffer
from structured.vocabulary import Vocabulary


class Transport(Protocol):
    """One worker, as the pool sees it."""

    pid: int | None
    """Of the worker's process, once it is known; None for a thread."""

    def send(self, message: Message) -> None:
        """Returns at once."""

    def is_ready(self) -> bool:
        """Whether the worker has started."""

    def is_alive(self) -> bool:
        """Whether it may still answer; costs a little, so it is asked only when something is late."""

    def kill(self) -> None:
        """Ends it, or, for a thread that is inside a backend, makes sure that it writes nothing more."""


class ThreadTransport:
    """A daemon thread. A backend that hangs cannot be interrupted: its thread is abandoned and another one started."""

    pid: int | None = None

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
    """The body of the Ray actor."""

    def __init__(self, vocabulary: bytes, shape: bytes, index: int) -> None:
        buffer = MaskBuffer(msgspec.msgpack.decode(shape, type=BufferShape))
        self._worker = GrammarWorker(msgspec.msgpack.decode(vocabulary, type=Vocabulary), buffer, index)
        self._worker.warm_up()
        self._decoder = msgspec.msgpack.Decoder(Message)

    def started(self) -> int:
        """The process id."""
        return os.getpid()

    def handle(self, message: bytes) -> None:
        self._worker.handle(self._decoder.decode(message))


class ActorTransport:
    """A Ray actor of no CPUs on this node. `ray.init` (or a Serve replica around this) comes first."""

    def __init__(self, vocabulary: Vocabulary, buffer: MaskBuffer, index: int) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._ray = ray
        node = ray.get_runtime_context().get_node_id()
        actor_class: Any = ray.remote(num_cpus=0, max_restarts=0)(GrammarActor)
        self._actor = actor_class.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
            msgspec.msgpack.encode(vocabulary), msgspec.msgpack.encode(buffer.shape), index
        )
        self._started: Any = self._actor.started.remote()
        self._last = self._started
        self._encoder = msgspec.msgpack.Encoder()
        self.pid: int | None = None

    def send(self, message: Message) -> None:
        self._last = self._actor.handle.remote(self._encoder.encode(message))

    def is_ready(self) -> bool:
        if self.pid is None and self._ray.wait([self._started], timeout=0)[0]:
            try:
                self.pid = self._ray.get(self._started)
            except self._ray.exceptions.RayError:
                return False
        return self.pid is not None

    def is_alive(self) -> bool:
        """Messages run in order, so the last one tells of all: it fails as soon as the actor is dead."""
        done, _ = self._ray.wait([self._last], timeout=0)
        if not done:
            return True
        try:
            self._ray.get(done[0])
        except self._ray.exceptions.RayError:
            return False
        return True

    def kill(self) -> None:
        """Nothing to do where this actor's Ray has ended: the actor has too, and asking would start another Ray."""
        if self._ray.is_initialized():
            with contextlib.suppress(self._ray.exceptions.ActorHandleNotFoundError):
                self._ray.kill(self._actor)
