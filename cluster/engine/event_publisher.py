"""Sends KV events to subscribers over ZeroMQ, as vLLM does, from a thread of its own: no step waits for a subscriber.

A message has three frames: the topic, its number (8 bytes, big-endian, from 0 on), and a `KVEventBatch` in MessagePack.
The first batch says that the cache is empty. A subscriber that finds a gap in the numbers sends the first one that it
lacks to the replay address. It gets every kept message from there on, in the same frames, and then one without topic
and batch whose number is -1 (vLLM's pull request 45177).
"""

from __future__ import annotations

import collections
import errno
import queue
import socket
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

import msgspec

from manta.cluster.config import EngineConfig
from manta.cluster.engine.kv_blocks import KVBlocks
from manta.cluster.engine.kv_events import AllBlocksCleared, CacheLog, KVEvent, KVEventBatch
from manta.cluster.kv_event_options import KVEventOptions, ZmqAddress, read_address
from manta.cluster.model_list import name_of
from manta.structured.visible_logs import logger_of

logger = logger_of(__name__)

NUM_PORTS = 64
"""Ports that are tried, each one higher than the one before, so that several engines of a node can listen."""
MAX_WAITING = 10_000
"""Steps whose events may wait for the thread, about a minute of a fast engine's."""
MAX_UNREAD = 10_000
"""Messages that wait for one slow subscriber. It misses the next ones and finds a gap in their numbers."""
MAX_REQUEST_BYTES = 4096
"""Longest message that is read from a subscriber, whose requests have 8 bytes and whose topics are short."""
JOIN_S = 1.0
"""Longest time, in seconds, for which the first message waits for a subscriber. One that knew an earlier engine at this
address hears that its blocks are gone; ZeroMQ connects again after 0.1 s.
"""
REPLAY_POLL_S = 0.1
"""Longest time, in seconds, for which a request for earlier events waits."""
NUMBER_BYTES = 8
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
"""The number of the last message of a replay."""


class Backlog:
    """Events of steps that wait to be sent. Never blocks the thread that adds them.

    If `limit` steps wait, all their events are dropped, and the next ones begin with `AllBlocksCleared`: a subscriber
    then knows too few blocks, and none that are not there.
    """

    def __init__(self, limit: int = MAX_WAITING) -> None:
        self._limit = limit
        self._steps: queue.SimpleQueue[list[KVEvent] | None] = queue.SimpleQueue()

    def add(self, events: list[KVEvent]) -> None:
        if self._steps.qsize() >= self._limit:
            logger.warning("%d steps with KV events wait to be sent; they are dropped", self._limit)
            while not self._steps.empty():
                self._steps.get()
            events = [AllBlocksCleared(), *events]
        self._steps.put(events)

    @property
    def is_empty(self) -> bool:
        return self._steps.empty()

    def end(self) -> None:
        """Makes `take` return None once all events are taken."""
        self._steps.put(None)

    def take(self, timeout_s: float | None) -> list[KVEvent] | None:
        """Returns the events of the next step, after waiting for them; none after `timeout_s`. None stands for the
        end.
        """
        try:
            return self._steps.get(timeout=timeout_s)
        except queue.Empty:
            return []


class EventPublisher:
    """Publishes what a `CacheLog` notes. The engine's thread calls `flush`; everything else is up to a thread that ends
    with this object.

    The first message waits for a subscriber for up to `join_s`. Raises `ValueError` if pyzmq is not installed or the
    engine cannot listen.
    """

    def __init__(self, log: CacheLog, options: KVEventOptions, topic: str, join_s: float = JOIN_S) -> None:
        self._log = log
        self._backlog = Backlog()
        sender = _Sender(self._backlog, options, topic, join_s)
        self._thread = threading.Thread(target=sender.run, name="manta-kv-events", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._backlog.end)

    def flush(self) -> None:
        """Hands over the events that were noted since the last call."""
        events = self._log.take()
        if events:
            self._backlog.add(events)

    def close(self) -> None:
        """Sends what waits and gives the ports back."""
        self._end()
        self._thread.join()


class _Sender:
    """Owns the sockets, which one thread uses after they are open."""

    def __init__(self, backlog: Backlog, options: KVEventOptions, topic: str, join_s: float) -> None:
        try:
            import zmq
        except ImportError as error:
            raise ValueError(
                "engine.kv_events needs pyzmq, which is not installed: pip install 'manta-serve[kv-events]' on every "
                "node, or leave the option out"
            ) from error
        self._context = zmq.Context()
        self._backlog = backlog
        self._topic = topic.encode()
        self._join_s = join_s
        self._number = 0
        self._kept: collections.deque[tuple[bytes, bytes]] = collections.deque(maxlen=options.replay_batches)
        """Numbers and batches of the last messages."""
        try:
            self._events, self._replays, self._rank = self._open(zmq, options)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._wait_s = None if self._replays is None else REPLAY_POLL_S
        where = read_address("endpoint", options.endpoint)
        verb, address = ("listens", where.plus(self._rank)) if where.listens else ("connects", options.endpoint)
        logger.info("KV events: the engine %s at %s, with the topic %s and rank %d", verb, address, topic, self._rank)

    def _open(self, zmq: Any, options: KVEventOptions) -> tuple[Any, Any, int]:
        """Returns the socket of the events, that of replays or None, and the number that is added to their ports."""
        endpoint = read_address("endpoint", options.endpoint)
        events, replays = self._context.socket(zmq.XPUB), None  # a PUB that tells of subscribers
        events.sndhwm = MAX_UNREAD
        listening = [(events, endpoint)] if endpoint.listens else []
        if options.replay_endpoint is not None:
            replays = self._context.socket(zmq.ROUTER)
            replays.sndhwm = options.replay_batches + 1
            listening.append((replays, read_address("replay_endpoint", options.replay_endpoint)))
        for each in (events, replays):
            if each is not None:
                each.maxmsgsize, each.linger = MAX_REQUEST_BYTES, 0
                each.ipv6 = True  # and IPv4
        offset = _listen(listening, zmq.ZMQError)
        if not endpoint.listens:
            events.connect(endpoint.plus(0))
        return events, replays, offset

    def run(self) -> None:
        """Sends events until the end of the backlog."""
        encoder = msgspec.msgpack.Encoder()
        try:
            self._events.poll(int(self._join_s * 1000))
            while (events := self._backlog.take(self._wait_s)) is not None:
                while self._events.poll(0):  # a topic that somebody subscribes, or subscribes no more
                    self._events.recv_multipart()
                if events:
                    number = self._number.to_bytes(NUMBER_BYTES, "big")
                    batch = encoder.encode(KVEventBatch(time.time(), events, self._rank))
                    self._events.send_multipart((self._topic, number, batch))
                    self._number += 1
                    if self._replays is not None:
                        self._kept.append((number, batch))
                if self._backlog.is_empty:  # so that a replay has everything up to the request for it
                    self._replay()
        finally:
            self._context.destroy(linger=0)

    def _replay(self) -> None:
        """Answers the requests for earlier events that have arrived."""
        while self._replays is not None and self._replays.poll(0):
            client, *delimiter, first = self._replays.recv_multipart()
            if len(first) != NUMBER_BYTES:
                continue
            for number, batch in self._kept:
                if number >= first:
                    self._replays.send_multipart((client, *delimiter, self._topic, number, batch))
            self._replays.send_multipart((client, *delimiter, b"", END, b""))


def _listen(sockets: list[tuple[Any, ZmqAddress]], failure: Any) -> int:
    """Binds sockets to the first ports from those of their addresses on that are free for all of them. Returns how many
    were passed over. Raises `ValueError` if there are none. `failure` is ZeroMQ's error.
    """
    for offset in range(NUM_PORTS if sockets else 1):
        bound: list[tuple[Any, bytes]] = []
        try:
            for each, address in sockets:
                each.bind(address.plus(offset))
                bound.append((each, each.last_endpoint))
            return offset
        except failure as error:
            for each, there in bound:
                each.unbind(there)
            if error.errno != errno.EADDRINUSE:
                raise ValueError(f"kv_events: the engine cannot listen at {address.plus(offset)}: {error}") from error
    first = sockets[0][1]
    raise ValueError(
        f"kv_events: none of the {NUM_PORTS} ports from {first.port} on is free; give another one, or let the engines "
        "connect to a subscriber"
    )


def open_publisher(
    config: EngineConfig, engine_id: str, blocks: KVBlocks, adapter_names: Mapping[str, str]
) -> EventPublisher | None:
    """Returns the publisher of an engine's events, which hears of every change of `blocks`; None if they are off.
    Raises `ValueError` as `EventPublisher` does.
    """
    options = config.kv_events
    if options is None:
        return None
    log = CacheLog(blocks.groups, blocks.block_size, adapter_names)
    topic = options.topic_with(ip=own_address(), model=name_of(config.model), engine=engine_id)
    publisher = EventPublisher(log, options, topic)
    publisher.flush()
    blocks.tell(log)
    return publisher


def own_address() -> str:
    """Returns the address from which this machine sends to others, as Ray finds it; sends nothing."""
    for family, address in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, 9))
                return str(probe.getsockname()[0])
            except OSError:
                continue
    return "127.0.0.1"
