"""Thinking sections in the output of a model: where they begin and end, and how many tokens they may have.

`cluster/chat/plan.py` describes the section of a request. `ThinkingTracker` follows it through the tokens of one
sequence, for `structured/grammar_pool/tracked_session.py`. Marks are looked for in the text, as those who read the
answer do, because a model may write a mark that is no token of its own in several ways.
"""

from __future__ import annotations

import functools

import msgspec
import numpy as np

from manta.structured.masks import allowed_of, allows_a_token
from manta.structured.vocabulary import Vocabulary, tokens_of


class ThinkingSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The thinking section of an answer, and the bound on its tokens."""

    begin: str
    """The mark that opens a section."""
    end: str
    """The mark that closes it."""
    end_token_ids: tuple[int, ...]
    """`end` as the model's tokenizer writes it."""
    answer: str = ""
    """The mark after which the answer begins, if that is not `end`."""
    is_open: bool = False
    """Whether the prompt ends inside the section. A grammar that waits for the answer needs an open section, or
    `answer`.
    """
    recurs: bool = False
    """Whether there may be several sections, anywhere in the output. Otherwise the one section is the first text."""
    is_within_grammar: bool = False
    """Whether the grammar covers the sections too. Otherwise it begins where the answer does."""
    budget: int | None = None
    """The most tokens of thinking, over all sections and without the marks; None for any number."""


class _State(msgspec.Struct, frozen=True, array_like=True):
    """What is known after some tokens."""

    phase: str
    """`before` a section or between two, `inside` one, or in the `answer`, where nothing changes any more."""
    tail: bytes = b""
    """The end of the text that may be the beginning of a mark."""
    num_tokens: int = 0
    """Tokens of thinking, and of the mark that `tail` may be the beginning of."""
    num_marking: int = 0
    """Tokens among them that hold a part of `tail`."""


class ThinkingTracker:
    """Follows the section through one sequence's output. Its state is a function of the tokens."""

    def __init__(self, section: ThinkingSection, vocabulary: Vocabulary, grammar_waits: bool) -> None:
        self._section = section
        self._json = vocabulary.tokenizer_json
        self._tokens = vocabulary.tokens
        self._vocabulary = vocabulary
        self._grammar_waits = grammar_waits
        self._begin, self._end, self._answer = (each.encode() for each in (section.begin, section.end, section.answer))
        self._states = [_State("inside" if section.is_open else "before")]
        """The state after each number of tokens, up to the first one in the answer."""

    @property
    def _now(self) -> _State:
        return self._states[-1]

    @property
    def is_answering(self) -> bool:
        """Whether the answer has begun, so that the tokens are no longer the tracker's business."""
        return self._now.phase == "answer"

    @property
    def _is_spent(self) -> bool:
        return self._section.budget is not None and self._now.num_tokens >= self._section.budget

    @property
    def is_closing(self) -> bool:
        """Whether the section must end with the next tokens."""
        return self._now.phase == "inside" and self._is_spent

    def advance(self, token_id: int) -> None:
        """Takes the next token."""
        if not self.is_answering:
            new = self._tokens[token_id] if token_id < len(self._tokens) else b""
            self._states.append(self._inside(new) if self._now.phase == "inside" else self._outside(new))

    def rollback(self, num_tokens: int) -> None:
        """Goes back to the state after the first `num_tokens` tokens."""
        del self._states[num_tokens + 1 :]

    def _inside(self, new: bytes) -> _State:
        now, end = self._now, self._end
        before, found, rest = (now.tail + new).partition(end)
        if not found:
            tail = _beginning_of(before, end)
            num_marking = now.num_marking + 1 if now.tail and tail.startswith(now.tail) else int(bool(tail))
            return _State("inside", tail, now.num_tokens + 1, num_marking)
        num_tokens = now.num_tokens - now.num_marking
        if not self._section.recurs:
            return _State("answer", b"", num_tokens)
        return _State("before", _beginning_of(rest, self._begin, self._answer), num_tokens)

    def _outside(self, new: bytes) -> _State:
        now, section = self._now, self._section
        text = now.tail + new
        if section.recurs:
            before, found, rest = text.partition(self._begin)
            if found:
                return _State("inside", _beginning_of(rest, self._end), now.num_tokens)
            if self._grammar_waits and self._answer in before:
                return _State("answer", b"", now.num_tokens)
            return _State("before", _beginning_of(before, self._begin, self._answer), now.num_tokens)
        text = text.lstrip()
        if text.startswith(self._begin):
            return _State("inside", _beginning_of(text.removeprefix(self._begin), self._end))
        return _State("before" if self._begin.startswith(text) else "answer", text)

    # ---- masks ---------------------------------------------------------------------------------------------------

    def restrict(self, row: np.ndarray) -> None:
        """Leaves in a packed row, int32 [words], the tokens that the section allows. A row that would allow none stays
        as it is: a grammar that covers the section may first have to complete a character.
        """
        if self.is_answering:
            return
        if self.is_closing:
            kept = allowed_of(row, self._closing_ids())
            if kept:
                row[:] = 0
                self._vocabulary.set_tokens(row, kept, True)
            return
        forbidden = self._forbidden_ids()
        if forbidden:
            restricted = row.copy()
            self._vocabulary.set_tokens(restricted, forbidden, False)
            if allows_a_token(restricted):
                row[:] = restricted

    def allows(self, token_id: int) -> bool:
        """Whether `restrict` leaves this token in a row that allows all."""
        if self.is_closing:
            return token_id in self._closing_ids()
        return self.is_answering or token_id not in self._forbidden_ids()

    def closing_tokens(self) -> list[int]:
        """The tokens that the section must end with, as the tokenizer writes them; empty if it need not end."""
        return self._rest_of_end() if self.is_closing else []

    def _rest_of_end(self) -> list[int]:
        """The tokens of `end` behind what of it is written; empty if that is not a number of these tokens."""
        ids, num_bytes = list(self._section.end_token_ids), len(self._now.tail)
        while ids and num_bytes > 0:
            num_bytes -= len(self._tokens[ids.pop(0)])
        return ids if num_bytes == 0 else []

    def _closing_ids(self) -> list[int]:
        """The tokens that may come next in a section that must end."""
        ids = self._rest_of_end()[:1]
        return ids or list(_spelling(self._json, self._end[len(self._now.tail) :]))

    def _forbidden_ids(self) -> tuple[int, ...]:
        now, section = self._now, self._section
        if now.phase == "before" and section.recurs and self._is_spent:
            num_common = _num_common(self._begin, self._answer)
            if now.tail == self._begin[:num_common]:
                return _spelling(self._json, self._begin[num_common:])
        if self._grammar_waits:
            # The grammar's first token is the one after the mark, so a token must not go beyond the mark.
            mark = self._answer if section.recurs else self._end
            return _overrunning(self._json, mark, now.tail)
        return ()


def _beginning_of(text: bytes, *marks: bytes) -> bytes:
    """Returns the longest end of `text` that is a beginning of one of the marks, and shorter than it."""
    for length in range(min(len(text), max(map(len, marks)) - 1), 0, -1):
        end = text[-length:]
        if any(mark.startswith(end) and mark != end for mark in marks):
            return end
    return b""


def _num_common(text: bytes, other: bytes) -> int:
    """Returns the number of leading bytes that are the same."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((index for index, (one, two) in pairs if one != two), min(len(text), len(other)))


@functools.lru_cache(maxsize=256)
def _spelling(tokenizer_json: str, text: bytes) -> tuple[int, ...]:
    """The tokens with which `text` may be written: each is a beginning of it."""
    return tuple(index for index, token in enumerate(tokens_of(tokenizer_json)) if token and text.startswith(token))


@functools.lru_cache(maxsize=256)
def _overrunning(tokenizer_json: str, mark: bytes, tail: bytes) -> tuple[int, ...]:
    """The tokens that complete a mark after `tail` and go on behind it."""
    last = mark[-1:]
    return tuple(
        index
        for index, token in enumerate(tokens_of(tokenizer_json))
        if last in token[:-1] and (tail + token).partition(mark)[2]
    )
