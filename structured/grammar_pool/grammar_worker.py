"""The grammar worker: fills mask rows, in a thread of the engine's process or in a Ray actor of the pool.

It knows sessions by id, their output tokens by count and jobs by number, so that a message that comes twice, late or
out of order does no harm. It answers only through the `MaskBuffer`. Imports neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from structured.backend import DeadEnd, Grammar, Session
from structured.backends.choose import AUTO, Backends
from structured.constraint import ConstraintSpec
from structured.lru import ByteLRU
from structured.masks import DEAD_END, FAILED, FINISHED, MAX_ADJUSTMENTS, MAX_CHOICES, REFUSED, MaskBuffer
from structured.vocabulary import Vocabulary

GRAMMAR_CACHE_BYTES = 64 * 2**20
"""Most bytes of grammars that one worker keeps."""
MAX_GROWTH_BYTES = 16 * 2**20
"""If sessions make a grammar grow by more than this, it is built anew for the next session, in a millisecond or so."""
ENTRY_BYTES = 1000
"""What a cache entry holds besides the grammar and the constraint's text."""

_NO_ADJUSTMENTS = (np.empty(0, np.int32), np.empty(0, np.float32))


class SessionStart(msgspec.Struct, frozen=True, array_like=True):
    """What a grammar worker builds a session from."""

    spec: ConstraintSpec
    compiled: bytes
    end_token_ids: tuple[int, ...]
    """Tokens that end the sequence: they are allowed if and only if the grammar lets the text end."""


class Job(msgspec.Struct, frozen=True, array_like=True):
    """The request to fill rows of one session: the mask of the token after output tokens `[0, first +
    len(token_ids))`, and of the token after each of the drafts that follow them.
    """

    session_id: int
    number: int
    """Unique: filled rows are marked with it."""
    slot: int
    first: int
    token_ids: list[int]
    """Output tokens from `first` on; the worker holds those before."""
    draft_token_ids: list[int] = []
    draft_slots: list[int] = []
    """Entry `i` is for the row after `draft_token_ids[: i + 1]`; the entries of the last drafts may be missing."""
    wants_row: bool = True
    """False if the row of `slot` was asked for before, so that only the drafts' rows are wanted."""
    num_forced: int = 0
    """Most forced tokens to look for after the last output token, and after the last draft."""
    start: SessionStart | None = None
    """For a session that this worker does not hold."""


class Message(msgspec.Struct, frozen=True, array_like=True):
    """What the pool sends to one worker, at most once in each step."""

    number: int
    jobs: list[Job]
    ended: list[int]
    """Sessions to forget before the jobs are done."""


class TrackedSession:
    """A session and the output tokens that it has accepted, of which it is a function.

    Drafts count as output tokens until `advance` takes them back.
    """

    def __init__(self, start: SessionStart, grammar: Grammar, vocabulary: Vocabulary) -> None:
        self.spec = start.spec
        self._start = start
        self._vocabulary = vocabulary
        self._grammar = grammar
        self._session: Session | None = None
        self._begin = 0
        """Number of output tokens before the constraint begins."""
        self.tokens: list[int] = []
        self.seconds = 0.0
        """Time that the last row took."""
        self._looks_past_choices = True
        self._num_fruitless = 0
        """Looks past a choice, in a row, that found nothing forced."""
        self._num_to_skip = 0
        """Rows that `look_ahead` lets pass before it looks past a choice again."""
        if not start.spec.begin_after:
            self._session = grammar.session()

    def advance(self, first: int, token_ids: Sequence[int]) -> None:
        """Makes the output `tokens[:first] + token_ids`. Raises `ValueError` if tokens are missing or refused."""
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
        """Advances by a token that the sequence may never get. Returns False and leaves the state unchanged if the
        grammar refuses the token or it would end the sequence.
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
        """A new session that has accepted the first `length` tokens, and does not look past choices."""
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
        """Writes the row for the next token. Before the constraint begins, all tokens are allowed but the end
        tokens.
        """
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

    def adjustments(self) -> tuple[np.ndarray, np.ndarray]:
        """Token ids int32 [n] and the values that are added to their logits, float32 [n]. Raises `ValueError` if a
        sampler could not add them.
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
        """The continuations that `MaskBuffer.forced` returns for a row, with at most `num_tokens` tokens each. The
        state is unchanged.

        Looking past a choice costs a little. Each time it finds nothing, more rows pass before the next look.
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
        """The tokens that are forced if `token_id` comes next. The state is unchanged."""
        if token_id in self._start.end_token_ids or not session.accept(token_id):
            return []
        forced = session.forced_tokens()
        session.rollback(1)
        return forced


def _allowed_tokens(row: np.ndarray) -> list[int]:
    """The tokens that a packed row allows."""
    words = np.flatnonzero(row)
    bits = np.flatnonzero(np.unpackbits(row[words].view(np.uint8), bitorder="little"))
    return (32 * words[bits // 32] + bits % 32).tolist()


class _Loaded(NamedTuple):
    grammar: Grammar
    max_bytes: int
    """If the grammar grows beyond this, it is not kept."""


class GrammarWorker:
    """Owns the sessions that the pool gave it. Only one thread at a time calls `handle`."""

    def __init__(self, vocabulary: Vocabulary, buffer: MaskBuffer, index: int) -> None:
        self._vocabulary = vocabulary
        self._buffer = buffer
        self._index = index
        buffer.cached[index] = 0
        self._backends = Backends(vocabulary)
        self._grammars: ByteLRU[ConstraintSpec, _Loaded] = ByteLRU(GRAMMAR_CACHE_BYTES)
        self._sessions: dict[int, TrackedSession] = {}
        self.stopped = False
        """The pool sets it when it gives this worker up: the worker then publishes nothing more and begins no job."""

    def warm_up(self) -> None:
        """Makes the backend that most sessions will ask for. If that fails, the error comes back, with its reason, when
        a session asks for it.
        """
        with contextlib.suppress(Exception):
            self._backends.get(AUTO[0])

    def handle(self, message: Message) -> None:
        """First every session accepts its tokens, so that a finished one is reported early. Then the rows are filled,
        beginning with the sessions that were quick last time. Drafts and forced tokens come last.
        """
        for session_id in message.ended:
            self._sessions.pop(session_id, None)
        to_fill = [job for job in message.jobs if self._attempt(job, self._advance)]
        if len(to_fill) > 1:
            to_fill.sort(key=lambda job: self._sessions[job.session_id].seconds)
        to_look_ahead = [job for job in to_fill if self._attempt(job, self._fill)]
        for job in to_look_ahead:
            self._attempt(job, self._look_ahead)
        self._buffer.current[self._index] = 0
        self._buffer.cached[self._index] = len(self._grammars), self._grammars.num_bytes
        self._buffer.acknowledged[self._index] = message.number

    def _attempt(self, job: Job, work: Callable[[Job], bool]) -> bool:
        """Does one part of a job; returns False if nothing is left to do for it. Whatever a backend raises, even
        `SystemExit` or the panic of a Rust library, ends one sequence and never the worker.
        """
        # The order matters: the pool sets `stopped`, then reads `current` to know where this worker may still write.
        self._buffer.current[self._index] = job.session_id + 1
        if self.stopped or self._buffer.cancelled[job.slot]:
            return False
        try:
            return work(job)
        except BaseException as error:
            tracked = self._sessions.pop(job.session_id, None)
            for source in (tracked, job.start):
                if source is not None:
                    self._grammars.forget(source.spec)  # what broke may be a part that all its sessions share
            if job.wants_row:
                self._buffer.set_error(job.slot, f"{type(error).__name__}: {error}")
                self._publish(job, job.slot, FAILED)
            return False

    def _advance(self, job: Job) -> bool:
        """Gives the session its tokens; returns False if only the end may follow, which is then published."""
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
        """Fills the wanted row; returns whether there is anything to look ahead for."""
        if job.wants_row:
            try:
                self._fill_row(job, job.slot)
            except DeadEnd:
                self._publish(job, job.slot, DEAD_END)
                return False
        return bool(job.draft_slots or job.num_forced)

    def _look_ahead(self, job: Job) -> bool:
        """Fills the drafts' rows and finds forced tokens; no step waits for them. If the grammar fails at a draft,
        which may never be drawn, the session goes back to its state before; if the draft is drawn, the session fails
        then.
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

    def _fill_row(self, job: Job, slot: int) -> None:
        """Writes the mask and the adjustments of the token after those that the session has accepted."""
        tracked, buffer = self._sessions[job.session_id], self._buffer
        started = time.perf_counter()
        tracked.fill(buffer.rows[slot])
        ids, values = tracked.adjustments()
        tracked.seconds = time.perf_counter() - started
        if not self.stopped:
            buffer.adjusted_ids[slot, : len(ids)] = ids
            buffer.adjusted_by[slot, : len(ids)] = values
            self._publish(job, slot, 0, len(ids))
        self._reweigh(tracked.spec)

    def _publish(self, job: Job, slot: int, flags: int, num_adjustments: int = 0) -> None:
        """Marks a slot as done, after all that belongs to it was written."""
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
        """Updates the cache's count of a grammar's bytes; drops the grammar if it has grown too much."""
        loaded = self._grammars.get(spec)
        if loaded is None:
            return
        if loaded.grammar.num_bytes > loaded.max_bytes:
            self._grammars.forget(spec)
        else:
            self._keep(spec, loaded)
