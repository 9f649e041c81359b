"""The pool's view of its workers: their messages, their sessions, and the slots that they may still write."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from manta.structured.grammar_pool.grammar_worker import Job, Message
from manta.structured.grammar_pool.pool_session import PoolSession
from manta.structured.grammar_pool.transport import Transport
from manta.structured.masks import MaskBuffer

logger = logging.getLogger(__name__)


class RetiredSlot(NamedTuple):
    """A slot that a session has left and its worker may still write."""

    number: int
    """The worker's acknowledgement of this message frees the slot; with -1, the worker's death does."""
    slot: int
    session_id: int


class PoolWorker:
    """One worker, the messages to it, and its sessions."""

    def __init__(self, transport: Transport, index: int) -> None:
        self.transport = transport
        self.index = index
        self.started_at = time.monotonic()
        self.sessions: dict[int, PoolSession] = {}
        self.num_sent = 0
        self.under_way: deque[tuple[int, float]] = deque()
        """Number and time of sending of each unacknowledged message."""
        self.jobs: list[Job] = []
        self.ended: list[int] = []
        """`jobs` and `ended` form the worker's next message."""
        self.busy_with = -1
        """Session that the worker was busy with at the pool's last look; -1 for none."""
        self.busy_since = self.started_at
        """Time at which the pool first saw the worker busy with that session (monotonic clock, seconds)."""
        self.retired: list[RetiredSlot] = []

    def seconds_under_way(self, now: float, acknowledged: int) -> float:
        """Seconds since the oldest unacknowledged message was sent; 0 if there is none."""
        while self.under_way and self.under_way[0][0] <= acknowledged:
            self.under_way.popleft()
        return now - self.under_way[0][1] if self.under_way else 0.0

    def send(self) -> None:
        """Sends the next message, unless it is empty."""
        if self.jobs or self.ended:
            self.num_sent += 1
            self.under_way.append((self.num_sent, time.monotonic()))
            self.transport.send(Message(self.num_sent, self.jobs, self.ended))
            self.jobs, self.ended = [], []

    def retire(self, session: PoolSession, number: int) -> None:
        """Notes that a session leaves its slots, which message `number` or the worker's death frees."""
        slots = (session.slot, *session.draft_slots)
        self.retired += [RetiredSlot(number, slot, session.session_id) for slot in slots]


class Workers:
    """The workers of a pool: starts them, replaces them, and knows which replaced ones may still write."""

    def __init__(
        self, num_wanted: int, max_workers: int, make: Callable[[int], Transport], buffer: MaskBuffer, has_spare: bool
    ) -> None:
        self.num_wanted = num_wanted
        self.max_workers = max_workers
        """Most workers, counting abandoned ones that may still run."""
        self.num_replaced = 0
        self.active: list[PoolWorker] = []
        self.given_up: list[PoolWorker] = []
        """Replaced workers that may still run, and so may still write to their slots."""
        self._make = make
        self._buffer = buffer
        self._free_indices = list(range(max_workers - 1, -1, -1))
        self._spare = self._start() if has_spare else None
        self.fill_up()

    def fill_up(self) -> None:
        """Starts missing workers, also after hanging ones kept the pool short."""
        while len(self.active) < self.num_wanted and self.add() is not None:
            pass

    def add(self) -> PoolWorker | None:
        """Adds a worker; None if there are too many."""
        worker = self._next()
        if worker is not None:
            self.active.append(worker)
        return worker

    def _next(self) -> PoolWorker | None:
        """The spare worker or a new one; None if there are too many."""
        if self._spare is None:
            return self._start()
        worker, self._spare = self._spare, self._start()
        return worker

    def _start(self) -> PoolWorker | None:
        if not self._free_indices:
            return None
        index = self._free_indices.pop()
        self._buffer.current[index] = self._buffer.acknowledged[index] = 0
        return PoolWorker(self._make(index), index)

    def busy_with(self, worker: PoolWorker) -> int:
        """The session that a worker is busy with, also after its death; -1 for none."""
        return int(self._buffer.current[worker.index]) - 1

    def seconds_under_way(self, worker: PoolWorker, now: float) -> float:
        """Seconds since the worker's oldest unacknowledged message was sent; 0 if there is none."""
        return worker.seconds_under_way(now, int(self._buffer.acknowledged[worker.index]))

    def send(self) -> None:
        for worker in self.active:
            worker.send()

    def replace(self, worker: PoolWorker) -> list[PoolSession]:
        """Gives a worker up and puts another in its place, if there is one. Returns its sessions."""
        logger.warning("grammar worker %d is replaced; %d sessions move", worker.index, len(worker.sessions))
        worker.transport.kill()
        self.num_replaced += 1
        position, replacement = self.active.index(worker), self._next()
        if replacement is None:
            del self.active[position]
        else:
            self.active[position] = replacement
        self.given_up.append(worker)
        sessions, worker.sessions = list(worker.sessions.values()), {}
        return sessions

    def take_free_slots(self) -> list[int]:
        """Slots that no worker writes any more, each returned once. Forgets workers that have died."""
        freed: list[int] = []
        for worker in self.active:
            if worker.retired:
                acknowledged = int(self._buffer.acknowledged[worker.index])
                freed += [retired.slot for retired in worker.retired if retired.number <= acknowledged]
                worker.retired = [retired for retired in worker.retired if retired.number > acknowledged]
        for worker in [worker for worker in self.given_up if not worker.transport.is_alive()]:
            self.given_up.remove(worker)
            freed += [retired.slot for retired in worker.retired]
            self._free_indices.insert(0, worker.index)
        self.fill_up()
        return freed

    def close(self) -> None:
        """Ends every worker."""
        for worker in [*self.active, *([self._spare] if self._spare else [])]:
            worker.transport.kill()
        self.active, self._spare = [], None
        self._free_indices = []  # so that no worker is started in their place
