"""The engine's pool of grammar workers: `prepare` starts masks and returns at once, `wait` says which are there.

State is a function of the tokens, so a session has no home that could be lost: a worker that dies, hangs or falls
behind loses its sessions to others, which rebuild them from their tokens. Only the session that a worker hangs on pays,
when its budget is spent. Called by one thread, the engine's; the workers run in threads or Ray actors
(`structured/transport.py`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from structured.config import PoolConfig
from structured.grammar_worker import Job, Message, SessionStart
from structured.masks import FAILED, BufferShape, MaskBuffer, row_words
from structured.transport import ActorTransport, ThreadTransport, Transport
from structured.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""Workers that may die while a session waits for them before it is held to be the cause."""

MAX_WORKERS = 64
"""Alive or not known to be dead."""

START_SECONDS = 60.0
"""Within which a worker process must have started."""

WAIT_SLICE_S = 0.0001


class _Worker:
    """One worker: what it was sent and which sessions it holds."""

    def __init__(self, transport: Transport, index: int) -> None:
        self.transport = transport
        self.index = index
        self.started_at = time.monotonic()
        self.sessions: dict[int, _Session] = {}
        self.num_sent = 0
        self.under_way: deque[tuple[int, float]] = deque()
        """Messages not known to be done: number, and when they were sent."""
        self.ended: list[int] = []
        self.jobs: list[Job] = []
        self.retired: list[tuple[int, int]] = []
        """(message number, slot): the slot is free once that message is acknowledged."""


class _Session:
    """One sequence's constraint: where it lives and what it waits for."""

    def __init__(self, session_id: int, start: SessionStart) -> None:
        self.session_id = session_id
        self.start = start
        self.tokens: list[int] = []
        """Output tokens behind which the wanted row stands."""
        self.is_wanted = False
        self.worker: _Worker | None = None
        self.slot = -1
        self.num_held = 0
        """Leading tokens that the worker has been sent."""
        self.asked_at = 0.0
        self.moved_at = 0.0
        self.num_moves = 0
        """Since the row was asked for: each move makes the next one less eager, or two workers play ping-pong."""
        self.attempts = 0
        self.error: str | None = None


class GrammarPool:
    """Not thread-safe. `num_sessions` bounds the sessions that are open at a time."""

    def __init__(self, config: PoolConfig, vocabulary: Vocabulary, num_sessions: int, actors: bool) -> None:
        self.config = config
        # A moved session leaves its slot behind until its old worker has let go of it.
        shape = BufferShape(2 * num_sessions + 16, row_words(vocabulary.vocab_size), MAX_WORKERS)
        self.buffer = MaskBuffer(shape, shared=actors)
        self.uses_actors = actors
        self.num_replaced = 0
        self._vocabulary = vocabulary
        self._free_slots = list(range(shape.num_slots - 1, -1, -1))
        self._free_indices = list(range(MAX_WORKERS - 1, -1, -1))
        self._sessions: dict[int, _Session] = {}
        self._waiting: dict[int, _Session] = {}
        """Sessions whose wanted row is not known to be there."""
        self._given_up: list[_Worker] = []
        """Workers not known to be dead: their slots may still be written."""
        self.workers = [self._start_worker() for _ in range(config.num_workers)]
        self._spare = self._start_worker() if actors else None

    # ---- sessions ------------------------------------------------------------------------------------------------

    def __contains__(self, session_id: int) -> bool:
        return session_id in self._sessions

    @property
    def session_ids(self) -> list[int]:
        return list(self._sessions)

    @property
    def num_slots_in_use(self) -> int:
        """Slots of open sessions and those that a worker has not let go of; 0 in the end, or one has leaked."""
        self._collect_slots()
        return self.buffer.shape.num_slots - len(self._free_slots)

    def start(self, session_id: int, start: SessionStart) -> None:
        """Opens a session; it reaches a worker with its first `prepare`."""
        self._sessions[session_id] = _Session(session_id, start)

    def end(self, session_id: int) -> None:
        """Forgets a session; unknown ones are no error."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._waiting.pop(session_id, None)
            self._leave(session)

    # ---- a step --------------------------------------------------------------------------------------------------

    def prepare(self, wanted: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Asks for the row behind each session's output tokens, one message a worker; returns at once."""
        now = time.monotonic()
        for session_id, tokens in wanted:
            session = self._sessions[session_id]
            common = _num_common(session.tokens, tokens)
            if session.is_wanted and common == len(session.tokens) == len(tokens):
                continue  # asked before: a late row, or one that is there already
            session.tokens[common:] = tokens[common:]
            session.num_held = min(session.num_held, common)
            session.is_wanted = True
            session.asked_at = session.moved_at = now
            session.attempts = session.num_moves = 0
            self._ask(session)
        self._flush()

    def is_ready(self, session_id: int) -> bool:
        """Whether the wanted row is there, or will never be (`error`)."""
        return self._is_ready(self._sessions[session_id])

    def _is_ready(self, session: _Session) -> bool:
        if session.error is not None:
            return True
        return session.worker is not None and self.buffer.done[session.slot] == len(session.tokens) + 1

    def wait(self, session_ids: Iterable[int], seconds: float, enough: Callable[[int], bool]) -> list[int]:
        """Waits until `enough(number still missing)` or the time is over; returns the sessions still missing."""
        deadline = time.monotonic() + seconds
        missing = [session_id for session_id in session_ids if not self.is_ready(session_id)]
        while missing and not enough(len(missing)) and time.monotonic() < deadline:
            time.sleep(WAIT_SLICE_S)
            self.supervise()
            missing = [session_id for session_id in missing if not self.is_ready(session_id)]
        return missing

    def slot(self, session_id: int) -> int:
        """Row of `buffer` that holds the wanted row."""
        return self._sessions[session_id].slot

    def error(self, session_id: int) -> str | None:
        """Why the session failed; None while it has not. Asked when the row is ready."""
        session = self._sessions[session_id]
        if session.error is None and self.buffer.flags[session.slot] & FAILED:
            session.error = self.buffer.error(session.slot)
        return session.error

    # ---- asking --------------------------------------------------------------------------------------------------

    def _ask(self, session: _Session) -> None:
        self._waiting[session.session_id] = session
        start = None
        if session.worker is None:
            if not self._enter(session, min(self.workers, key=self._load)):
                return  # no slot is free yet: `supervise` asks again
            start = session.start
        worker, first = session.worker, session.num_held
        assert worker is not None
        self.buffer.done[session.slot] = 0
        worker.jobs.append(Job(session.session_id, session.slot, first, session.tokens[first:], start))
        session.num_held = len(session.tokens)

    def _load(self, worker: _Worker) -> tuple[bool, bool, int]:
        """Workers that are starting or behind come last, the others by number of sessions."""
        return not worker.transport.is_ready(), self._is_behind(worker), len(worker.sessions)

    def _is_behind(self, worker: _Worker) -> bool:
        """Whether a row or a message, be it for a session that has left, waits for longer than it should."""
        now, patience = time.monotonic(), self.config.migrate_seconds
        if self._longest_under_way(worker, now) > patience:
            return True
        waiting = (session for session in worker.sessions.values() if session.session_id in self._waiting)
        return any(now - session.moved_at > patience * 2**session.num_moves for session in waiting)

    def _longest_under_way(self, worker: _Worker, now: float) -> float:
        """Seconds since the oldest message was sent that the worker has not done."""
        acknowledged = self.buffer.acknowledged[worker.index]
        while worker.under_way and worker.under_way[0][0] <= acknowledged:
            worker.under_way.popleft()
        return now - worker.under_way[0][1] if worker.under_way else 0.0

    def _flush(self) -> None:
        for worker in self.workers:
            if worker.jobs or worker.ended:
                worker.num_sent += 1
                worker.under_way.append((worker.num_sent, time.monotonic()))
                worker.transport.send(Message(worker.num_sent, worker.jobs, worker.ended))
                worker.jobs, worker.ended = [], []

    # ---- supervision ---------------------------------------------------------------------------------------------

    def supervise(self) -> None:
        """Moves rows that wait behind a slow one, fails those whose budget is spent and replaces dead workers."""
        for session_id in [key for key, session in self._waiting.items() if self._is_ready(session)]:
            del self._waiting[session_id]
        if not self._waiting and not any(worker.under_way for worker in self.workers):
            return
        self._collect_slots()
        now = time.monotonic()
        for session in [session for session in self._waiting.values() if session.worker is None]:
            self._ask(session)
        for worker in [worker for worker in self.workers if self._is_behind(worker)]:
            if not worker.transport.is_alive():
                self._replace(worker)
            elif not worker.transport.is_ready():
                for session in worker.sessions.values():
                    session.asked_at = now  # the budget is for the mask, not for the start of a process
                worker.under_way = deque((number, now) for number, _ in worker.under_way)
                if now - worker.started_at > START_SECONDS:
                    self._replace(worker)
            else:
                self._relieve(worker, now)
        self._flush()

    def _relieve(self, worker: _Worker, now: float) -> None:
        """The session that a worker is busy with stays until its budget is spent; those behind it move."""
        busy_with = int(self.buffer.current[worker.index]) - 1
        waiting = [session for session in worker.sessions.values() if session.session_id in self._waiting]
        spent = [session for session in waiting if now - session.asked_at > self.config.mask_seconds]
        for session in spent:
            session.error = f"its mask was not there after {self.config.mask_seconds:g} s; simplify the constraint"
            del self._waiting[session.session_id]
        hangs = self._longest_under_way(worker, now) > self.config.mask_seconds and busy_with not in worker.sessions
        if hangs or (spent and (busy_with < 0 or any(session.session_id == busy_with for session in spent))):
            self._replace(worker)
            return
        behind = [session for session in waiting if session.error is None and session.session_id != busy_with]
        target = self._target(worker) if behind else None
        if target is not None:
            for session in behind:
                session.moved_at = now
                session.num_moves += 1
                self._leave(session)
                if self._enter(session, target):
                    self._ask_from_start(session)

    def _ask_from_start(self, session: _Session) -> None:
        worker = session.worker
        assert worker is not None
        worker.jobs.append(Job(session.session_id, session.slot, 0, list(session.tokens), session.start))
        session.num_held = len(session.tokens)

    def _target(self, source: _Worker) -> _Worker | None:
        """A worker that keeps up; one more is started where there is none, up to twice their number."""
        others = [worker for worker in self.workers if worker is not source]
        best = min(others, key=self._load, default=None)
        if best is not None and self._load(best)[:2] == (False, False):
            return best
        if len(self.workers) < 2 * self.config.num_workers and self._free_indices:
            self.workers.append(self._next_worker())
            return self.workers[-1]
        return None

    def _replace(self, worker: _Worker) -> None:
        """Gives a worker up; its sessions are replayed elsewhere, and one over which worker after worker dies fails."""
        logger.warning("grammar worker %d is replaced; %d sessions move", worker.index, len(worker.sessions))
        worker.transport.kill()
        self.num_replaced += 1
        self.workers[self.workers.index(worker)] = self._next_worker()
        self._given_up.append(worker)
        sessions, worker.sessions = list(worker.sessions.values()), {}
        for session in sessions:
            worker.retired.append((-1, session.slot))
            session.worker, session.slot, session.num_held = None, -1, 0
            if session.error is not None or not session.is_wanted:
                continue
            session.attempts += session.session_id in self._waiting
            session.moved_at = time.monotonic()
            if session.attempts < MAX_ATTEMPTS:
                self._ask(session)
            else:
                session.error = f"{session.attempts} grammar workers died over its mask"
                self._waiting.pop(session.session_id, None)

    # ---- workers and slots ---------------------------------------------------------------------------------------

    def _next_worker(self) -> _Worker:
        if self._spare is None:
            return self._start_worker()
        worker, self._spare = self._spare, self._start_worker()
        return worker

    def _start_worker(self) -> _Worker:
        if not self._free_indices:
            raise RuntimeError(f"{MAX_WORKERS} grammar workers hang at the same time")
        index = self._free_indices.pop()
        self.buffer.current[index] = self.buffer.acknowledged[index] = 0
        make: type[ActorTransport] | type[ThreadTransport] = ActorTransport if self.uses_actors else ThreadTransport
        return _Worker(make(self._vocabulary, self.buffer, index), index)

    def _enter(self, session: _Session, worker: _Worker) -> bool:
        """Gives a session a place on a worker; False where no slot is free."""
        if not self._free_slots:
            return False
        session.slot = self._free_slots.pop()
        session.worker, session.num_held = worker, 0
        worker.sessions[session.session_id] = session
        self.buffer.done[session.slot] = 0
        self.buffer.cancelled[session.slot] = 0
        return True

    def _leave(self, session: _Session) -> None:
        """Takes a session from its worker; the slot is free when the worker has seen everything sent so far."""
        worker, session.worker = session.worker, None
        if worker is None:
            return
        self.buffer.cancelled[session.slot] = 1
        worker.sessions.pop(session.session_id, None)
        worker.jobs = [job for job in worker.jobs if job.session_id != session.session_id]
        worker.ended.append(session.session_id)
        worker.retired.append((worker.num_sent, session.slot))
        session.slot = -1

    def _collect_slots(self) -> None:
        for worker in self.workers:
            if worker.retired:
                acknowledged = int(self.buffer.acknowledged[worker.index])
                self._free_slots += [slot for number, slot in worker.retired if number <= acknowledged]
                worker.retired = [item for item in worker.retired if item[0] > acknowledged]
        for worker in [worker for worker in self._given_up if not worker.transport.is_alive()]:
            self._given_up.remove(worker)
            self._free_slots += [slot for _, slot in worker.retired]
            self._free_indices.insert(0, worker.index)

    def close(self) -> None:
        """Ends every worker."""
        for worker in [*self.workers, *([self._spare] if self._spare else [])]:
            worker.transport.kill()
        self.workers, self._spare = [], None
        self.buffer.close()


def _num_common(old: list[int], new: Sequence[int]) -> int:
    """Length of the common prefix."""
    if list(new[: len(old)]) == old:  # output normally grows by its end
        return len(old)
    return next((index for index, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), len(new))
