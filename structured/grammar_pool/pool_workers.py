"""The pool's workers and their sessions: messages, rows that have come, and slots that may still be written."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from manta.structured.grammar_pool.grammar_worker import Job, Message
from manta.structured.grammar_pool.output_view import num_common
from manta.structured.grammar_pool.tracked_session import SessionStart
from manta.structured.grammar_pool.transport import Transport
from manta.structured.masks import EVERY_SESSION, FAILED, FINISHED, MaskBuffer, forced_after
from manta.structured.visible_logs import logger_of

logger = logger_of(__name__)


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


class PoolSession:
    """One sequence's constraint, its worker and the rows that it waits for."""

    def __init__(self, session_id: int, start: SessionStart, buffer: MaskBuffer) -> None:
        self._buffer = buffer
        self.session_id = session_id
        self.start = start
        self.tokens: list[int] = []
        """Output tokens, after which the wanted row applies."""
        self.is_wanted = False
        self.drafts: list[int] = []
        """Proposed tokens after `tokens`. The token after each of them has a row too."""
        self.worker: PoolWorker | None = None
        self.slot = -1
        """Index of the wanted row in the buffer's `rows`."""
        self.number = 0
        """Job that fills the wanted row."""
        self.draft_slots: list[int] = []
        """Slots of the drafts' rows, as many as it needed at a time on its present worker."""
        self.drafts_number = 0
        """Job that fills the drafts' rows."""
        self.takes_drafts = True
        """False once a worker has died over a draft of this session."""
        self.num_held = 0
        """Number of leading output tokens that the worker was sent."""
        self.asked_at = 0.0
        """Time of the request for the row (monotonic clock, seconds)."""
        self.moved_at = 0.0
        """Time of the request or of the last move to another worker (monotonic clock, seconds)."""
        self.num_moves = 0
        """Moves since the request. Each one doubles the wait before the next, so that two slow workers do not pass a
        session back and forth.
        """
        self.attempts = 0
        """Number of workers that have died over the wanted row."""
        self.failure: str | None = None
        """Why the session failed, as far as the pool knows; `error` looks into the buffer too."""

    def is_ready(self) -> bool:
        """Whether the wanted row is there, or the session has failed."""
        if self.failure is not None:
            return True
        return self.worker is not None and bool(self._buffer.done[self.slot] == self.number)

    def is_complete(self) -> bool:
        """Whether the wanted row is ready, and all drafts' rows that will come."""
        if not self.is_ready():
            return False
        slots = self.draft_slots[: len(self.drafts)]  # workers fill them in this order
        if self.failure is not None or not slots or self._buffer.flags[self.slot]:
            return True
        return bool(self._buffer.done[slots[-1]] == self.drafts_number)

    def error(self) -> str | None:
        """Why the session failed, or None. Call it once the row is ready."""
        if self.failure is None and self._buffer.flags[self.slot] & FAILED:
            self.failure = self._buffer.error(self.slot)
        return self.failure

    def draft_rows(self) -> tuple[list[int], bool]:
        """Indices in `buffer.rows` of the masks after the first draft, the second and so on, as far as they are there
        and the grammar allows the draft. The bool is True if only the end may follow the last of these drafts. Call it
        once the wanted row is ready.
        """
        buffer = self._buffer
        rows: list[int] = []
        for slot in self.draft_slots[: len(self.drafts)]:
            if buffer.done[slot] != self.drafts_number:
                break
            if buffer.flags[slot]:
                return rows, bool(buffer.flags[slot] & FINISHED)
            rows.append(slot)
        return rows, False

    def forced(self, tokens: Sequence[int]) -> list[int]:
        """Tokens that the grammar forces after output `tokens`, as far as a worker has found them. `tokens` continues
        the output of the last `prepare`. Never waits.
        """
        known = len(self.tokens)
        gained = list(tokens[known:])
        if num_common(self.tokens, tokens) < known or not self.is_ready() or self.failure is not None:
            return []
        for num_drafts in (len(gained), len(gained) - 1, 0):  # looked for after the output, and after all drafts
            if 0 <= num_drafts <= len(self.drafts) and self.drafts[:num_drafts] == gained[:num_drafts]:
                forced = forced_after(gained[num_drafts:], self._continuations(num_drafts))
                if forced:
                    return forced
        return []

    def _continuations(self, num_drafts: int) -> list[list[int]]:
        """The continuations (`MaskBuffer.forced`) after the output tokens and `num_drafts` drafts, if they were
        found.
        """
        slot, number = self.slot, self.number
        if num_drafts:
            if num_drafts > len(self.draft_slots):
                return []
            slot, number = self.draft_slots[num_drafts - 1], self.drafts_number
        return self._buffer.forced(slot) if self._buffer.forced_done[slot] == number else []


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
        """The session that a worker is busy with, also after its death; -1 for none or several."""
        return max(int(self._buffer.current[worker.index]), 0) - 1

    def may_write(self, worker: PoolWorker, session_id: int) -> bool:
        """Whether a worker that stops between sessions may still write a slot of this one after it was stopped."""
        return int(self._buffer.current[worker.index]) in (EVERY_SESSION, session_id + 1)

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
