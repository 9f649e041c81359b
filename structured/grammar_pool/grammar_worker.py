"""The grammar worker: fills mask rows, in a thread of the engine's process or in a Ray actor.

It identifies sessions by id, output tokens by position and jobs by number, so a message that arrives twice, late or out
of order does no harm. It answers only through the `MaskBuffer`. Imports neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from manta.structured.backend import DeadEnd, Grammar, Session, begin
from manta.structured.backends.choose import AUTO, Backends
from manta.structured.constraint import ConstraintSpec
from manta.structured.lru import ByteLRU
from manta.structured.masks import (
    DEAD_END,
    EVERY_SESSION,
    FAILED,
    FINISHED,
    MAX_ADJUSTMENTS,
    MAX_CHOICES,
    REFUSED,
    MaskBuffer,
    allowed_of,
    allows_a_token,
)
from manta.structured.vocabulary import Vocabulary

GRAMMAR_CACHE_BYTES = 64 * 2**20
"""Maximum memory of the grammars that one worker caches."""
MAX_GROWTH_BYTES = 16 * 2**20
"""A grammar that grows by more than this is rebuilt for the next session, which takes about a millisecond."""
ENTRY_BYTES = 1000
"""Memory of a cache entry besides the grammar and the constraint's text."""

QUICK_S = 0.001
"""A session whose last row took less than this may be filled together with others, which then wait for it."""
QUICK_BATCH_S = 0.02
"""Longest time of a batch whose sessions may be filled together again. A busy machine alone rarely makes it as long."""
MOST_TOGETHER = 32
"""Most rows that are filled together, and are published together."""

FillAll = Callable[[Sequence[Any]], tuple[np.ndarray, list[Exception | None]]]
"""`JointSession.fill_all`."""
Filled = np.ndarray | Exception | None
"""A row that was filled together with others, int32 [words]; what its session raised; or None for a row to fill."""

_NO_ADJUSTMENTS = (np.empty(0, np.int32), np.empty(0, np.float32))


class SessionStart(msgspec.Struct, frozen=True, array_like=True):
    """The data from which a grammar worker builds a session."""

    spec: ConstraintSpec
    compiled: bytes
    end_token_ids: tuple[int, ...]
    """Tokens that end the sequence: the model's end-of-sequence tokens and the request's stop tokens."""


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


class TrackedSession:
    """A session and the output tokens that it has accepted. Drafts count as output tokens until `advance` takes them
    back.
    """

    def __init__(self, start: SessionStart, grammar: Grammar, vocabulary: Vocabulary) -> None:
        self.spec = start.spec
        self._start = start
        self._vocabulary = vocabulary
        self._grammar = grammar
        self._stop_ids = [each for each in start.end_token_ids if each not in vocabulary.eos_token_ids]
        self._session: Session | None = None
        self._begin = 0
        """Number of output tokens before the constraint begins."""
        self.tokens: list[int] = []
        self.seconds = 0.0
        """Seconds that the last row took."""
        self._looks_past_choices = True
        self._num_fruitless = 0
        """Number of consecutive looks past a choice that found nothing forced."""
        self._num_to_skip = 0
        """Number of rows to skip before `look_ahead` looks past a choice again."""
        if not start.spec.begin_after:
            self._session = self._begin_session()

    def advance(self, first: int, token_ids: Sequence[int]) -> None:
        """Sets the output to `tokens[:first] + token_ids`. Raises `ValueError` if tokens are missing or refused."""
        if first > len(self.tokens):
            raise ValueError(f"output tokens {len(self.tokens)} to {first} are missing")
        kept = first
        end = first + len(token_ids)
        while kept < min(len(self.tokens), end) and self.tokens[kept] == token_ids[kept - first]:
            kept += 1
        if kept < len(self.tokens):
            self._rollback(kept)
        for token_id in token_ids[kept - first :]:
            self._accept(token_id)

    def _accept(self, token_id: int) -> None:
        if self._session is not None:
            if not self._session.accept(token_id):
                raise ValueError(f"the grammar refuses token {token_id} at output position {len(self.tokens)}")
            self.tokens.append(token_id)
            return
        self.tokens.append(token_id)
        marker = self._start.spec.begin_after
        if tuple(self.tokens[-len(marker) :]) == marker:
            self._begin = len(self.tokens)
            self._session = self._begin_session()

    def _begin_session(self) -> Session:
        return begin(self._grammar, self.spec.begun, self._vocabulary)

    def accept_draft(self, token_id: int) -> bool:
        """Advances by a draft. Returns False and keeps the state if the grammar refuses the token or it would end the
        sequence.
        """
        if token_id in self._start.end_token_ids:
            return False
        if self._session is None:
            self._accept(token_id)
            return True
        accepted = self._session.accept(token_id)
        if accepted:
            self.tokens.append(token_id)
        return accepted

    def rebuilt(self, length: int) -> TrackedSession:
        """Returns a new session over the first `length` tokens, which does not look past choices."""
        fresh = TrackedSession(self._start, self._grammar, self._vocabulary)
        fresh.advance(0, self.tokens[:length])
        fresh._looks_past_choices = False
        return fresh

    def _rollback(self, length: int) -> None:
        if self._session is not None:
            if self._start.spec.begin_after and length < self._begin:
                self._session = None
            else:
                self._session.rollback(len(self.tokens) - length)
        del self.tokens[length:]

    def flags(self) -> int:
        """`FINISHED` if only the end may follow, else 0."""
        return FINISHED if self._session is not None and self._session.is_finished() else 0

    def fill(self, row: np.ndarray) -> None:
        """Writes the next token's row. Raises `DeadEnd` if no token may follow."""
        if self._session is None:
            row[:] = -1
            self._vocabulary.forbid_padding(row)
        else:
            self._session.fill(row)
        self.complete(row)

    @property
    def fill_all(self) -> FillAll | None:
        """`JointSession.fill_all` of the session's class, if it has one and the last row was quick."""
        is_quick = 0.0 < self.seconds < QUICK_S
        return getattr(type(self._session), "fill_all", None) if is_quick else None

    @property
    def session(self) -> Session | None:
        """The backend's session; None before the constraint begins."""
        return self._session

    @property
    def takes_rows_as_filled(self) -> bool:
        """Whether `complete` changes nothing in a row of `fill_all`, and no logits are adjusted."""
        has_adjustments = getattr(self._session, "adjustments", None) is not None
        return self._session is not None and not self._stop_ids and not has_adjustments

    def complete(self, row: np.ndarray) -> None:
        """Allows or forbids the tokens that end the sequence, in a row that the session has filled. Raises `DeadEnd` if
        no token may follow.

        End tokens are allowed where the text may end. A stop token that the grammar takes is also allowed where it
        completes the text, and where nothing else may follow. Before the constraint begins, every token is allowed but
        end tokens that the mark of the beginning does not hold.
        """
        ends, vocabulary = self._start.end_token_ids, self._vocabulary
        if self._session is None:
            vocabulary.set_tokens(row, set(ends).difference(self._start.spec.begin_after), False)
            return
        if self._stop_ids:  # the session itself knows the end-of-sequence tokens
            if self._session.is_accepting():
                vocabulary.set_tokens(row, ends, True)
            else:
                self._forbid_early_stops(self._session, row)
        if not allows_a_token(row):
            raise DeadEnd(f"the grammar allows no token at output position {len(self.tokens)}")

    def _forbid_early_stops(self, session: Session, row: np.ndarray) -> None:
        """Forbids stop tokens that would cut the text short, unless the row has no other tokens. Of more than
        `MAX_CHOICES` stop tokens none is tried.
        """
        taken = allowed_of(row, self._stop_ids)
        early = [each for each in taken if len(taken) > MAX_CHOICES or not _completes(session, each)]
        self._vocabulary.set_tokens(row, early, False)
        if not row.any():
            self._vocabulary.set_tokens(row, early, True)

    def adjustments(self) -> tuple[np.ndarray, np.ndarray]:
        """Token ids int32 [n] and the values to add to their logits, float32 [n]. Raises `ValueError` if they are out
        of range.
        """
        adjust = getattr(self._session, "adjustments", None)
        if adjust is None:
            return _NO_ADJUSTMENTS
        ids, values = adjust()
        if len(ids) != len(values) or len(ids) > MAX_ADJUSTMENTS:
            raise ValueError(f"{len(ids)} tokens have {len(values)} adjustments; the limit is {MAX_ADJUSTMENTS} each")
        width = self._vocabulary.vocab_size
        if not all(0 <= token_id < width for token_id in ids):
            raise ValueError(f"adjusted tokens must be in [0, {width}), not {ids}")
        with np.errstate(over="ignore"):
            added = np.array(values, np.float32)
        if not np.isfinite(added).all():
            raise ValueError(f"adjustments must be finite in float32, not {values}")
        return np.array(ids, np.int32), added

    def look_ahead(self, row: np.ndarray, num_tokens: int) -> list[list[int]]:
        """The continuations behind a row (`MaskBuffer.forced`), each of at most `num_tokens` tokens. Keeps the state.

        Looking past a choice costs time, so each fruitless look lengthens the pause before the next one.
        """
        session = self._session
        if session is None:
            return []
        forced = session.forced_tokens()[:num_tokens]
        if forced or not self._looks_past_choices or np.count_nonzero(row) > MAX_CHOICES:
            return [forced]
        if self._num_to_skip:
            self._num_to_skip -= 1
            return [forced]
        choices = _allowed_tokens(row)
        if not 1 < len(choices) <= MAX_CHOICES:
            return [forced]
        continuations = [[token_id, *self._forced_after(session, token_id)] for token_id in choices]
        found = [continuation[:num_tokens] for continuation in continuations if len(continuation) > 1]
        self._num_fruitless = 0 if found else self._num_fruitless + 1
        self._num_to_skip = self._num_fruitless
        return [forced, *found]

    def _forced_after(self, session: Session, token_id: int) -> list[int]:
        """The tokens that `token_id` forces. Keeps the state."""
        if token_id in self._start.end_token_ids or not session.accept(token_id):
            return []
        forced = session.forced_tokens()
        session.rollback(1)
        return forced


def _completes(session: Session, token_id: int) -> bool:
    """Whether the text may end behind a token. Keeps the state."""
    if not session.accept(token_id):
        return False
    may_end = session.is_accepting()
    session.rollback(1)
    return may_end


def _allowed_tokens(row: np.ndarray) -> list[int]:
    """The ids of the tokens that a packed row allows."""
    words = np.flatnonzero(row)
    bits = np.flatnonzero(np.unpackbits(row[words].view(np.uint8), bitorder="little"))
    return (32 * words[bits // 32] + bits % 32).tolist()


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
                if source is not None:
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
            self._publish(job, slot, 0, len(ids))

    def _publish(self, job: Job, slot: int, flags: int, num_adjustments: int = 0) -> None:
        """Marks a slot as done, after everything else in it was written."""
        if not self.stopped:
            buffer = self._buffer
            buffer.num_adjustments[slot] = num_adjustments
            buffer.flags[slot] = flags
            buffer.done[slot] = job.number

    def _grammar(self, start: SessionStart) -> Grammar:
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
