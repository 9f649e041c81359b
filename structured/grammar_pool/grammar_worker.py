"""The grammar worker: fills mask rows, in a thread of the engine's process or in a Ray actor.

It identifies sessions by id, output tokens by position and jobs by number, so a message that arrives twice, late or out
of order does no harm. It answers only through the `MaskBuffer`. Imports neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np

from manta.structured.backend import DeadEnd, Grammar
from manta.structured.backends.choose import AUTO, Backends
from manta.structured.constraint import ConstraintSpec
from manta.structured.grammar_pool.tracked_session import FillAll, SessionStart, TrackedSession
from manta.structured.lru import ByteLRU
from manta.structured.masks import DEAD_END, EVERY_SESSION, FAILED, REFUSED, MaskBuffer, allows_a_token
from manta.structured.pool_config import GRAMMAR_CACHE_BYTES
from manta.structured.vocabulary import Vocabulary

MAX_GROWTH_BYTES = 16 * 2**20
"""A grammar that grows by more than this is rebuilt for the next session, which takes about a millisecond."""
ENTRY_BYTES = 1000
"""Memory of a cache entry besides the grammar and the constraint's text."""

QUICK_BATCH_S = 0.02
"""Longest time of a batch whose sessions may be filled together again. A busy machine alone rarely makes it as long."""
MOST_TOGETHER = 32
"""Most rows that are filled together, and are published together."""

Filled = np.ndarray | Exception | None
"""A row that was filled together with others, int32 [words]; what its session raised; or None for a row to fill."""


class Job(msgspec.Struct, frozen=True, array_like=True):
    """A request to fill rows of one session: the mask of the token after `first + len(token_ids)` output tokens, and of
    the token after each draft that follows them.
    """

    session_id: int
    number: int
    """Unique number, which marks the filled rows."""
    slot: int
    first: int
    token_ids: list[int]
    """Output tokens from position `first` on; the worker holds the earlier ones."""
    draft_token_ids: list[int] = []
    draft_slots: list[int] = []
    """Entry `i` is the slot of the row after `draft_token_ids[: i + 1]`. The last drafts may have none."""
    wants_row: bool = True
    """False if the row of `slot` was requested before and only the drafts' rows are missing."""
    num_forced: int = 0
    """Maximum number of forced tokens to look for after the last output token and after the last draft."""
    start: SessionStart | None = None
    """Set if the worker does not hold this session yet."""

    @property
    def looks_ahead(self) -> bool:
        """Whether rows of drafts or forced tokens are wanted behind the row."""
        return bool(self.draft_slots or self.num_forced)


class Message(msgspec.Struct, frozen=True, array_like=True):
    """The pool's message to one worker, at most once a step."""

    number: int
    jobs: list[Job]
    ended: list[int]
    """Sessions to forget before doing the jobs."""


class _Loaded(NamedTuple):
    grammar: Grammar
    max_bytes: int
    """A grammar that grows beyond this leaves the cache."""


class GrammarWorker:
    """Holds the sessions that the pool assigned to it. One thread at a time calls `handle`."""

    def __init__(self, vocabulary: Vocabulary, buffer: MaskBuffer, index: int) -> None:
        self._vocabulary = vocabulary
        self._buffer = buffer
        self._index = index
        buffer.cached[index] = 0
        self._backends = Backends(vocabulary)
        self._grammars: ByteLRU[ConstraintSpec, _Loaded] = ByteLRU(GRAMMAR_CACHE_BYTES)
        self._sessions: dict[int, TrackedSession] = {}
        self.stopped = False
        """Set by the pool when it gives this worker up. The worker then publishes nothing and begins no job."""

    def warm_up(self) -> None:
        """Loads the most common backend. A failure is reported when a session needs the backend."""
        with contextlib.suppress(Exception):
            self._backends.get(AUTO[0])

    def handle(self, message: Message) -> None:
        """Does the jobs in three rounds:

        1. Every session accepts its tokens, so that finished ones are reported early.
        2. Rows are filled: those of quick sessions together, then the others, the quickest of the last time first.
        3. Drafts and forced tokens are looked for.
        """
        for session_id in message.ended:
            self._sessions.pop(session_id, None)
        to_fill = [job for job in message.jobs if self._attempt(job, self._advance)]
        to_look_ahead: list[Job] = []
        for jobs in self._batches(to_fill):
            rows = self._filled(jobs)
            published = self._publish_together(jobs, rows)
            to_look_ahead += [
                job
                for job, row in zip(jobs, rows, strict=True)
                if (job.looks_ahead if job.number in published else self._attempt(job, self._publisher(row)))
            ]
        for job in to_look_ahead:
            self._attempt(job, self._look_ahead)
        filled = [self._sessions[job.session_id].spec for job in to_fill if job.session_id in self._sessions]
        for spec in dict.fromkeys(filled):
            if spec is not None:
                self._reweigh(spec)
        self._buffer.current[self._index] = 0
        self._buffer.cached[self._index] = len(self._grammars), self._grammars.num_bytes
        self._buffer.acknowledged[self._index] = message.number

    def _attempt(self, job: Job, work: Callable[[Job], bool]) -> bool:
        """Does one part of a job; returns False if nothing is left of it. Any exception of a backend, even `SystemExit`
        or the panic of a Rust library, fails one session and never the worker.
        """
        # The pool sets `stopped` and then reads `current`, to know where this worker may still write.
        self._buffer.current[self._index] = job.session_id + 1
        if self.stopped or self._buffer.cancelled[job.slot]:
            return False
        try:
            return work(job)
        except BaseException as error:
            tracked = self._sessions.pop(job.session_id, None)
            for source in (tracked, job.start):
                if source is not None and source.spec is not None:
                    self._grammars.forget(source.spec)  # its sessions may share the broken part
            if job.wants_row:
                self._buffer.set_error(job.slot, f"{type(error).__name__}: {error}")
                self._publish(job, job.slot, FAILED)
            return False

    def _advance(self, job: Job) -> bool:
        """Gives the session its tokens. If only the end may follow, publishes that and returns False."""
        if job.start is not None:
            self._sessions[job.session_id] = TrackedSession(job.start, self._grammar(job.start), self._vocabulary)
        tracked = self._sessions.get(job.session_id)
        if tracked is None:
            raise ValueError("the session was lost over a draft")
        tracked.advance(job.first, job.token_ids)
        flags = tracked.flags()
        if flags and job.wants_row:
            self._publish(job, job.slot, flags)
        return not flags

    def _batches(self, jobs: list[Job]) -> list[list[Job]]:
        """Returns the jobs in the order in which their rows are filled; those of a batch are filled together."""
        joint: dict[FillAll, list[Job]] = {}
        alone: list[Job] = []
        for job in jobs:
            fill_all = self._sessions[job.session_id].fill_all if job.wants_row else None
            if fill_all is None:
                alone.append(job)
            else:
                joint.setdefault(fill_all, []).append(job)
        alone.sort(key=lambda job: self._sessions[job.session_id].seconds)
        batches = [
            group[first : first + MOST_TOGETHER]
            for group in joint.values()
            for first in range(0, len(group), MOST_TOGETHER)
        ]
        return batches + [[job] for job in alone]

    def _filled(self, jobs: list[Job]) -> list[Filled]:
        """Fills the rows of several jobs together, in memory of its own, because the pool may have given this worker up
        in the meantime. The rows of a batch of one, and of a batch that fails, are filled one by one when they are
        published.
        """
        if len(jobs) == 1 or self.stopped:
            return [None] * len(jobs)
        tracked = [self._sessions[job.session_id] for job in jobs]
        fill_all = tracked[0].fill_all
        assert fill_all is not None
        self._buffer.current[self._index] = 0  # busy with no session that the pool could tell
        started = time.perf_counter()
        try:
            rows, errors = fill_all([each.session for each in tracked])
        except BaseException:  # such as the panic of a Rust library; the session that is the cause will fail alone
            return [None] * len(jobs)
        seconds = time.perf_counter() - started
        for each in tracked:
            # One of a batch that took long is slow, and nobody knows which: all are filled alone the next time
            each.seconds = seconds if seconds > QUICK_BATCH_S else seconds / len(jobs)
        return [row if error is None else error for row, error in zip(rows, errors, strict=True)]

    def _publish_row(self, filled: Filled, job: Job) -> bool:
        """Fills the wanted row, unless it is `filled`. Returns whether drafts or forced tokens are wanted too."""
        if job.wants_row:
            try:
                self._fill_row(job, job.slot, filled)
            except DeadEnd:
                self._publish(job, job.slot, DEAD_END)
                return False
        return job.looks_ahead

    def _publisher(self, filled: Filled) -> Callable[[Job], bool]:
        return functools.partial(self._publish_row, filled)

    def _publish_together(self, jobs: list[Job], rows: list[Filled]) -> set[int]:
        """Publishes the rows that stay as they were filled together. Returns the numbers of their jobs; the others are
        published one by one.
        """
        plain = [
            (job, row)
            for job, row in zip(jobs, rows, strict=True)
            if isinstance(row, np.ndarray) and self._sessions[job.session_id].takes_rows_as_filled
        ]
        buffer = self._buffer
        if plain:
            buffer.current[self._index] = EVERY_SESSION  # as in `_attempt`, before it looks at `stopped`
        slots, numbers = [], []
        for job, row in plain:
            if self.stopped:
                return set()
            if not buffer.cancelled[job.slot] and allows_a_token(row):
                buffer.rows[job.slot] = row
                slots.append(job.slot)
                numbers.append(job.number)
        buffer.num_adjustments[slots] = 0
        buffer.flags[slots] = 0
        buffer.done[slots] = numbers
        return set(numbers)

    def _look_ahead(self, job: Job) -> bool:
        """Fills the drafts' rows and finds forced tokens, for which no step waits. A grammar that fails at a draft gets
        its earlier state back, because the draft may never be drawn. If it is drawn, the session fails then.
        """
        num_known, num_rows, flags = job.first + len(job.token_ids), 0, 0
        tracked = self._sessions[job.session_id]
        try:
            if job.wants_row:
                self._find_forced(job, job.slot)
            for token_id, slot in zip(job.draft_token_ids, job.draft_slots, strict=False):
                if self.stopped or self._buffer.drafts_wanted[job.slot] != job.number:
                    return False
                if flags or not tracked.accept_draft(token_id):
                    break
                flags = tracked.flags()
                if flags:
                    self._publish(job, slot, flags)
                else:
                    self._fill_row(job, slot)
                num_rows += 1
            if 0 < num_rows == len(job.draft_slots) and not flags:
                self._find_forced(job, job.draft_slots[-1])
        except BaseException:
            self._sessions[job.session_id] = tracked.rebuilt(num_known)
        for slot in job.draft_slots[num_rows:]:
            self._publish(job, slot, REFUSED)
        return False

    def _find_forced(self, job: Job, slot: int) -> None:
        if job.num_forced:
            continuations = self._sessions[job.session_id].look_ahead(self._buffer.rows[slot], job.num_forced)
            if not self.stopped:
                self._buffer.set_forced(slot, job.number, continuations)

    def _fill_row(self, job: Job, slot: int, filled: Filled = None) -> None:
        """Writes the mask and adjustments of the session's next token. Raises the error that `filled` may be."""
        tracked, buffer = self._sessions[job.session_id], self._buffer
        if isinstance(filled, Exception):
            raise filled
        if filled is not None:
            buffer.rows[slot] = filled
            tracked.complete(buffer.rows[slot])
            ids, values = tracked.adjustments()
        else:
            started = time.perf_counter()
            tracked.fill(buffer.rows[slot])
            ids, values = tracked.adjustments()
            tracked.seconds = time.perf_counter() - started
        if not self.stopped:
            buffer.adjusted_ids[slot, : len(ids)] = ids
            buffer.adjusted_by[slot, : len(ids)] = values
            buffer.is_free[slot] = tracked.is_free
            self._publish(job, slot, 0, len(ids))

    def _publish(self, job: Job, slot: int, flags: int, num_adjustments: int = 0) -> None:
        """Marks a slot as done, after everything else in it was written."""
        if not self.stopped:
            buffer = self._buffer
            buffer.num_adjustments[slot] = num_adjustments
            buffer.flags[slot] = flags
            buffer.done[slot] = job.number

    def _grammar(self, start: SessionStart) -> Grammar | None:
        if start.spec is None:
            return None
        loaded = self._grammars.get(start.spec)
        if loaded is None:
            grammar = self._backends.get(start.spec.backend).load(start.spec, start.compiled)
            loaded = _Loaded(grammar, grammar.num_bytes + MAX_GROWTH_BYTES)
            self._keep(start.spec, loaded)
        return loaded.grammar

    def _keep(self, spec: ConstraintSpec, loaded: _Loaded) -> None:
        num_bytes = loaded.grammar.num_bytes + sys.getsizeof(spec.text) + ENTRY_BYTES
        self._grammars.put(spec, loaded, num_bytes)

    def _reweigh(self, spec: ConstraintSpec) -> None:
        """Updates the grammar's size in the cache, or drops a grammar that has grown too much."""
        loaded = self._grammars.get(spec)
        if loaded is None:
            return
        if loaded.grammar.num_bytes > loaded.max_bytes:
            self._grammars.forget(spec)
        else:
            self._keep(spec, loaded)
