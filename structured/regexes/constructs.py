"""Finds the constructs of a regular expression that grammar backends do not have, and where they stand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple


class Construct(NamedTuple):
    name: str
    text: str
    """Beginning of the construct."""
    position: int
    """Characters of the pattern in front of it."""

    def __str__(self) -> str:
        return f"the {self.name} {self.text} at position {self.position}"


LAZY = "non-greedy quantifier"
LOOKS = ("lookahead", "lookbehind", "word boundary")
"""The constructs that automata can rewrite."""
_GROUPS = (
    ("(?<=", "lookbehind"),
    ("(?<!", "lookbehind"),
    ("(?=", "lookahead"),
    ("(?!", "lookahead"),
    ("(?>", "atomic group"),
    ("(?P=", "backreference"),
    ("(?(", "conditional"),
)
_ESCAPES = {"b": "word boundary", "B": "word boundary", **dict.fromkeys("123456789", "backreference")}
_QUANTIFIER = re.compile(r"[*+?]|\{[0-9]*,?[0-9]*\}")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)


def constructs(pattern: str) -> Iterator[Construct]:
    """The constructs in the order of the pattern. Classes of characters hold none."""
    at, may_repeat = 0, False
    while at < len(pattern):
        text, name = pattern[at], ""
        found = None
        if text == "\\":
            text = pattern[at : at + 2]
            name = _ESCAPES.get(text[1:], "")
        elif text == "[" and (found := _CLASS.match(pattern, at)) is not None:
            text = found.group()
        elif text == "(":
            text, name = next(((mark, name) for mark, name in _GROUPS if pattern.startswith(mark, at)), (text, ""))
        elif may_repeat and (found := _QUANTIFIER.match(pattern, at)) is not None:
            yield from _greed(pattern, found)
            at = found.end() + (pattern[found.end() : found.end() + 1] in ("?", "+"))
            may_repeat = False
            continue
        if name:
            yield Construct(name, text, at)
        may_repeat = text not in ("(", "|") and not text.startswith("(?")
        at += len(text)


def _greed(pattern: str, quantifier: re.Match[str]) -> Iterator[Construct]:
    following = pattern[quantifier.end() : quantifier.end() + 1]
    if following in ("?", "+") and following:
        name = LAZY if following == "?" else "possessive quantifier"
        yield Construct(name, quantifier.group() + following, quantifier.start())
