"""Strikes from a mask the tokens that would complete, or begin, a value which a guard forbids.

A value can only become wrong at the token that completes it, except where the grammar may allow anything. So the guard
tries only the allowed tokens that could do that.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from manta.structured.masks import row_words
from manta.structured.schemas.guard import (
    AFTER,
    FIRST_KEY,
    KEY,
    KEY_STRING,
    SCALAR,
    STRING,
    Frame,
    Guard,
    State,
    is_free,
)
from manta.structured.vocabulary import Vocabulary

_ENDS = b",]} \t\r\nel"
"""Bytes that complete a number or a literal."""
_BETWEEN_PROPERTIES = (FIRST_KEY, KEY, AFTER)
"""Modes in which the next bytes separate properties, or begin a name."""
_COMPLETING = frozenset(b"]}el0123456789")
"""Bytes that complete a value outside of strings."""
_BEGINNING = _COMPLETING | frozenset(b'"[{tfn-')
"""Bytes that complete a value or begin one."""


class TokenClasses:
    """The tokens that can complete a value, by what they continue: packed rows, int32 `[ceil(width / 32)]`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        quoted, twice, beyond, further, ending, ready = [], [], [], [], [], []
        self.closing: dict[bytes, list[int]] = {}
        """Tokens by what they begin with, up to their first quote."""
        self.unquoted: dict[bytes, list[int]] = {}
        """Tokens without a quote."""
        for token_id, token in enumerate(vocabulary.tokens):
            begun, quote, rest = token.partition(b'"')
            if quote:
                quoted.append(token_id)
                self.closing.setdefault(begun + quote, []).append(token_id)
                if any(byte in b'"]}el0123456789' for byte in rest):
                    twice.append(token_id)
                if not _BEGINNING.isdisjoint(rest):
                    beyond.append(token_id)
                if b"," in rest:
                    further.append(token_id)
            else:
                self.unquoted.setdefault(token, []).append(token_id)
            if any(byte in _ENDS for byte in token):
                ending.append(token_id)
            if not quote or b'"' in rest or not _COMPLETING.isdisjoint(begun):
                ready.append(token_id)
        self.quoted, self.twice, self.ending = (_packed(ids, vocabulary) for ids in (quoted, twice, ending))
        """Tokens that may close a string, that may complete more than that, and that may end a number or literal."""
        self.beyond, self.ready = (_packed(ids, vocabulary) for ids in (beyond, ready))
        """Tokens that may close a string and complete or begin more; and those that, outside of a string, may do more
        than begin one.
        """
        self.following = _packed([*beyond, *further], vocabulary)
        """Tokens that may close a string and complete, begin or separate more."""


def _packed(token_ids: list[int], vocabulary: Vocabulary) -> np.ndarray:
    row = np.zeros(row_words(vocabulary.vocab_size), dtype=np.int32)
    vocabulary.set_tokens(row, tuple(token_ids), True)
    return row


class _Verdicts(NamedTuple):
    """The tokens that are struck, in one frame and mode of a guard."""

    frame: Frame | None
    mode: int
    of_tokens: dict[int, bool]


@functools.lru_cache(maxsize=2)
def classes_of(vocabulary: Vocabulary) -> TokenClasses:
    return TokenClasses(vocabulary)


class Striker:
    """Takes from a row the tokens that would complete a value which a guard forbids."""

    def __init__(self, guard: Guard, vocabulary: Vocabulary) -> None:
        self.guard = guard
        self._vocabulary = vocabulary
        self._ends = frozenset(vocabulary.eos_token_ids)
        self._verdicts = _Verdicts(None, 0, {})

    def strike(self, row: np.ndarray, state: State, text: bytes) -> None:
        """`row` holds what the grammar allows after `text`, where the guard is in `state`."""
        names = self.guard.names_begun(state, text)
        if names is not None:
            row &= self._writing(names)
        candidates = self._candidates(row, state, text)
        if candidates is None:
            return
        tokens = self._vocabulary.tokens
        known = self._known_verdicts(state)
        with self.guard.one_mask():
            struck = []
            for token_id in token_ids_of(candidates):
                is_struck = known.get(token_id)
                if is_struck is None:
                    is_struck = token_id not in self._ends and self.guard.advance(state, text, tokens[token_id]) is None
                    known[token_id] = is_struck
                if is_struck:
                    struck.append(token_id)
        self._vocabulary.set_tokens(row, struck, False)

    def _known_verdicts(self, state: State) -> dict[int, bool]:
        """The verdicts so far on tokens in this state, by token id. They hold for all states that differ in the text of
        a string alone, unless a value is judged by its text.
        """
        if not self.guard.depends_on_place(state):
            return {}
        if self._verdicts.frame is not state.frame or self._verdicts.mode != state.mode:
            self._verdicts = _Verdicts(state.frame, state.mode, {})
        return self._verdicts.of_tokens

    def _candidates(self, row: np.ndarray, state: State, text: bytes) -> np.ndarray | None:
        """The allowed tokens that might complete something under a mark; None if there is no such token."""
        guard, classes = self.guard, classes_of(self._vocabulary)
        if guard.is_deep(state) or (guard.has_any_order and state.mode in _BETWEEN_PROPERTIES):
            return row
        if not guard.reaches_from(state):
            return None
        if state.mode == STRING and guard.is_hot(state):
            return row if self._has_domain(state) else row & self._closing(state, classes, text)
        if state.mode in (STRING, KEY_STRING):
            frame = state.frame if state.mode == KEY_STRING else None
            if frame is not None and (is_free(frame) or frame.place.may_forbid_names):
                return row & (classes.quoted | self._writing(guard.taken_begun(state, text)))
            return row & self._several(classes)
        if state.mode == SCALAR and not self._has_domain(state) and not guard.place_of(state).is_numeric:
            return row & classes.ending
        if state.mode == SCALAR or guard.has_open_places or self._has_domain(state):
            return row
        return row if guard.is_narrowed(state) else row & classes.ready

    def _writing(self, rests: list[bytes]) -> np.ndarray:
        """Tokens that write one of these texts, or begin one, or go on beyond its end, which is its first quote."""
        classes = classes_of(self._vocabulary)
        found: list[int] = []
        for rest in rests:
            found += classes.closing.get(rest, ())
            for length in range(1, len(rest)):
                found += classes.unquoted.get(rest[:length], ())
        return _packed(found, self._vocabulary)

    def _several(self, classes: TokenClasses) -> np.ndarray:
        """Tokens that close a string and do something more that may be wrong."""
        begins_wrong = self.guard.has_open_places or self.guard.has_branches
        if self.guard.has_any_order:
            return classes.following
        return classes.beyond if begins_wrong else classes.twice

    def _closing(self, state: State, classes: TokenClasses, text: bytes) -> np.ndarray:
        """Tokens that might complete the string wrongly. If it must only differ from others, those are the tokens that
        go on as one of the others does. A backslash may spell a character in two ways, so then each token is tried.
        """
        frame, begun = state.frame, text[state.start :]
        is_judged = self.guard.place_of(state).is_judged or self.guard.tells_apart(state)
        if frame is None or is_judged or b"\\" in begun:
            return classes.quoted
        found: list[int] = []
        for other in frame.texts:
            if b"\\" in other:
                return classes.quoted
            if other.startswith(begun):
                found += classes.closing.get(other[len(begun) :], ())
        row = self._several(classes).copy()
        self._vocabulary.set_tokens(row, found, True)
        return row

    def _has_domain(self, state: State) -> bool:
        guard = self.guard
        return guard.place_of(state).domain() is not None or guard.narrowed_domain(state) is not None


def token_ids_of(row: np.ndarray) -> list[int]:
    """The tokens that a packed row of int32 holds."""
    used = np.flatnonzero(row)  # few words, mostly
    words, bits = np.nonzero(np.unpackbits(row[used].view(np.uint8).reshape(-1, 4), axis=1, bitorder="little"))
    return (used[words] * 32 + bits).tolist()
