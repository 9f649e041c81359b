"""The engine's pool of grammar workers: `prepare` starts masks and returns at once, `wait` says which are there.

State is a function of the tokens, so a session has no home that could be lost: a worker that dies, hangs or falls
behind loses its sessions to others, which rebuild them from their tokens. Only the session that a worker hangs on pays,
when its budget is spent. Rows behind drafts travel in the same messages, and nothing depends on them: one that is not
there in time is not used. Called by one thread, the engine's; the workers run in threads or Ray actors
(`structured/transport.py`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from structured.config import PoolConfig
from structured.grammar_worker import Job, Message, SessionStart
from structured.masks import FAILED, FINISHED, BufferShape, MaskBuffer, row_words
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
        self.busy_with = -1
        """Session that it was seen to work for, -1 for none."""
        self.busy_since = self.started_at
        """When that was first seen."""
        self.retired: list[tuple[int, int, int]] = []
        """(message number, slot, session that had it): the slot is free once that message is acknowledged."""


class _Session:
    """One sequence's constraint: where it lives and what it waits for."""

    def __init__(self, session_id: int, start: SessionStart) -> None:
        self.session_id = session_id
        self.start = start
        self.tokens: list[int] = []
        """Output tokens behind which the wanted row stands."""
        self.is_wanted = False
        self.drafts: list[int] = []
        """Tokens behind them that the sequence may come to have; each has a row too."""
        self.worker: _Worker | None = None
        self.slot = -1
        self.number = 0
        """Of the job that fills the wanted row."""
        self.draft_slots: list[int] = []
        """As many as it has needed at a time since it came to its worker."""
        self.drafts_number = 0
        """Of the job that fills the rows of the drafts."""
        self.takes_drafts = True
        """False once a worker has died over a draft."""
        self.num_held = 0
        """Leading tokens that the worker has been sent."""
        self.asked_at = 0.0
        self.moved_at = 0.0
        self.num_moves = 0
        """Since the row was asked for: each move makes the next one less eager, or two workers play ping-pong."""
        self.attempts = 0
        self.error: str | None = None


class GrammarPool:
    """Not thread-safe. `num_sessions` bounds the sessions that are open at a time, `num_drafts` the drafts of each that
    have rows; `num_forced` forced tokens, at most `structured.masks.MAX_FORCED`, are looked for behind a row.
    """

    def __init__(
        self,
        config: PoolConfig,
        vocabulary: Vocabulary,
        num_sessions: int,
        actors: bool,
        num_drafts: int = 0,
        num_forced: int = 0,
    ) -> None:
        self.config = config
        # A moved session leaves its slot behind until its old worker has let go of it, a thread that hangs keeps one.
        self.num_session_slots = 2 * num_sessions + MAX_WORKERS
        num_slots = self.num_session_slots + num_sessions * num_drafts
        shape = BufferShape(num_slots, row_words(vocabulary.vocab_size), MAX_WORKERS)
        self.buffer = MaskBuffer(shape, shared=actors)
        self.uses_actors = actors
        self.num_replaced = 0
        self._vocabulary = vocabulary
        self._num_forced = num_forced
        self._num_jobs = 0
        self._free_slots = list(range(self.num_session_slots - 1, -1, -1))
        self._free_draft_slots = list(range(num_slots - 1, self.num_session_slots - 1, -1))
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
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def num_session_slots_in_use(self) -> int:
        """Slots of sessions, not of drafts, that are not known to be free."""
        return self.num_session_slots - len(self._free_slots)

    @property
    def num_given_up(self) -> int:
        """Replaced workers that are not known to be dead."""
        return len(self._given_up)

    @property
    def num_lost_slots(self) -> int:
        """Slots that are neither free nor anybody's: 0, or they have leaked."""
        num_known = len(self._free_slots) + len(self._free_draft_slots)
        num_known += sum(len(worker.retired) for worker in [*self.workers, *self._given_up])
        held = [session for session in self._sessions.values() if session.worker is not None]
        return self.buffer.shape.num_slots - num_known - sum(1 + len(session.draft_slots) for session in held)

    @property
    def num_slots_in_use(self) -> int:
        """Slots of open sessions and those that a worker has not let go of; 0 in the end, or one has leaked."""
        self._collect_slots()
        return self.buffer.shape.num_slots - len(self._free_slots) - len(self._free_draft_slots)

    def start(self, session_id: int, start: SessionStart) -> None:
        """Opens a session; it reaches a worker with its first `prepare`."""
        self._sessions[session_id] = _Session(session_id, start)

    def end(self, session_id: int) -> None:
        """Forgets a session; unknown ones are no error."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._waiting.pop(session_id, None)
            self._leave(session)
            self._collect_slots()

    # ---- a step --------------------------------------------------------------------------------------------------

    def prepare(
        self, wanted: Iterable[tuple[int, Sequence[int]]], drafts: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        """Asks for the row behind each session's output tokens, and for those behind each of its `drafts`; one message
        a worker; returns at once.
        """
        now = time.monotonic()
        for session_id, tokens in wanted:
            session = self._sessions[session_id]
            common = _num_common(session.tokens, tokens)
            proposed = list(drafts.get(session_id, ())) if drafts and session.takes_drafts else []
            if session.is_wanted and common == len(session.tokens) == len(tokens):
                # asked before: a late row, or one that is there already
                if proposed != session.drafts:
                    session.drafts = proposed
                    self._ask(session, is_new=False)
                continue
            session.tokens[common:] = tokens[common:]
            session.drafts = proposed
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
        return session.worker is not None and self.buffer.done[session.slot] == session.number

    def is_complete(self, session_id: int) -> bool:
        """Whether the rows of its drafts need not be waited for either."""
        session = self._sessions[session_id]
        if not self._is_ready(session):
            return False
        slots = session.draft_slots[: len(session.drafts)]  # filled in this order
        if session.error is not None or not slots or self.buffer.flags[session.slot]:
            return True
        return self.buffer.done[slots[-1]] == session.drafts_number

    def wait(
        self,
        session_ids: Iterable[int],
        seconds: float,
        enough: Callable[[int], bool],
        is_there: Callable[[int], bool] | None = None,
    ) -> list[int]:
        """Waits until `enough(number still missing)` or the time is over; returns the sessions still missing: those
        that are not `is_there`, by default `is_ready`.
        """
        is_there = is_there or self.is_ready
        deadline = time.monotonic() + seconds
        missing = [session_id for session_id in session_ids if not is_there(session_id)]
        while missing and not enough(len(missing)) and time.monotonic() < deadline:
            time.sleep(WAIT_SLICE_S)
            self.supervise()
            missing = [session_id for session_id in missing if not is_there(session_id)]
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

    def draft_rows(self, session_id: int) -> tuple[list[int], bool]:
        """Rows of `buffer` behind the first, the second, ... draft, as far as they are there and no draft is refused;
        and whether behind one draft more nothing may follow but the end. Asked when the wanted row is ready.
        """
        session, buffer = self._sessions[session_id], self.buffer
        rows: list[int] = []
        for slot in session.draft_slots[: len(session.drafts)]:
            if buffer.done[slot] != session.drafts_number:
                break
            if buffer.flags[slot]:
                return rows, bool(buffer.flags[slot] & FINISHED)
            rows.append(slot)
        return rows, False

    def forced(self, session_id: int, tokens: Sequence[int]) -> list[int]:
        """Tokens that the grammar forces behind output `tokens`, as far as workers have found out since the last
        `prepare`: `tokens` are those that it was given, and what the sequence has gained since. Never waits.
        """
        session = self._sessions[session_id]
        known = len(session.tokens)
        gained = list(tokens[known:])
        if list(tokens[:known]) != session.tokens or not self._is_ready(session) or session.error is not None:
            return []
        for num_drafts in (len(gained), len(gained) - 1, 0):  # where workers look: behind the tokens and all drafts
            if 0 <= num_drafts <= len(session.drafts) and session.drafts[:num_drafts] == gained[:num_drafts]:
                rest = gained[num_drafts:]
                for index, way in enumerate(self._forced_behind(session, num_drafts)):
                    is_forced = index == 0 or rest  # the others begin with a choice
                    if is_forced and way[: len(rest)] == rest and len(way) > len(rest):
                        return way[len(rest) :]
        return []

    def _forced_behind(self, session: _Session, num_drafts: int) -> list[list[int]]:
        slot, number = session.slot, session.number
        if num_drafts:
            if num_drafts > len(session.draft_slots):
                return []
            slot, number = session.draft_slots[num_drafts - 1], session.drafts_number
        return self.buffer.forced(slot) if self.buffer.looked[slot] == number else []

    # ---- asking --------------------------------------------------------------------------------------------------

    def _ask(self, session: _Session, target: _Worker | None = None, is_new: bool = True) -> None:
        """Puts a job into the next message of the session's worker, or of one that it is given to; `is_new` is False
        where only its drafts are others than before.
        """
        if session.error is not None:
            return
        start = None
        if session.worker is None:
            is_new = True
            if not self._enter(session, target or min(self.workers, key=self._load)):
                self._waiting[session.session_id] = session
                return  # no slot is free yet: `supervise` asks again
            start = session.start
        worker, first = session.worker, session.num_held
        assert worker is not None
        while len(session.draft_slots) < len(session.drafts) and self._free_draft_slots:
            session.draft_slots.append(self._free_draft_slots.pop())
        self._num_jobs += 1
        number = session.drafts_number = self._num_jobs
        self.buffer.drafts_wanted[session.slot] = number
        if is_new:
            session.number = number
            self._waiting[session.session_id] = session
        elif not session.drafts:
            return
        worker.jobs.append(
            Job(
                session.session_id,
                number,
                session.slot,
                first,
                session.tokens[first:],
                session.drafts,
                session.draft_slots[: len(session.drafts)],
                is_new,
                self._num_forced if session.takes_drafts else 0,
                start,
            )
        )
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
            elif not worker.transport.is_ready():  # budgets are for masks, not for the start of a process
                worker.under_way = deque((number, now) for number, _ in worker.under_way)
                for session in worker.sessions.values():
                    session.moved_at = now
                if now - worker.started_at > START_SECONDS:
                    self._replace(worker)
            else:
                self._relieve(worker, now)
        self._flush()

    def _relieve(self, worker: _Worker, now: float) -> None:
        """The session that a worker is busy with stays until its budget is spent; those behind it move."""
        busy_with = int(self.buffer.current[worker.index]) - 1
        if busy_with != worker.busy_with:
            worker.busy_with, worker.busy_since = busy_with, now
        session = self._waiting.get(busy_with)
        if session is not None and session.worker is worker:
            seconds = now - max(session.asked_at, worker.busy_since)
        else:  # idle beside a message, or busy for a draft or a session that has left
            session = None
            seconds = min(now - worker.busy_since, self._longest_under_way(worker, now))
        if seconds > self.config.mask_seconds:
            if session is not None:
                session.error = f"its mask was not there after {self.config.mask_seconds:g} s; simplify the constraint"
                del self._waiting[session.session_id]
            self._replace(worker)
            return
        waiting = (session for session in worker.sessions.values() if session.session_id in self._waiting)
        behind = [session for session in waiting if session.session_id != busy_with]
        target = self._target(worker) if behind else None
        if target is not None:
            for session in behind:
                session.moved_at = now
                session.num_moves += 1
                self._leave(session)
                self._ask(session, target)

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
        # Asked again: the row that a worker wrote before it died over a draft is there.
        missing = {session.session_id for session in sessions if not self._is_ready(session)}
        busy_with = int(self.buffer.current[worker.index]) - 1
        suspects = missing & {busy_with} if busy_with >= 0 else missing
        for session in sessions:
            self._retire(session, worker, -1)
            session.worker, session.slot, session.num_held, session.draft_slots = None, -1, 0, []
        if worker.transport.stops_between_sessions:
            self._free(slot for _, slot, session_id in worker.retired if session_id != busy_with)
            worker.retired = [item for item in worker.retired if item[2] == busy_with]
        for session in sessions:
            session.drafts = []
            session.takes_drafts &= session.session_id != busy_with or session.session_id in missing
            if session.error is not None or not session.is_wanted:
                continue
            session.attempts += session.session_id in suspects
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
        self.buffer.cancelled[session.slot] = 0
        return True

    def _leave(self, session: _Session) -> None:
        """Takes a session from its worker; its slots are free when the worker has seen everything sent so far."""
        worker, session.worker = session.worker, None
        if worker is None:
            return
        self.buffer.cancelled[session.slot] = 1
        self.buffer.drafts_wanted[session.slot] = 0
        worker.sessions.pop(session.session_id, None)
        worker.jobs = [job for job in worker.jobs if job.session_id != session.session_id]
        worker.ended.append(session.session_id)
        self._retire(session, worker, worker.num_sent)
        session.slot, session.draft_slots = -1, []

    def _retire(self, session: _Session, worker: _Worker, number: int) -> None:
        worker.retired += [(number, slot, session.session_id) for slot in (session.slot, *session.draft_slots)]

    def _collect_slots(self) -> None:
        for worker in self.workers:
            if worker.retired:
                acknowledged = int(self.buffer.acknowledged[worker.index])
                self._free(slot for number, slot, _ in worker.retired if number <= acknowledged)
                worker.retired = [item for item in worker.retired if item[0] > acknowledged]
        for worker in [worker for worker in self._given_up if not worker.transport.is_alive()]:
            self._given_up.remove(worker)
            self._free(slot for _, slot, _ in worker.retired)
            self._free_indices.insert(0, worker.index)

    def _free(self, slots: Iterable[int]) -> None:
        for slot in slots:
            (self._free_slots if slot < self.num_session_slots else self._free_draft_slots).append(slot)

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
