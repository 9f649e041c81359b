"""Regular expressions of JSON schemas as sets of texts: whether they exclude each other, and what one leaves out.

The dialects of ECMA-262, Python and llguidance differ in what `\\d`, `\\w`, `\\s`, `.` and `$` mean beyond ASCII and at
the end of a line. So each pattern has two readings: the wide one holds every text that any dialect finds, the narrow
one only those that all find. What else differs (`\\b`, references back, anchors within) is `Unreadable`, and nothing is
proved of it.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from manta.structured.schemas.automata import (
    ALL,
    ANY,
    MAX_CHARACTER,
    Dfa,
    Ranges,
    TooLarge,
    Tree,
    class_text,
    complement,
    ranges_of,
)

_BEYOND_ASCII = (0x80, MAX_CHARACTER)
_NARROW: dict[str, Ranges] = {
    "d": ((48, 57),),
    "w": ((48, 57), (65, 90), (95, 95), (97, 122)),
    "s": ((9, 13), (32, 32)),
}
_WIDE: dict[str, Ranges] = {
    "d": ranges_of([*_NARROW["d"], _BEYOND_ASCII]),
    "w": ranges_of([*_NARROW["w"], _BEYOND_ASCII]),
    "s": ranges_of([*_NARROW["s"], (28, 31), _BEYOND_ASCII]),
}
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11}
_WIDE_DOT = complement(((10, 10),))
_NARROW_DOT = complement(((10, 10), (13, 13), (0x2028, 0x2029)))
_LINE_END: Tree = ("repeat", ("set", ((10, 10),)), 0, 1)
_START: Tree = ("start",)
_END: Tree = ("end",)
MAX_REPEAT = 200
"""Most repetitions that an automaton is built for."""


class Unreadable(Exception):
    """A pattern that this module does not understand."""


def is_readable(pattern: str) -> bool:
    """Whether all dialects read the pattern, and mean the same by it but for the readings above."""
    try:
        _Parser(pattern, True).parse()
    except Unreadable:
        return False
    return True


def are_disjoint(found: list[str]) -> bool:
    """Whether it is proved that no text satisfies all of the patterns."""
    try:
        return functools.reduce(Dfa.and_, [_automaton(pattern, True) for pattern in set(found)]).is_empty()
    except (Unreadable, TooLarge):
        return False


def combined(wanted: list[str], unwanted: list[str]) -> str | None:
    """A pattern for the texts in which all of `wanted` and none of `unwanted` are found; None if there is no such text.
    Raises `Unreadable` or `TooLarge`.
    """
    parts = [_automaton(pattern, False) for pattern in wanted]
    parts += [_automaton(pattern, True).complement() for pattern in unwanted]
    expression = functools.reduce(Dfa.and_, parts).expression()
    return None if expression is None else f"^(?:{expression})$"


def without_look_ahead(pattern: str) -> str | None:
    """A pattern that finds the same, if `pattern` begins with `^` and looks ahead from there only. Raises `Unreadable`
    or `TooLarge`.
    """
    wanted: list[str] = []
    unwanted: list[str] = []
    rest = pattern.removeprefix("^")
    while pattern.startswith("^") and rest.startswith(("(?!", "(?=")):
        end = _group_end(rest)
        (unwanted if rest[2] == "!" else wanted).append(f"^(?:{rest[3:end]})")
        rest = rest[end + 1 :]
    return combined([*wanted, f"^(?:{rest})"], unwanted)


def _group_end(text: str) -> int:
    """Returns where the group that `text` begins with is closed."""
    depth, index, in_class = 0, 0, False
    while index < len(text):
        character = text[index]
        if character == "\\":
            index += 1
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character in "()":
            depth += 1 if character == "(" else -1
            if not depth:
                return index
        index += 1
    raise Unreadable("an open group")


def without_texts(texts: list[str]) -> str | None:
    """A pattern for all texts but these. Raises `TooLarge`."""
    found = Dfa.of(("alt", tuple(_literal(text) for text in texts))).complement().expression()
    return None if found is None else f"^(?:{found})$"


def of_texts(texts: list[str]) -> str:
    """A pattern for these texts alone."""
    return "^(?:" + "|".join("".join(_escaped(character) for character in text) for text in texts) + ")$"


def _escaped(character: str) -> str:
    return class_text(((ord(character), ord(character)),))


def _literal(text: str) -> Tree:
    return ("cat", tuple(("set", ((ord(character), ord(character)),)) for character in text))


@functools.lru_cache(maxsize=256)
def _automaton(pattern: str, is_wide: bool) -> Dfa:
    tree = _Parser(pattern, is_wide).parse()
    return Dfa.of(("alt", tuple(_anchored(list(parts), is_wide) for parts in _sequences(tree))))


def _sequences(tree: Tree) -> list[tuple[Tree, ...]]:
    """The alternatives at the top, each as a sequence."""
    if tree[0] == "alt":
        return [sequence for part in tree[1] for sequence in _sequences(part)]
    if tree[0] != "cat":
        return [(tree,)]
    parts = tree[1]
    for index in (0, len(parts) - 1):
        if parts and parts[index][0] in ("alt", "cat") and _has_anchor(parts[index]):
            inner = _sequences(parts[index])
            spread = [("cat", (*parts[:index], *each, *parts[index + 1 :])) for each in inner]
            return [sequence for each in spread for sequence in _sequences(each)]
    return [parts]


def _anchored(parts: list[Tree], is_wide: bool) -> Tree:
    """The whole text in which a sequence is found: anchors are resolved, anything may stand where there are none."""
    starts = ends = False
    while parts and parts[0] == _START:
        starts = True
        parts = parts[1:]
    while parts and parts[-1] == _END:
        ends = True
        parts = parts[:-1]
    if any(_has_anchor(part) for part in parts):
        raise Unreadable("an anchor within")
    return ("cat", (*([] if starts else [ALL]), *parts, *([ALL] if not ends else [_LINE_END] if is_wide else [])))


def _has_anchor(tree: Any) -> bool:
    if tree in (_START, _END):
        return True
    if tree[0] in ("cat", "alt"):
        return any(map(_has_anchor, tree[1]))
    return tree[0] == "repeat" and _has_anchor(tree[1])


class _Parser:
    def __init__(self, pattern: str, is_wide: bool) -> None:
        self._text = pattern
        self._is_wide = is_wide
        self._at = 0

    def parse(self) -> Tree:
        tree = self._alternatives()
        if self._at < len(self._text):
            raise Unreadable(f"{self._text[self._at :]!r} at {self._at}")
        return tree

    def _peek(self) -> str:
        return self._text[self._at] if self._at < len(self._text) else ""

    def _take(self, text: str) -> bool:
        if not self._text.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def _next(self) -> str:
        if self._at >= len(self._text):
            raise Unreadable("it ends too soon")
        self._at += 1
        return self._text[self._at - 1]

    def _alternatives(self) -> Tree:
        found = [self._sequence()]
        while self._take("|"):
            found.append(self._sequence())
        return found[0] if len(found) == 1 else ("alt", tuple(found))

    def _sequence(self) -> Tree:
        parts = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._repeated(self._atom()))
        return ("cat", tuple(parts))

    def _repeated(self, atom: Tree) -> Tree:
        while self._peek() and self._peek() in "*+?{":
            low, high = self._bounds()
            if atom in (_START, _END) or max(low, high or 0) > MAX_REPEAT:
                raise Unreadable("a repetition")
            self._take("?")  # how eagerly it repeats does not matter for what is found
            if self._peek() == "+":
                raise Unreadable("a possessive repetition")
            atom = ("repeat", atom, low, high)
        return atom

    def _bounds(self) -> tuple[int, int | None]:
        mark = self._next()
        if mark != "{":
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[mark]
        end = self._text.find("}", self._at)
        low, comma, high = self._text[self._at : end].partition(",")
        if end < 0 or not low.isdigit() or (high and not high.isdigit()):
            raise Unreadable("a brace")
        self._at = end + 1
        return int(low), (int(high) if high else None) if comma else int(low)

    def _atom(self) -> Tree:
        if self._take("(?s:.)"):
            return ("set", ANY)
        character = self._next()
        if character == "^":
            return _START
        if character == "$":
            return _END
        if character == ".":
            return ("set", _WIDE_DOT if self._is_wide else _NARROW_DOT)
        if character == "(":
            return self._group()
        if character == "[":
            return ("set", self._class())
        if character == "\\":
            return ("set", self._escape())
        if character in "*+?{}])":
            raise Unreadable(f"{character!r}")
        return ("set", ((ord(character), ord(character)),))

    def _group(self) -> Tree:
        if self._take("?"):
            if self._take("<") or self._take("P<"):
                name, _, _ = self._text[self._at :].partition(">")
                if not name.isidentifier():
                    raise Unreadable("a look behind")
                self._at += len(name) + 1
            elif not self._take(":"):
                raise Unreadable("a look ahead or a flag")
        tree = self._alternatives()
        if not self._take(")"):
            raise Unreadable("an open group")
        return tree

    def _escape(self) -> Ranges:
        character = self._next()
        if character in _NARROW:
            return (_WIDE if self._is_wide else _NARROW)[character]
        if character.lower() in _NARROW:
            return complement((_NARROW if self._is_wide else _WIDE)[character.lower()])
        if character in _CONTROLS:
            code = _CONTROLS[character]
        elif character in "xu":
            digits = self._text[self._at : self._at + (2 if character == "x" else 4)]
            try:
                code = int(digits, 16)
            except ValueError as error:
                raise Unreadable("an escape") from error
            self._at += len(digits)
        elif character.isalnum():
            raise Unreadable(f"\\{character}")
        else:
            code = ord(character)
        return ((code, code),)

    def _class(self) -> Ranges:
        is_negated = self._take("^")
        self._is_wide ^= is_negated  # the less a class holds, the more does its complement
        parts: list[tuple[int, int]] = []
        if self._peek() == "]":
            raise Unreadable("an empty class")
        while not self._take("]"):
            low = self._member()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._member()
                if not (len(low) == len(high) == 1 and low[0][0] == low[0][1] <= high[0][0] == high[0][1]):
                    raise Unreadable("a range")
                low = ((low[0][0], high[0][0]),)
            parts += low
        self._is_wide ^= is_negated
        found = ranges_of(parts)
        return complement(found) if is_negated else found

    def _member(self) -> Ranges:
        character = self._next()
        if character == "\\":
            if self._peek() == "b":
                raise Unreadable("a backspace")
            return self._escape()
        if character == "[" or self._text[self._at - 1 : self._at + 1] in ("&&", "--", "~~", "||"):
            raise Unreadable("a set operation")
        return ((ord(character), ord(character)),)


def looks_around(pattern: str) -> bool:
    """Whether a pattern has what no automaton reads but Python's `re` does: a look ahead or behind, a word's border."""
    return re.search(r"\(\?(=|!|<=|<!)|\\[bB]", pattern) is not None and _is_python(pattern)


def plainer(pattern: str) -> str | None:
    """The pattern without its looks ahead; None if that is not found."""
    try:
        return without_look_ahead(pattern)
    except (Unreadable, TooLarge):
        return None


def has_anchor_within(pattern: str) -> bool:
    """Whether `^` or `$` stands elsewhere than at the ends."""
    return re.search(r"(?<!\\)\$.|.\^", re.sub(r"\[\^?[^]]*\]", "x", pattern)) is not None and _is_python(pattern)


def _is_python(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True
