"""Regular expressions of JSON schemas: what a grammar is given of them, whether they exclude each other, what one
leaves out.

They are ECMA-262's (`structured/regexes/ecma.py`). Every function takes the pattern as the schema has it, and raises
`ConstraintError` for a pattern that no automaton can hold.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from manta.structured.regexes import languages
from manta.structured.regexes.automata import Dfa, TooLarge, Tree, class_text
from manta.structured.regexes.ecma import Unreadable
from manta.structured.regexes.matching import Matcher, matcher_of
from manta.structured.regexes.regex_constraint import refused

Result = TypeVar("Result")


def _read(function: Callable[[str], Result], pattern: str) -> Result:
    try:
        return function(pattern)
    except Unreadable as error:
        raise refused(error, f"the pattern {pattern[:80]!r}") from error


def is_plain(pattern: str) -> bool:
    """Whether a grammar takes the pattern as it is written: it neither looks around nor has anchors within."""
    return _read(languages.is_plain, pattern)


def is_small(pattern: str) -> bool:
    """Whether a grammar can have the pattern: its automaton is not too large."""
    try:
        _read(languages.expression, pattern)
    except TooLarge:
        return False
    return True


def for_grammar(pattern: str) -> str | None:
    """The pattern in the spelling that grammar backends read, with anchors at both ends; None if no text has it. Raises
    `TooLarge`.
    """
    found = _read(languages.expression, pattern)
    return None if found is None else f"^(?:{found})$"


def matcher(pattern: str) -> Matcher:
    """Raises `TooLarge`."""
    return _read(matcher_of, pattern)


def are_disjoint(found: list[str]) -> bool:
    """Whether it is proved that no text satisfies all of the patterns."""
    try:
        return functools.reduce(Dfa.and_, [_read(languages.automaton, pattern) for pattern in set(found)]).is_empty()
    except TooLarge:
        return False


def combined(wanted: list[str], unwanted: list[str]) -> str | None:
    """A pattern for the texts in which all of `wanted` and none of `unwanted` are found; None if there is no such text.
    Raises `TooLarge`.
    """
    parts = [_read(languages.automaton, pattern) for pattern in wanted]
    parts += [_read(languages.automaton, pattern).complement() for pattern in unwanted]
    expression = functools.reduce(Dfa.and_, parts).expression()
    return None if expression is None else f"^(?:{expression})$"


def without_texts(texts: list[str]) -> str | None:
    """A pattern for all texts but these. Raises `TooLarge`."""
    found = Dfa.of(("alt", tuple(_literal(text) for text in texts))).complement().expression()
    return None if found is None else f"^(?:{found})$"


def of_texts(texts: list[str]) -> str:
    """A pattern for these texts alone."""
    return "^(?:" + "|".join("".join(_escaped(character) for character in text) for text in texts) + ")$"


def of_beginning(text: str) -> str:
    """A pattern for all texts that begin so."""
    return "^" + "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    return class_text(((ord(character), ord(character)),))


def _literal(text: str) -> Tree:
    return ("cat", tuple(("set", ((ord(character), ord(character)),)) for character in text))
