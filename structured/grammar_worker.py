"""Fills mask rows: what runs in a thread of the engine's process, or in a Ray actor of the pool.

Knows sessions by id, their output tokens by count and jobs by number, so that a message that comes twice, late or out
of order does no harm. Everything it says goes into the `MaskBuffer`. Imports neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from structured.backend import Backend, Grammar, Session, make_backend
from structured.backends.choose import AUTO
from structured.constraint import ConstraintSpec
from structured.masks import FAILED, FINISHED, MAX_ADJUSTMENTS, REFUSED, MaskBuffer
from structured.vocabulary import Vocabulary

GRAMMAR_CACHE_BYTES = 256 * 2**20


class SessionStart(msgspec.Struct, frozen=True, array_like=True):
    """What a worker builds a session from."""

    spec: ConstraintSpec
    compiled: bytes
    end_token_ids: tuple[int, ...]
    """Tokens that end the sequence: they are allowed exactly where the grammar lets the text end."""


class Job(msgspec.Struct, frozen=True, array_like=True):
    """Fill the rows of one session: for the token behind output tokens `[0, first + len(token_ids))`, and for the one
    behind each draft that follows.
    """

    session_id: int
    number: int
    """Of one job alone: rows are marked with it."""
    slot: int
    first: int
    token_ids: list[int]
    """Output tokens from `first` on; the worker holds those before."""
    draft_token_ids: list[int] = []
    draft_slots: list[int] = []
    """Entry `i` is of the row behind `draft_token_ids[: i + 1]`; those of the last drafts may be missing."""
    wants_row: bool = True
    """False where the row of `slot` was asked for before: only those of the drafts are wanted."""
    num_forced: int = 0
    """Forced tokens to look for behind the last of the output tokens, and behind the last draft."""
    start: SessionStart | None = None
    """For a session that this worker does not hold."""


class Message(msgspec.Struct, frozen=True, array_like=True):
    """One message a worker and step."""

    number: int
    jobs: list[Job]
    ended: list[int]
    """Sessions to forget first."""


class TrackedSession:
    """A session and the output tokens that it stands behind: a function of those tokens alone.

    Drafts are output tokens until `advance` says that they are not.
    """

    def __init__(self, start: SessionStart, grammar: Grammar, vocabulary: Vocabulary) -> None:
        self._start = start
        self._vocabulary = vocabulary
        self._grammar = grammar
        self._session: Session | None = None
        self._begin = 0
        """Output tokens before the constraint begins."""
        self.tokens: list[int] = []
        self.seconds = 0.0
        """Time that the last row took."""
        if not start.spec.begin_after:
            self._session = grammar.session()

    def advance(self, first: int, token_ids: Sequence[int]) -> None:
        """Makes the output `tokens[:first] + token_ids`. Raises `ValueError` where tokens are missing or refused."""
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
            self._session = self._grammar.session()

    def accept_draft(self, token_id: int) -> bool:
        """Advances by a token that the sequence may never have. False, with the state unchanged, where it is refused or
        would end the sequence.
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
        """A new one behind the first `length` tokens."""
        fresh = TrackedSession(self._start, self._grammar, self._vocabulary)
        fresh.advance(0, self.tokens[:length])
        return fresh

    def _rollback(self, length: int) -> None:
        if self._session is not None:
            if self._start.spec.begin_after and length < self._begin:
                self._session = None
            else:
                self._session.rollback(len(self.tokens) - length)
        del self.tokens[length:]

    def flags(self) -> int:
        """`FINISHED` where nothing but the end may follow, else 0."""
        return FINISHED if self._session is not None and self._session.is_finished() else 0

    def fill(self, row: np.ndarray) -> None:
        """Writes the row for the next token. Before the constraint begins all may come but the end."""
        accepting = False
        if self._session is None:
            row[:] = -1
            self._vocabulary.forbid_padding(row)
        else:
            self._session.fill(row)
            accepting = self._session.is_accepting()
        self._vocabulary.set_tokens(row, self._start.end_token_ids, accepting)
        if not row.any():
            raise ValueError(f"the grammar allows no token at output position {len(self.tokens)}")

    def adjustments(self) -> tuple[list[int], list[float]]:
        adjust = getattr(self._session, "adjustments", None)
        return adjust() if adjust is not None else ([], [])

    def forced_tokens(self) -> list[int]:
        """What must follow; none before the constraint begins."""
        return [] if self._session is None else self._session.forced_tokens()


class GrammarWorker:
    """Owns the sessions that the pool gave it. `handle` is called by one thread at a time."""

    def __init__(self, vocabulary: Vocabulary, buffer: MaskBuffer, index: int) -> None:
        self._vocabulary = vocabulary
        self._buffer = buffer
        self._index = index
        self._backends: dict[str, Backend] = {}
        self._grammars: OrderedDict[ConstraintSpec, Grammar] = OrderedDict()
        self._sessions: dict[int, TrackedSession] = {}
        self.stopped = False
        """Set by the pool when it has given this worker up: it writes nothing more."""

    def warm_up(self) -> None:
        """Makes the backend that most sessions will ask for. Where that fails, a session that asks for it hears why."""
        with contextlib.suppress(Exception):
            self._backend(AUTO[0])

    def handle(self, message: Message) -> None:
        """First every session takes its tokens, so that one that is finished says so early; then rows are filled,
        those that were quick last time first, and then those of drafts.
        """
        for session_id in message.ended:
            self._sessions.pop(session_id, None)
        to_fill = [job for job in message.jobs if self._attempt(job, self._advance)]
        if len(to_fill) > 1:
            to_fill.sort(key=lambda job: self._sessions[job.session_id].seconds)
        with_drafts = [job for job in to_fill if self._attempt(job, self._fill)]
        for job in with_drafts:
            self._attempt(job, self._fill_drafts)
        self._buffer.current[self._index] = 0
        self._buffer.acknowledged[self._index] = message.number

    def _attempt(self, job: Job, work: Callable[[Job], bool]) -> bool:
        """Whatever a backend raises costs one sequence, never the worker. False where nothing is left to do."""
        if self.stopped or self._buffer.cancelled[job.slot]:
            return False
        self._buffer.current[self._index] = job.session_id + 1
        try:
            return work(job)
        except Exception as error:
            self._sessions.pop(job.session_id, None)
            if job.wants_row:
                self._buffer.set_error(job.slot, f"{type(error).__name__}: {error}")
                self._publish(job, job.slot, FAILED)
            return False

    def _advance(self, job: Job) -> bool:
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

    def _fill(self, job: Job) -> bool:
        if job.wants_row:
            self._fill_row(job, job.slot, job.num_forced)
        return bool(job.draft_slots)

    def _fill_drafts(self, job: Job) -> bool:
        """A draft over which the grammar fails is refused: should it become a token, the session fails then."""
        tracked, buffer = self._sessions[job.session_id], self._buffer
        num_known, num_rows, flags = job.first + len(job.token_ids), 0, 0
        try:
            for token_id, slot in zip(job.draft_token_ids, job.draft_slots, strict=False):
                if self.stopped or buffer.drafts_wanted[job.slot] != job.number:
                    return False
                if flags or not tracked.accept_draft(token_id):
                    break
                flags = tracked.flags()
                if flags:
                    self._publish(job, slot, flags)
                else:
                    is_last = num_rows + 1 == len(job.draft_slots)
                    self._fill_row(job, slot, job.num_forced if is_last else 0)
                num_rows += 1
        except Exception:
            self._sessions[job.session_id] = tracked.rebuilt(num_known)
        for slot in job.draft_slots[num_rows:]:
            self._publish(job, slot, REFUSED)
        return False

    def _fill_row(self, job: Job, slot: int, num_forced: int) -> None:
        """Writes all that belongs to a row, behind the tokens that the session has."""
        tracked, buffer = self._sessions[job.session_id], self._buffer
        started = time.perf_counter()
        tracked.fill(buffer.rows[slot])
        ids, values = tracked.adjustments()
        if len(ids) > MAX_ADJUSTMENTS:
            raise ValueError(f"{len(ids)} adjusted logits exceed the limit of {MAX_ADJUSTMENTS} a token")
        if not np.isfinite(values).all():
            raise ValueError(f"adjustments must be finite, not {values}")
        forced = tracked.forced_tokens()[:num_forced] if num_forced else []
        tracked.seconds = time.perf_counter() - started
        if not self.stopped:
            buffer.adjusted_ids[slot, : len(ids)] = ids
            buffer.adjusted_by[slot, : len(ids)] = values
            buffer.forced_ids[slot, : len(forced)] = forced
            self._publish(job, slot, 0, len(ids), len(forced))

    def _publish(self, job: Job, slot: int, flags: int, num_adjustments: int = 0, num_forced: int = 0) -> None:
        if not self.stopped:
            buffer = self._buffer
            buffer.num_adjustments[slot] = num_adjustments
            buffer.num_forced[slot] = num_forced
            buffer.flags[slot] = flags
            buffer.done[slot] = job.number

    def _backend(self, name: str) -> Backend:
        if name not in self._backends:
            self._backends[name] = make_backend(name, self._vocabulary)
        return self._backends[name]

    def _grammar(self, start: SessionStart) -> Grammar:
        grammar = self._grammars.get(start.spec)
        if grammar is None:
            grammar = self._backend(start.spec.backend).load(start.spec, start.compiled)
            self._grammars[start.spec] = grammar
            while len(self._grammars) > 1 and sum(g.num_bytes for g in self._grammars.values()) > GRAMMAR_CACHE_BYTES:
                self._grammars.popitem(last=False)
        self._grammars.move_to_end(start.spec)
        return grammar
