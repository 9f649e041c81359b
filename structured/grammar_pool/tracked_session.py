"""A session as a grammar worker holds it: the grammar's own, the output tokens that it has accepted, and the thinking
section before the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from manta.structured.backend import DeadEnd, Grammar, Session, begin
from manta.structured.constraint import ConstraintSpec
from manta.structured.masks import FINISHED, MAX_ADJUSTMENTS, MAX_CHOICES, allowed_of, allows_a_token
from manta.structured.thinking import ThinkingSection, ThinkingTracker
from manta.structured.vocabulary import Vocabulary

QUICK_S = 0.001
"""A session whose last row took less than this may be filled together with others, which then wait for it."""

FillAll = Callable[[Sequence[Any]], tuple[np.ndarray, list[Exception | None]]]
"""`JointSession.fill_all`."""

_NO_ADJUSTMENTS = (np.empty(0, np.int32), np.empty(0, np.float32))


class SessionStart(msgspec.Struct, frozen=True, array_like=True):
    """The data from which a grammar worker builds a session."""

    spec: ConstraintSpec | None
    """None for a sequence that has only a thinking section."""
    compiled: bytes
    end_token_ids: tuple[int, ...]
    """Tokens that end the sequence: the model's end-of-sequence tokens and the request's stop tokens."""
    thinking: ThinkingSection | None = None


class TrackedSession:
    """A session and the output tokens that it has accepted. Drafts count as output tokens until `advance` takes them
    back. Without a grammar only the thinking section restricts the output.
    """

    def __init__(self, start: SessionStart, grammar: Grammar | None, vocabulary: Vocabulary) -> None:
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
        thinking = start.thinking
        is_awaited = thinking is not None and not thinking.is_within_grammar
        self._marker = start.spec.begin_after if start.spec is not None else ()
        """Tokens after which the constraint begins, for a constraint that does not wait for a section's end."""
        self._waits = grammar is not None and (is_awaited or bool(self._marker))
        """Whether the grammar begins later than the output."""
        self._thinking = None if thinking is None else ThinkingTracker(thinking, vocabulary, self._waits)
        if not self._waits:
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
        if self._session is not None and not self._session.accept(token_id):
            raise ValueError(f"the grammar refuses token {token_id} at output position {len(self.tokens)}")
        self._append(token_id)

    def _append(self, token_id: int) -> None:
        self.tokens.append(token_id)
        if self._thinking is not None:
            self._thinking.advance(token_id)
        if self._waits and self._session is None and self._is_answer_next():
            self._begin = len(self.tokens)
            self._session = self._begin_session()

    def _is_answer_next(self) -> bool:
        if self._thinking is not None:
            return self._thinking.is_answering
        return tuple(self.tokens[-len(self._marker) :]) == self._marker

    def _begin_session(self) -> Session | None:
        if self._grammar is None or self.spec is None:
            return None
        return begin(self._grammar, self.spec.begun, self._vocabulary)

    def accept_draft(self, token_id: int) -> bool:
        """Advances by a draft. Returns False and keeps the state if the grammar refuses the token or it would end the
        sequence.
        """
        if token_id in self._start.end_token_ids or (
            self._thinking is not None and not self._thinking.allows(token_id)
        ):
            return False
        accepted = self._session is None or self._session.accept(token_id)
        if accepted:
            self._append(token_id)
        return accepted

    def rebuilt(self, length: int) -> TrackedSession:
        """Returns a new session over the first `length` tokens, which does not look past choices."""
        fresh = TrackedSession(self._start, self._grammar, self._vocabulary)
        fresh.advance(0, self.tokens[:length])
        fresh._looks_past_choices = False
        return fresh

    def _rollback(self, length: int) -> None:
        if self._session is not None:
            if self._waits and length < self._begin:
                self._session = None
            else:
                self._session.rollback(len(self.tokens) - length)
        if self._thinking is not None:
            self._thinking.rollback(length)
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
    def is_free(self) -> bool:
        """Whether nothing restricts the output from here on: there is no grammar, and the answer has begun."""
        return self._grammar is None and self._thinking is not None and self._thinking.is_answering

    @property
    def takes_rows_as_filled(self) -> bool:
        """Whether `complete` changes nothing in a row of `fill_all`, and no logits are adjusted."""
        has_adjustments = getattr(self._session, "adjustments", None) is not None
        is_restricted = self._thinking is not None and not self._thinking.is_answering
        return self._session is not None and not (self._stop_ids or has_adjustments or is_restricted)

    def complete(self, row: np.ndarray) -> None:
        """Allows or forbids the tokens that end the sequence, in a row that the session has filled. Raises `DeadEnd` if
        no token may follow.

        End tokens are allowed where the text may end. A stop token that the grammar takes is also allowed where it
        completes the text, and where nothing else may follow. Before the constraint begins, every token is allowed but
        end tokens that the mark of the beginning does not hold. The thinking section may forbid more.
        """
        self._complete_for_grammar(row)
        if self._thinking is not None:
            self._thinking.restrict(row)

    def _complete_for_grammar(self, row: np.ndarray) -> None:
        ends, vocabulary = self._start.end_token_ids, self._vocabulary
        if self._session is None:
            if self._waits:
                of_mark = self._marker if self._start.thinking is None else self._start.thinking.end_token_ids
                vocabulary.set_tokens(row, set(ends).difference(of_mark), False)
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
            return [] if self._thinking is None else [self._thinking.closing_tokens()[:num_tokens]]
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
