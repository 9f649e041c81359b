"""The engine's pool of grammar workers: `prepare` requests masks and returns at once, `wait` says which are missing.

A session is a function of its tokens. If a worker dies, hangs or is late, other workers rebuild its sessions from their
tokens. A session fails only if its own row takes longer than its budget. The pool also requests the rows after drafts;
nothing waits for them.

Only the engine's thread calls the pool. Workers run as threads or Ray actors (`structured/grammar_pool/transport.py`).
In `structured/`, a worker is a grammar worker and a slot is a mask slot.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from manta.structured.grammar_pool.grammar_worker import Job, Message, SessionStart
from manta.structured.grammar_pool.pool_records import PoolSession, PoolWorker, RetiredSlot
from manta.structured.grammar_pool.transport import ActorTransport, ThreadTransport
from manta.structured.masks import FAILED, FINISHED, BufferShape, MaskBuffer, MaskSlots, forced_after, row_words
from manta.structured.pool_config import PoolConfig
from manta.structured.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""Number of workers that may die over a session's row before the session counts as the cause and fails."""

MAX_WORKERS = 64
"""Maximum number of workers, counting abandoned ones that may still run."""

START_SECONDS = 60.0
"""Seconds after which a worker process that has not started is replaced."""

WAIT_SLICE_S = 0.0001
"""Seconds that `wait` sleeps between two looks at the rows."""


class GrammarPool:
    """Not thread-safe. The bounds:

    - `num_sessions`: sessions that are open at a time.
    - `num_drafts`: drafts of one session that have rows.
    - `num_forced`: forced tokens to look for after a row, at most `manta.structured.masks.MAX_FORCED`.
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
        # A moved session's slot stays in use until its old worker acknowledges the move. A thread that hangs never
        # does.
        self.num_session_slots = 2 * num_sessions + MAX_WORKERS
        self._slots = MaskSlots(self.num_session_slots, num_sessions * num_drafts)
        shape = BufferShape(self._slots.num_slots, row_words(vocabulary.vocab_size), MAX_WORKERS)
        self.buffer = MaskBuffer(shape, shared=actors)
        self.uses_actors = actors
        self.num_replaced = 0
        self._vocabulary = vocabulary
        self._num_forced = num_forced
        self._num_jobs = 0
        self._free_indices = list(range(MAX_WORKERS - 1, -1, -1))
        self._sessions: dict[int, PoolSession] = {}
        self._waiting: dict[int, PoolSession] = {}
        """Sessions whose wanted row was not ready at the pool's last look."""
        self._given_up: list[PoolWorker] = []
        """Replaced workers that may still run, and so may still write to their slots."""
        self.workers: list[PoolWorker] = []
        self._spare = self._start_worker() if actors else None
        self._start_missing()

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
    def num_given_up(self) -> int:
        """Number of replaced workers that may still run."""
        return len(self._given_up)

    @property
    def num_lost_slots(self) -> int:
        """Number of slots in use that belong to no session and no worker: above 0 is a leak."""
        num_retired = sum(len(worker.retired) for worker in [*self.workers, *self._given_up])
        held = [session for session in self._sessions.values() if session.worker is not None]
        return self._slots.num_in_use - num_retired - sum(1 + len(session.draft_slots) for session in held)

    @property
    def num_slots_in_use(self) -> int:
        """Number of slots that a session has or a worker may still write. It is 0 some time after all sessions have
        ended.
        """
        self._collect_slots()
        return self._slots.num_in_use

    def start(self, session_id: int, start: SessionStart) -> None:
        """Opens a session. The first `prepare` sends it to a worker."""
        self._sessions[session_id] = PoolSession(session_id, start)

    def end(self, session_id: int) -> None:
        """Closes a session, if it exists."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._waiting.pop(session_id, None)
            self._leave(session)
            self._collect_slots()

    # ---- a step --------------------------------------------------------------------------------------------------

    def prepare(
        self, wanted: Iterable[tuple[int, Sequence[int]]], drafts: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        now = time.monotonic()
        for session_id, tokens in wanted:
            session = self._sessions[session_id]
            common = _num_common(session.tokens, tokens)
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
        self._flush()

    def is_ready(self, session_id: int) -> bool:
        """Whether the wanted row is there, or the session has failed (`error`)."""
        return self._is_ready(self._sessions[session_id])

    def _is_ready(self, session: PoolSession) -> bool:
        if session.error is not None:
            return True
        return session.worker is not None and self.buffer.done[session.slot] == session.number

    def is_complete(self, session_id: int) -> bool:
        """Whether the wanted row is ready, and all drafts' rows that will come."""
        session = self._sessions[session_id]
        if not self._is_ready(session):
            return False
        slots = session.draft_slots[: len(session.drafts)]  # workers fill them in this order
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
        """Waits until `enough(number of missing sessions)` is true or `seconds` have passed. Returns the missing
        sessions.

        A session is missing while `is_there`, by default `is_ready`, is False for it. A row that was there may be
        missing again after its worker's death.
        """
        is_there = is_there or self.is_ready
        deadline = time.monotonic() + seconds
        waited_for = list(session_ids)
        missing = [session_id for session_id in waited_for if not is_there(session_id)]
        while missing and not enough(len(missing)) and time.monotonic() < deadline:
            time.sleep(WAIT_SLICE_S)
            self.supervise()
            missing = [session_id for session_id in waited_for if not is_there(session_id)]
        return missing

    def slot(self, session_id: int) -> int:
        """Index of the wanted row in `buffer.rows`."""
        return self._sessions[session_id].slot

    def error(self, session_id: int) -> str | None:
        """Returns why the session failed, or None. Call it once the row is ready."""
        session = self._sessions[session_id]
        if session.error is None and self.buffer.flags[session.slot] & FAILED:
            session.error = self.buffer.error(session.slot)
        return session.error

    def draft_rows(self, session_id: int) -> tuple[list[int], bool]:
        """Indices in `buffer.rows` of the masks after the first draft, the second and so on, as far as they are there
        and the grammar allows the draft. The bool is True if only the end may follow the last of these drafts. Call it
        once the wanted row is ready.
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
        """Tokens that the grammar forces after output `tokens`, as far as a worker has found them. `tokens` continues
        the output of the last `prepare`. Never waits.
        """
        session = self._sessions[session_id]
        known = len(session.tokens)
        gained = list(tokens[known:])
        if list(tokens[:known]) != session.tokens or not self._is_ready(session) or session.error is not None:
            return []
        for num_drafts in (len(gained), len(gained) - 1, 0):  # looked for after the output, and after all drafts
            if 0 <= num_drafts <= len(session.drafts) and session.drafts[:num_drafts] == gained[:num_drafts]:
                forced = forced_after(gained[num_drafts:], self._continuations(session, num_drafts))
                if forced:
                    return forced
        return []

    def _continuations(self, session: PoolSession, num_drafts: int) -> list[list[int]]:
        """The continuations (`MaskBuffer.forced`) after the output tokens and `num_drafts` drafts, if they were
        found.
        """
        slot, number = session.slot, session.number
        if num_drafts:
            if num_drafts > len(session.draft_slots):
                return []
            slot, number = session.draft_slots[num_drafts - 1], session.drafts_number
        return self.buffer.forced(slot) if self.buffer.forced_done[slot] == number else []

    # ---- asking --------------------------------------------------------------------------------------------------

    def _ask(self, session: PoolSession, target: PoolWorker | None = None, is_new: bool = True) -> None:
        """Adds a job to the next message of the session's worker. A session without a worker goes to `target`, or to
        the one with the least load. `is_new` is False if only the drafts have changed.
        """
        if session.error is not None:
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

    def _load(self, worker: PoolWorker) -> tuple[bool, bool, int]:
        """Sort key: started workers first, late ones after the others, then by number of sessions."""
        return not worker.transport.is_ready(), self._is_late(worker), len(worker.sessions)

    def _is_late(self, worker: PoolWorker) -> bool:
        """Whether a row or a message is overdue, even if its session has left."""
        now, patience = time.monotonic(), self.config.migrate_seconds
        if self._longest_under_way(worker, now) > patience:
            return True
        return any(
            now - session.moved_at > patience * 2**session.num_moves for session in self._sessions_waiting_for(worker)
        )

    def _sessions_waiting_for(self, worker: PoolWorker) -> Iterator[PoolSession]:
        return (session for session in worker.sessions.values() if session.session_id in self._waiting)

    def _longest_under_way(self, worker: PoolWorker, now: float) -> float:
        """Seconds since the oldest unacknowledged message was sent; 0 if there is none."""
        acknowledged = self.buffer.acknowledged[worker.index]
        while worker.under_way and worker.under_way[0][0] <= acknowledged:
            worker.under_way.popleft()
        return now - worker.under_way[0][1] if worker.under_way else 0.0

    def _flush(self) -> None:
        """Sends each worker its next message, unless it is empty."""
        for worker in self.workers:
            if worker.jobs or worker.ended:
                worker.num_sent += 1
                worker.under_way.append((worker.num_sent, time.monotonic()))
                worker.transport.send(Message(worker.num_sent, worker.jobs, worker.ended))
                worker.jobs, worker.ended = [], []

    # ---- supervision ---------------------------------------------------------------------------------------------

    def supervise(self) -> None:
        """Moves sessions off late workers, fails sessions whose budget is spent, and replaces dead workers."""
        for session_id in [key for key, session in self._waiting.items() if self._is_ready(session)]:
            del self._waiting[session_id]
        if not self._waiting and not any(worker.under_way for worker in self.workers):
            return
        self._collect_slots()
        now = time.monotonic()
        for session in [session for session in self._waiting.values() if session.worker is None]:
            self._ask(session)
        for worker in [worker for worker in self.workers if self._is_late(worker)]:
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
        self._flush()

    def _relieve(self, worker: PoolWorker, now: float) -> None:
        """Moves the sessions that wait for a late worker, except the one that it is busy with. When that one's budget
        is spent, it fails and the worker is replaced.
        """
        busy_with = int(self.buffer.current[worker.index]) - 1
        if busy_with != worker.busy_with:
            worker.busy_with, worker.busy_since = busy_with, now
        session = self._waiting.get(busy_with)
        if session is not None and session.worker is worker:
            seconds = now - max(session.asked_at, worker.busy_since)
        else:  # idle although it has a message, or busy with a draft or a departed session
            session = None
            seconds = min(now - worker.busy_since, self._longest_under_way(worker, now))
        if seconds > self.config.mask_seconds:
            if session is not None:
                session.error = f"its mask was not there after {self.config.mask_seconds:g} s; simplify the constraint"
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
        """Another worker that has started and is not late. Otherwise a new one, while there are fewer than twice
        `num_workers`; else None.
        """
        others = [worker for worker in self.workers if worker is not source]
        best = min(others, key=self._load, default=None)
        if best is not None and self._load(best)[:2] == (False, False):
            return best
        added = self._next_worker() if len(self.workers) < 2 * self.config.num_workers else None
        if added is not None:
            self.workers.append(added)
        return added

    def _replace(self, worker: PoolWorker) -> None:
        """Abandons a worker; other workers rebuild its sessions."""
        logger.warning("grammar worker %d is replaced; %d sessions move", worker.index, len(worker.sessions))
        worker.transport.kill()
        self.num_replaced += 1
        position, replacement = self.workers.index(worker), self._next_worker()
        self.workers[position : position + 1] = [] if replacement is None else [replacement]
        self._given_up.append(worker)
        sessions, worker.sessions = list(worker.sessions.values()), {}
        # The worker may have written the wanted row before it died over a draft.
        missing = {session.session_id for session in sessions if not self._is_ready(session)}
        busy_with = int(self.buffer.current[worker.index]) - 1
        suspects = missing & {busy_with} if busy_with >= 0 else missing
        for session in sessions:
            self._retire(session, worker, -1)
            session.worker, session.slot, session.num_held, session.draft_slots = None, -1, 0, []
        if worker.transport.stops_between_sessions:
            self._slots.free(retired.slot for retired in worker.retired if retired.session_id != busy_with)
            worker.retired = [retired for retired in worker.retired if retired.session_id == busy_with]
        for session in sessions:
            session.drafts = []
            session.takes_drafts &= session.session_id != busy_with or session.session_id in missing
            if session.error is None and session.is_wanted:
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
            session.error = f"{session.attempts} grammar workers died over its mask"
            self._waiting.pop(session.session_id, None)

    # ---- workers and slots ---------------------------------------------------------------------------------------

    def _start_missing(self) -> None:
        """Fills the pool up, also after hanging workers kept it short."""
        while len(self.workers) < self.config.num_workers and (worker := self._next_worker()) is not None:
            self.workers.append(worker)

    def _has_workers_again(self) -> bool:
        """Whether another worker could be started in place of one that has died."""
        self._collect_slots()
        return bool(self.workers)

    def _next_worker(self) -> PoolWorker | None:
        """Returns the spare worker or a new one; None at `MAX_WORKERS`."""
        if self._spare is None:
            return self._start_worker()
        worker, self._spare = self._spare, self._start_worker()
        return worker

    def _start_worker(self) -> PoolWorker | None:
        if not self._free_indices:
            return None
        index = self._free_indices.pop()
        self.buffer.current[index] = self.buffer.acknowledged[index] = 0
        make: type[ActorTransport] | type[ThreadTransport] = ActorTransport if self.uses_actors else ThreadTransport
        return PoolWorker(make(self._vocabulary, self.buffer, index), index)

    def _find_worker(self, session: PoolSession, target: PoolWorker | None) -> bool:
        """Gives a session to `target`, or to the worker with the least load. Returns False if there is no worker, which
        fails the session, or no slot, for which `supervise` tries again.
        """
        if not self.workers and not self._has_workers_again():
            session.error = f"all {MAX_WORKERS} grammar workers hang; simplify the constraints that are in use"
            self._waiting.pop(session.session_id, None)
            return False
        has_entered = self._enter(session, target or min(self.workers, key=self._load))
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
        self._retire(session, worker, worker.num_sent)
        session.slot, session.draft_slots = -1, []

    def _retire(self, session: PoolSession, worker: PoolWorker, number: int) -> None:
        slots = (session.slot, *session.draft_slots)
        worker.retired += [RetiredSlot(number, slot, session.session_id) for slot in slots]

    def _collect_slots(self) -> None:
        """Frees slots that no worker writes any more, and forgets workers that have died."""
        for worker in self.workers:
            if worker.retired:
                acknowledged = int(self.buffer.acknowledged[worker.index])
                self._slots.free(retired.slot for retired in worker.retired if retired.number <= acknowledged)
                worker.retired = [retired for retired in worker.retired if retired.number > acknowledged]
        for worker in [worker for worker in self._given_up if not worker.transport.is_alive()]:
            self._given_up.remove(worker)
            self._slots.free(retired.slot for retired in worker.retired)
            self._free_indices.insert(0, worker.index)
        self._start_missing()

    def close(self) -> None:
        """Ends every worker."""
        for worker in [*self.workers, *([self._spare] if self._spare else [])]:
            worker.transport.kill()
        self.workers, self._spare = [], None
        self._free_indices = []  # so that no worker is started in their place
        self.buffer.close()


def _num_common(old: list[int], new: Sequence[int]) -> int:
    if new[: len(old)] == old:  # a list that usually grows at its end
        return len(old)
    pairs = enumerate(zip(old, new, strict=False))
    return next((index for index, pair in pairs if pair[0] != pair[1]), min(len(old), len(new)))
