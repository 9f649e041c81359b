"""Sessions whose grammar allows more than its schemas, and whose guards strike from each mask what these forbid.

`GuardedSession` is for a schema that stands alone. Its masks are exact, and no token is ever taken back.

`GuardedPartsSession` is for a grammar that holds schemas, some of which need a guard. Three kinds of llguidance's
matchers follow the text:

- One of the whole grammar, whose schemas allow too much. Its mask allows all that is right, and more.
- One of the *frame*: the grammar in which each guarded schema is replaced by a marker, a token that no model has.
- One for each guarded part, of its schema alone, beside which a guard follows the part's text.

A *reading* says where parts begin and end in the text so far. Readings branch where a part may begin, and where one
may end. They go byte by byte, because a token may lie across the border of a part. A token is allowed if the whole
grammar allows it and at least one reading goes on, so masks are exact; no token is ever taken back.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from manta.structured.backend import DeadEnd, Session
from manta.structured.backends.striker import Striker, token_ids_of
from manta.structured.constraint import ConstraintError
from manta.structured.schemas.guard import START, Guard, State
from manta.structured.vocabulary import Vocabulary

MAX_READINGS = 64
"""Most readings of one text. Those beyond it are not followed, so that what they alone allow is forbidden."""


# ---- a schema alone --------------------------------------------------------------------------------------------------


class GuardedSession:
    """Wraps the backend's session; every method is `Session`'s."""

    def __init__(self, session: Session, guard: Guard, vocabulary: Vocabulary) -> None:
        self.unguarded = session
        """The session of the grammar, which allows more."""
        self._guard = guard
        self._vocabulary = vocabulary
        self._striker = Striker(guard, vocabulary)
        self._states = [START]
        """The state before each token, and now."""
        self._text = bytearray()

    def accept(self, token_id: int) -> bool:
        if not self.unguarded.accept(token_id):
            return False
        token = self._vocabulary.tokens[token_id]
        state = self._guard.advance(self._states[-1], self._text, token)
        if state is None:
            self.unguarded.rollback(1)
            return False
        self._states.append(state)
        self._text += token
        return True

    def fill(self, row: np.ndarray) -> None:
        self.unguarded.fill(row)
        self._striker.strike(row, self._states[-1], bytes(self._text))
        if not self.is_accepting():
            self._vocabulary.set_tokens(row, self._vocabulary.eos_token_ids, False)
        if not row.any():
            raise DeadEnd(f"after {bytes(self._text[-40:])!r} nothing satisfies the schema")

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self.unguarded.rollback(num_tokens)
            del self._states[-num_tokens:]
            del self._text[self._states[-1].length :]

    def fork(self) -> GuardedSession:
        other = GuardedSession(self.unguarded.fork(), self._guard, self._vocabulary)
        other._states = list(self._states)
        other._text = bytearray(self._text)
        return other

    def forced_tokens(self) -> list[int]:
        """The forced tokens up to the first that the guard would strike."""
        state: State | None = self._states[-1]
        text, kept = bytes(self._text), []
        for token_id in self.unguarded.forced_tokens():
            token = self._vocabulary.tokens[token_id]
            state = self._guard.advance(state, text, token) if state is not None else None
            if state is None:
                break
            text += token
            kept.append(token_id)
        return kept

    def is_accepting(self) -> bool:
        return self.unguarded.is_accepting() and self._guard.may_end(self._states[-1], bytes(self._text))

    def is_finished(self) -> bool:
        return self.unguarded.is_finished() and self.is_accepting()


# ---- schemas within a grammar ----------------------------------------------------------------------------------------


class Matcher(Protocol):
    """The methods of `llguidance.LLMatcher` that are used here."""

    def try_consume_tokens(self, tokens: list[int]) -> int: ...
    def rollback(self, num_tokens: int) -> bool: ...
    def deep_copy(self) -> Matcher: ...
    def is_accepting(self) -> bool: ...
    def is_stopped(self) -> bool: ...
    def is_error(self) -> bool: ...
    def get_error(self) -> str: ...


class Part(NamedTuple):
    """A guarded schema."""

    matcher: Matcher
    """Matcher at the beginning of the part. Sessions copy it."""
    striker: Striker


class Parts(NamedTuple):
    """The parts of a grammar that all its sessions share."""

    frame: Matcher
    """Matcher of the text around the parts, at its beginning. Sessions copy it."""
    num_parts: int
    part: Callable[[int], Part]
    """Makes a part when it is first reached: of many tools a request calls few."""
    first_marker: int
    """The token that begins every part; behind it stands the token of the part, one more than the part before."""
    special: frozenset[int]
    """Tokens that no schema takes."""
    named: frozenset[int]
    """Tokens that the frame takes as themselves: it names them, or they are special."""
    of_bytes: dict[int, int]
    """The token of each byte that occurs in a token."""
    fill: Callable[[Any, np.ndarray], None]
    """Writes a matcher's mask."""


class Reading(NamedTuple):
    """One way to divide the text so far."""

    frame: Matcher
    """While a part is being written, it waits behind the part's markers."""
    part: Part | None = None
    matcher: Matcher | None = None
    """The part's."""
    state: State = START

    @property
    def active(self) -> Matcher:
        return self.frame if self.matcher is None else self.matcher


class Accepted(NamedTuple):
    """The state before an accepted token, to which a rollback returns."""

    readings: list[Reading]
    """Readings before the token."""
    consumed: list[Matcher]
    """The matchers that have moved on by one, once for each time."""
    length: int
    """Bytes of the text before it."""


class GuardedPartsSession:
    """Every method is `Session`'s."""

    def __init__(self, session: Session, parts: Parts, vocabulary: Vocabulary) -> None:
        self.unguarded = session
        """The session of the whole grammar, which allows more."""
        self._parts = parts
        self._vocabulary = vocabulary
        self._text = bytearray()
        self._consumed: list[Matcher] = []
        """Matchers that have moved on since the last token was accepted."""
        self._accepted: list[Accepted] = []
        self._readings = self._closed([Reading(parts.frame.deep_copy())])

    # ---- readings ----------------------------------------------------------------------------------------------------

    def _closed(self, readings: list[Reading]) -> list[Reading]:
        """Adds the readings in which a part ends here, and those in which one begins here."""
        found: list[Reading] = []
        for reading in readings:
            if reading.matcher is None:
                found.append(reading)
                continue
            if self._may_end(reading):
                found.append(Reading(reading.frame.deep_copy()))
            if not reading.matcher.is_stopped():
                found.append(reading)
        for reading in list(found):
            if reading.matcher is None:
                found += self._entered(reading.frame)
        return found[:MAX_READINGS]

    def _may_end(self, reading: Reading) -> bool:
        part, matcher = reading.part, reading.matcher
        assert part is not None
        assert matcher is not None
        return matcher.is_accepting() and part.striker.guard.may_end(reading.state, self._text)

    def _entered(self, frame: Matcher) -> list[Reading]:
        """The readings in which a part begins here."""
        first, found = self._parts.first_marker, []
        if frame.is_stopped() or not frame.try_consume_tokens([first]):
            return []
        for index in range(self._parts.num_parts):
            if frame.try_consume_tokens([first + 1 + index]):
                part = self._parts.part(index)
                state = START._replace(length=len(self._text))
                found.append(Reading(frame.deep_copy(), part, part.matcher.deep_copy(), state))
                frame.rollback(1)
        frame.rollback(1)
        return found

    def _consume(self, matcher: Matcher, token_id: int) -> bool:
        if not matcher.is_stopped() and matcher.try_consume_tokens([token_id]):
            self._consumed.append(matcher)
            return True
        if matcher.is_error():
            raise ConstraintError.because("unfit", "", cause=matcher.get_error().partition("<state>")[0].strip())
        return False

    def _advance(self, token_id: int) -> bool:
        """Moves the readings on by one token; False if none is left. `_undo` takes it back either way."""
        token = self._vocabulary.tokens[token_id]
        self._accepted.append(Accepted(self._readings, self._consumed, len(self._text)))
        self._consumed = []
        taken: list[Reading] = []
        if token_id in self._parts.named:
            taken = [each for each in self._readings if each.matcher is None and self._consume(each.frame, token_id)]
            self._readings = [each for each in self._readings if each.matcher is not None]
            if token_id in self._parts.special:
                self._readings = []
        for byte in token:
            if self._readings:
                self._advance_byte(byte)
        self._text[self._accepted[-1].length :] = token
        self._readings = [*self._closed(taken), *self._readings][:MAX_READINGS]
        return bool(self._readings)

    def _advance_byte(self, byte: int) -> None:
        data, found = bytes([byte]), []
        for reading in self._readings:
            if not self._consume(reading.active, self._parts.of_bytes[byte]):
                continue
            if reading.part is None:
                found.append(reading)
                continue
            state = reading.part.striker.guard.advance(reading.state, self._text, data)
            if state is not None:
                found.append(reading._replace(state=state))
        self._text += data
        self._readings = self._closed(found)

    def _undo(self) -> None:
        for matcher, count in Counter(map(_Identity, self._consumed)).items():
            if not matcher.it.rollback(count):
                cause = f"rollback of {count} tokens failed: {matcher.it.get_error()}"
                raise ConstraintError.because("unfit", "", cause=cause)
        self._readings, self._consumed, length = self._accepted.pop()
        del self._text[length:]

    # ---- a session ---------------------------------------------------------------------------------------------------

    def accept(self, token_id: int) -> bool:
        if not self.unguarded.accept(token_id):
            return False
        if self._advance(token_id):
            return True
        self._undo()
        self.unguarded.rollback(1)
        return False

    def fill(self, row: np.ndarray) -> None:
        self.unguarded.fill(row)
        allowed, across = self._within_parts(row)
        across &= row
        self._vocabulary.set_tokens(across, self._vocabulary.eos_token_ids, False)
        passing = self._passing(token_ids_of(across))
        row &= allowed
        self._vocabulary.set_tokens(row, passing, True)
        self._vocabulary.set_tokens(row, self._vocabulary.eos_token_ids, self.is_accepting())
        if not row.any():
            raise DeadEnd(f"after {bytes(self._text[-40:])!r} nothing satisfies the schema")

    def _passing(self, token_ids: list[int]) -> list[int]:
        """The tokens that some reading takes, which are tried one by one."""
        guards = {id(each.part): each.part.striker.guard for each in self._readings if each.part is not None}
        passing = []
        with contextlib.ExitStack() as bounds:
            for guard in guards.values():
                bounds.enter_context(guard.one_mask())
            for token_id in token_ids:
                if self._advance(token_id):
                    passing.append(token_id)
                self._undo()
        return passing

    def _within_parts(self, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that stay within the part, or the frame, of some reading, and those that must be tried."""
        allowed, text, mask = np.zeros_like(row), bytes(self._text), np.empty_like(row)
        struck = np.zeros_like(row)
        for reading in self._readings:
            self._parts.fill(reading.active, mask)
            if reading.part is not None:
                before = mask.copy()
                reading.part.striker.strike(mask, reading.state, text)
                if reading.state.frame is not None:
                    struck |= before & ~mask
            allowed |= mask
        tried = ~allowed
        if len(self._readings) == 1:  # nothing else could allow what is struck within an array or object
            tried &= ~struck
        return allowed, tried

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self.unguarded.rollback(num_tokens)
            for _ in range(num_tokens):
                self._undo()

    def fork(self) -> GuardedPartsSession:
        other = GuardedPartsSession(self.unguarded.fork(), self._parts, self._vocabulary)
        copies: dict[int, Matcher] = {}

        def copy(matcher: Matcher) -> Matcher:
            if id(matcher) not in copies:
                copies[id(matcher)] = matcher.deep_copy()
            return copies[id(matcher)]

        def copied(readings: list[Reading]) -> list[Reading]:
            return [
                each._replace(frame=copy(each.frame), matcher=None if each.matcher is None else copy(each.matcher))
                for each in readings
            ]

        other._readings = copied(self._readings)
        other._consumed = [copy(each) for each in self._consumed]
        other._accepted = [
            Accepted(copied(each.readings), [copy(it) for it in each.consumed], each.length) for each in self._accepted
        ]
        other._text = bytearray(self._text)
        return other

    def forced_tokens(self) -> list[int]:
        """The forced tokens up to the first that no reading allows."""
        kept: list[int] = []
        num_tried = 0
        for token_id in self.unguarded.forced_tokens():
            num_tried += 1
            if not self._advance(token_id):
                break
            kept.append(token_id)
        for _ in range(num_tried):
            self._undo()
        return kept

    def is_accepting(self) -> bool:
        return self.unguarded.is_accepting() and any(
            each.matcher is None and each.frame.is_accepting() for each in self._readings
        )

    def is_finished(self) -> bool:
        return self.unguarded.is_finished() and self.is_accepting()


class _Identity:
    """A matcher as a key."""

    def __init__(self, it: Matcher) -> None:
        self.it = it

    def __hash__(self) -> int:
        return id(self.it)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.it is self.it
