"""The engine's pool of grammar workers: `prepare` requests masks and returns at once, `wait` says which are missing.

A session is a function of its tokens. If a worker dies, hangs or is late, other workers rebuild its sessions from their
tokens. A session fails only if its own row takes longer than its budget. The pool also requests the rows after drafts;
nothing waits for them.

Only the engine's thread calls the pool. Workers run as threads, processes or Ray actors
(`structured/grammar_pool/transport.py`). In `structured/`, a worker is a grammar worker and a slot is a mask slot.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from manta.structured.grammar_pool.grammar_worker import Job
from manta.structured.grammar_pool.output_view import num_common
from manta.structured.grammar_pool.pool_workers import PoolSession, PoolWorker, Workers
from manta.structured.grammar_pool.tracked_session import SessionStart
from manta.structured.grammar_pool.transport import ActorTransport, ProcessTransport, ThreadTransport, Transport
from manta.structured.masks import BufferShape, MaskBuffer, MaskSlots, row_words
from manta.structured.pool_config import PoolConfig, PoolForm
from manta.structured.vocabulary import Vocabulary

MAX_ATTEMPTS = 3
"""Number of workers that may die over a session's row before the session counts as the cause and fails."""

MAX_WORKERS = 64
"""Maximum number of workers, counting abandoned ones that may still run."""

START_SECONDS = 60.0
"""Seconds after which a worker process that has not started is replaced."""

WAIT_SLICE_S = 0.0001
"""Seconds that `wait` sleeps between two looks at the rows."""

SUPERVISE_S = 0.001
"""Seconds between two looks of `wait` at the workers. Such a look takes as long as a slice, and threads that fill rows
need the interpreter's lock meanwhile.
"""

_TRANSPORTS: dict[PoolForm, Callable[[Vocabulary, MaskBuffer, int], Transport]] = {
    "threads": ThreadTransport,
    "processes": ProcessTransport,
    "actors": ActorTransport,
}


class GrammarPool:
    """Not thread-safe. The bounds:

    - `num_sessions`: sessions that are open at a time.
    - `num_drafts`: drafts of one session that have rows.
    - `num_forced`: forced tokens to look for after a row, at most `manta.structured.masks.MAX_FORCED`.
    - `max_workers`: workers, counting abandoned ones that may still run.
    """

    def __init__(
        self,
        config: PoolConfig,
        vocabulary: Vocabulary,
        num_sessions: int,
        form: PoolForm,
        num_drafts: int = 0,
        num_forced: int = 0,
        max_workers: int = MAX_WORKERS,
    ) -> None:
        self.config = config
        # A moved session's slot stays in use until its old worker acknowledges the move. A thread that hangs never
        # does.
        self.num_session_slots = 2 * num_sessions + max_workers
        self._slots = MaskSlots(self.num_session_slots, num_sessions * num_drafts)
        shape = BufferShape(self._slots.num_slots, row_words(vocabulary.vocab_size), max_workers)
        self.form = form
        is_shared = form != "threads"
        self.buffer = MaskBuffer(shape, shared=is_shared)
        self._vocabulary = vocabulary
        self._num_forced = num_forced
        self._num_jobs = 0
        self._sessions: dict[int, PoolSession] = {}
        self._waiting: dict[int, PoolSession] = {}
        """Sessions whose wanted row was not ready at the pool's last look."""
        self.num_workers = config.num_workers_of(form)
        self.workers = Workers(self.num_workers, max_workers, self._transport, self.buffer, has_spare=is_shared)

    def _transport(self, index: int) -> Transport:
        return _TRANSPORTS[self.form](self._vocabulary, self.buffer, index)

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
        """Number of slots for wanted rows that are in use or may still be written."""
        return self._slots.num_sessions_in_use

    @property
    def num_lost_slots(self) -> int:
        """Number of slots in use that belong to no session and no worker: above 0 is a leak."""
        num_retired = sum(len(worker.retired) for worker in [*self.workers.active, *self.workers.given_up])
        held = [session for session in self._sessions.values() if session.worker is not None]
        return self._slots.num_in_use - num_retired - sum(1 + len(session.draft_slots) for session in held)

    @property
    def num_slots_in_use(self) -> int:
        """Number of slots that a session has or a worker may still write. It is 0 some time after all sessions have
        ended.
        """
        self._free_slots()
        return self._slots.num_in_use

    def session(self, session_id: int) -> PoolSession:
        """Raises `KeyError` if the session is not open."""
        return self._sessions[session_id]

    def start(self, session_id: int, start: SessionStart) -> None:
        """Opens a session. The first `prepare` sends it to a worker."""
        self._sessions[session_id] = PoolSession(session_id, start, self.buffer)

    def end(self, session_id: int) -> None:
        """Closes a session, if it exists."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._waiting.pop(session_id, None)
            self._leave(session)
            self._free_slots()

    # ---- a step --------------------------------------------------------------------------------------------------

    def prepare(
        self, wanted: Iterable[tuple[int, Sequence[int]]], drafts: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        now = time.monotonic()
        for session_id, tokens in wanted:
            session = self._sessions[session_id]
            common = num_common(session.tokens, tokens)
            proposed = list(drafts.get(session_id, ())) if drafts and session.takes_drafts else []
            if session.is_wanted and common == len(session.tokens) == len(tokens):
                # requested before: the row is late, or ready already
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
        self.workers.send()

    def is_ready(self, session_id: int) -> bool:
        """Whether the wanted row is there, or the session has failed (`error`)."""
        return self._sessions[session_id].is_ready()

    def wait(
        self,
        session_ids: Iterable[int],
        seconds: float,
        enough: Callable[[int], bool],
        for_drafts: bool = False,
    ) -> list[int]:
        """Waits until `enough(number of missing sessions)` is true or `seconds` have passed. Returns the missing
        sessions.

        A session is missing while its wanted row is, or with `for_drafts` any of its drafts' rows that will come. A
        row that was there may be missing again after its worker's death.
        """

        now = supervised = time.monotonic()
        deadline = now + seconds
        waited_for = list(session_ids)
        missing = self._missing(waited_for, for_drafts)
        while missing and not enough(len(missing)) and now < deadline:
            time.sleep(WAIT_SLICE_S)
            now = time.monotonic()
            if now - supervised > SUPERVISE_S:
                self.supervise()
                supervised = now
            missing = self._missing(waited_for, for_drafts)
        return missing

    def _missing(self, session_ids: list[int], for_drafts: bool) -> list[int]:
        """Returns the sessions whose wanted rows, or with `for_drafts` also their drafts' rows, are not there.

        All rows are looked up at once, because the engine does this every `WAIT_SLICE_S` seconds while grammar workers
        wait for the interpreter's lock.
        """
        sessions = [self._sessions[session_id] for session_id in session_ids]
        is_done = self.buffer.done[[session.slot for session in sessions]] == [session.number for session in sessions]
        return [
            session.session_id
            for session, is_filled in zip(sessions, is_done.tolist(), strict=True)
            if not ((is_filled and session.slot >= 0) or session.failure is not None)
            or (for_drafts and session.drafts and not session.is_complete())
        ]

    def plain_rows(self, session_ids: Iterable[int]) -> list[int | None]:
        """Returns the slot of each session whose row is there and is a mask without adjustments, and None for the
        others: those that are missing, finished or failed.
        """
        buffer, sessions = self.buffer, [self._sessions[session_id] for session_id in session_ids]
        slots = np.array([session.slot for session in sessions], dtype=np.int64)
        is_there = buffer.done[slots] == [session.number for session in sessions]
        is_plain = is_there & (slots >= 0) & (buffer.flags[slots] == 0) & (buffer.num_adjustments[slots] == 0)
        return [
            session.slot if plain and session.failure is None else None
            for session, plain in zip(sessions, is_plain.tolist(), strict=True)
        ]

    # ---- asking --------------------------------------------------------------------------------------------------

    def _ask(self, session: PoolSession, target: PoolWorker | None = None, is_new: bool = True) -> None:
        """Adds a job to the next message of the session's worker. A session without a worker goes to `target`, or to
        the one with the least load. `is_new` is False if only the drafts have changed.
        """
        if session.failure is not None:
            return
        start = None
        if session.worker is None:
            if not self._find_worker(session, target):
                return
            is_new, start = True, session.start
        worker, first = session.worker, session.num_held
        assert worker is not None
        session.draft_slots += self._slots.take_for_drafts(len(session.drafts) - len(session.draft_slots))
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

    def has_started(self) -> bool:
        """Returns whether a worker has started, so that masks are filled. Sessions that come earlier wait for that."""
        return any(worker.transport.is_ready() for worker in self.workers.active)

    def _load(self, worker: PoolWorker) -> tuple[bool, bool, int]:
        """Sort key: started workers first, late ones after the others, then by number of sessions."""
        return not worker.transport.is_ready(), self._is_late(worker), len(worker.sessions)

    def _is_late(self, worker: PoolWorker) -> bool:
        """Whether a row or a message is overdue, even if its session has left."""
        now, patience = time.monotonic(), self.config.migrate_seconds
        if self.workers.seconds_under_way(worker, now) > patience:
            return True
        return any(
            now - session.moved_at > patience * 2**session.num_moves for session in self._sessions_waiting_for(worker)
        )

    def _sessions_waiting_for(self, worker: PoolWorker) -> Iterator[PoolSession]:
        return (session for session in worker.sessions.values() if session.session_id in self._waiting)

    # ---- supervision ---------------------------------------------------------------------------------------------

    def supervise(self) -> None:
        """Moves sessions off late workers, fails sessions whose budget is spent, and replaces dead workers."""
        for session_id in [key for key, session in self._waiting.items() if session.is_ready()]:
            del self._waiting[session_id]
        if not self._waiting and not any(worker.under_way for worker in self.workers.active):
            return
        self._free_slots()
        now = time.monotonic()
        for session in [session for session in self._waiting.values() if session.worker is None]:
            self._ask(session)
        for worker in [worker for worker in self.workers.active if self._is_late(worker)]:
            if not worker.transport.is_alive():
                self._replace(worker)
            elif not worker.transport.is_ready():  # a budget is for a mask, not for a process's start
                worker.under_way = deque((number, now) for number, _ in worker.under_way)
                for session in worker.sessions.values():
                    session.moved_at = now
                if now - worker.started_at > START_SECONDS:
                    self._replace(worker)
            else:
                self._relieve(worker, now)
        self.workers.send()

    def _relieve(self, worker: PoolWorker, now: float) -> None:
        """Moves the sessions that wait for a late worker, except the one that it is busy with. When that one's budget
        is spent, it fails and the worker is replaced.
        """
        busy_with = self.workers.busy_with(worker)
        if busy_with != worker.busy_with:
            worker.busy_with, worker.busy_since = busy_with, now
        session = self._waiting.get(busy_with)
        if session is not None and session.worker is worker:
            seconds = now - max(session.asked_at, worker.busy_since)
        else:  # idle although it has a message, or busy with a draft or a departed session
            session = None
            seconds = min(now - worker.busy_since, self.workers.seconds_under_way(worker, now))
        if seconds > self.config.mask_seconds:
            if session is not None:
                session.failure = (
                    f"its mask was not there after {self.config.mask_seconds:g} s; simplify the constraint"
                )
                del self._waiting[session.session_id]
            self._replace(worker)
        else:
            waiting = self._sessions_waiting_for(worker)
            self._move([session for session in waiting if session.session_id != busy_with], worker, now)

    def _move(self, sessions: list[PoolSession], source: PoolWorker, now: float) -> None:
        """Gives sessions of a late worker to another one, if there is one."""
        target = self._other_worker(source) if sessions else None
        if target is not None:
            for session in sessions:
                session.moved_at = now
                session.num_moves += 1
                self._leave(session)
                self._ask(session, target)

    def _other_worker(self, source: PoolWorker) -> PoolWorker | None:
        """Another worker that has started and is not late, or None. If there is none, a new one starts, while there are
        fewer than twice `num_workers`. Sessions stay where they are until it has started: a process takes seconds, and
        on a busy machine all workers may be late for a moment.
        """
        others = [worker for worker in self.workers.active if worker is not source]
        best = min(others, key=self._load, default=None)
        if best is not None and self._load(best)[:2] == (False, False):
            return best
        is_starting = any(not worker.transport.is_ready() for worker in others)
        if is_starting or len(self.workers.active) >= 2 * self.num_workers:
            return None
        added = self.workers.add()
        return added if added is not None and added.transport.is_ready() else None

    def _replace(self, worker: PoolWorker) -> None:
        """Abandons a worker; other workers rebuild its sessions."""
        sessions = self.workers.replace(worker)
        # The worker may have written the wanted row before it died over a draft.
        missing = {session.session_id for session in sessions if not session.is_ready()}
        busy_with = self.workers.busy_with(worker)
        suspects = missing & {busy_with} if busy_with >= 0 else missing
        for session in sessions:
            worker.retire(session, -1)
            session.worker, session.slot, session.num_held, session.draft_slots = None, -1, 0, []
        if worker.transport.stops_between_sessions:
            kept = [retired for retired in worker.retired if self.workers.may_write(worker, retired.session_id)]
            self._slots.free(retired.slot for retired in worker.retired if retired not in kept)
            worker.retired = kept
        for session in sessions:
            session.drafts = []
            session.takes_drafts &= session.session_id != busy_with or session.session_id in missing
            if session.failure is None and session.is_wanted:
                session.attempts += session.session_id in suspects
                self._ask_again(session)

    def _ask_again(self, session: PoolSession) -> None:
        """Requests a session's row after its worker's death. The session fails if `MAX_ATTEMPTS` workers died
        over it.
        """
        session.moved_at = time.monotonic()
        if session.attempts < MAX_ATTEMPTS:
            self._ask(session)
        else:
            session.failure = f"{session.attempts} grammar workers died over its mask"
            self._waiting.pop(session.session_id, None)

    # ---- workers and slots ---------------------------------------------------------------------------------------

    def _find_worker(self, session: PoolSession, target: PoolWorker | None) -> bool:
        """Gives a session to `target`, or to the worker with the least load. Returns False if there is no worker, which
        fails the session, or no slot, for which `supervise` tries again.
        """
        if not self.workers.active:
            self._free_slots()  # a worker that has died may make room for another
        if not self.workers.active:
            session.failure = (
                f"all {self.workers.max_workers} grammar workers hang; simplify the constraints that are in use"
            )
            self._waiting.pop(session.session_id, None)
            return False
        has_entered = self._enter(session, target or min(self.workers.active, key=self._load))
        if not has_entered:
            self._waiting[session.session_id] = session
        return has_entered

    def _enter(self, session: PoolSession, worker: PoolWorker) -> bool:
        """Gives a session to a worker. Returns False if no slot is free."""
        slot = self._slots.take()
        if slot is None:
            return False
        session.slot = slot
        session.worker, session.num_held = worker, 0
        worker.sessions[session.session_id] = session
        self.buffer.cancelled[session.slot] = 0
        return True

    def _leave(self, session: PoolSession) -> None:
        """Takes a session from its worker. Its slots become free when the worker has acknowledged every message."""
        worker, session.worker = session.worker, None
        if worker is None:
            return
        self.buffer.cancelled[session.slot] = 1
        self.buffer.drafts_wanted[session.slot] = 0
        worker.sessions.pop(session.session_id, None)
        worker.jobs = [job for job in worker.jobs if job.session_id != session.session_id]
        worker.ended.append(session.session_id)
        worker.retire(session, worker.num_sent)
        session.slot, session.draft_slots = -1, []

    def _free_slots(self) -> None:
        """Frees slots that no worker writes any more, and starts missing workers."""
        self._slots.free(self.workers.take_free_slots())

    def close(self) -> None:
        """Ends every worker."""
        self.workers.close()
        self.buffer.close()
