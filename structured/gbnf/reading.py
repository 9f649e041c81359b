"""Reads GBNF, llama.cpp's notation of grammars, into trees of characters.

The notation is that of `grammars/README.md` and `src/llama-grammar.cpp` in github.com/ggml-org/llama.cpp, with two
more freedoms: a name may hold `_`, and a line may begin with `|`. A tree is one of `structured/regexes/automata.py`,
where `("rule", name)` stands for a rule. Everything is a character: an escape such as `\\xe9` is a code point and no
byte.
"""

from __future__ import annotations

import re
from typing import NoReturn

from manta.structured.constraint import ConstraintError
from manta.structured.regexes.automata import ANY, EMPTY, Ranges, Tree, complement, ranges_of

ROOT = "root"
MAX_REPETITIONS = 10_000
"""Highest bound of a repetition. llama.cpp takes 2,000, and reads a higher upper bound as none."""

_SPACE = re.compile(r"(?:[ \t]|\#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|\#[^\r\n]*)*")
_NAME = re.compile(r"[a-zA-Z0-9_-]+")
_LINE_END = re.compile(r"\r\n?|\n|\Z")
_GOES_ON = re.compile(r"(?:[ \t\r\n]|\#[^\r\n]*)*\|")
_BOUNDS = re.compile(r"\{\s*(?P<low>[0-9]{1,9})\s*(?:(?P<comma>,)\s*(?P<high>[0-9]{0,9})\s*)?\}")
_TOKEN = re.compile(r"!?<\[?[^>\r\n]*>")
_ESCAPE = re.compile(
    r"\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})|(?P<one>[trn\\\"\[\]-]))"
)
_CONTROLS = {"t": "\t", "r": "\r", "n": "\n"}
_SURROGATES = range(0xD800, 0xE000)
_COUNTS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def read_gbnf(text: str) -> dict[str, Tree]:
    """Returns the rules by name, without ways that no text can end. The later one of two rules with one name counts, as
    in llama.cpp. Raises `ConstraintError` with the line of what is not GBNF, for a rule that is missing, for left
    recursion, and if no text can end.
    """
    rules = _Reader(text).rules()
    if ROOT not in rules:
        raise ConstraintError.because("missing", f"ebnf: the rule {ROOT}", remedy="it says what the whole text is")
    for name, tree in rules.items():
        for other in references(tree):
            if other not in rules:
                cause = f"it names the rule {other}, which is missing"
                raise ConstraintError.because("unfit", f"ebnf: the rule {name}", cause=cause, remedy=f"define {other}")
    _check_left_recursion(rules)
    return _with_an_end(rules)


def references(tree: Tree) -> list[str]:
    """Returns the names of the rules in a tree, in order."""
    found, pending = [], [tree]
    while pending:
        kind, *rest = pending.pop()
        if kind == "rule":
            found.append(rest[0])
        elif kind == "repeat":
            pending.append(rest[0])
        elif kind in ("cat", "alt"):
            pending += reversed(rest[0])
    return found


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def rules(self) -> dict[str, Tree]:
        found: dict[str, Tree] = {}
        self._skip(_SPACE_AND_LINES)
        while self._at < len(self._text):
            name = self._taken(_NAME, "the name of a rule")
            self._skip(_SPACE)
            if not self._text.startswith("::=", self._at):
                self._refuse("::=")
            self._at += 3
            self._skip(_SPACE_AND_LINES)
            found[name] = self._ways(is_nested=False)
            self._taken(_LINE_END, "the end of the line")
            self._skip(_SPACE_AND_LINES)
        return found

    # ---- expressions -----------------------------------------------------------------------------------------------

    def _ways(self, is_nested: bool) -> Tree:
        """Reads alternatives. Within brackets they may go on in the next line."""
        found = [self._sequence(is_nested)]
        while is_nested or _GOES_ON.match(self._text, self._at):
            self._skip(_SPACE_AND_LINES)
            if not self._text.startswith("|", self._at):
                break
            self._at += 1
            self._skip(_SPACE_AND_LINES)
            found.append(self._sequence(is_nested))
        return found[0] if len(found) == 1 else ("alt", tuple(found))

    def _sequence(self, is_nested: bool) -> Tree:
        parts: list[Tree] = []
        space = _SPACE_AND_LINES if is_nested else _SPACE
        while (part := self._item()) is not None:
            self._skip(space)
            while (bounds := self._repetition()) is not None:
                part = EMPTY if bounds[1] == 0 else ("repeat", part, *bounds)
                self._skip(space)
            parts.append(part)
        if self._text[self._at : self._at + 1] in ("*", "+", "?", "{"):
            self._refuse("an item before a repetition")
        return parts[0] if len(parts) == 1 else ("cat", tuple(parts))

    def _item(self) -> Tree | None:
        """Reads one item; None at the end of a sequence."""
        character = self._text[self._at : self._at + 1]
        if character == '"':
            return self._literal()
        if character == "[":
            return self._class()
        if character == "(":
            return self._group()
        if character == ".":
            self._at += 1
            return "set", ANY
        if character in ("<", "!"):
            self._refuse_token()
        if _NAME.match(self._text, self._at):
            return "rule", self._taken(_NAME, "a name")
        return None

    def _literal(self) -> Tree:
        self._at += 1
        codes = []
        while not self._text.startswith('"', self._at):
            codes.append(self._character())
        self._at += 1
        sets: list[Tree] = [("set", ((code, code),)) for code in codes]
        return sets[0] if len(sets) == 1 else ("cat", tuple(sets))

    def _class(self) -> Tree:
        self._at += 1
        is_negated = self._text.startswith("^", self._at)
        self._at += is_negated
        parts: list[tuple[int, int]] = []
        while not self._text.startswith("]", self._at):
            start, low = self._at, self._character()
            high = low
            if self._text.startswith("-", self._at) and not self._text.startswith("]", self._at + 1):
                self._at += 1
                high = self._character()
            if high < low:
                self._at = start
                self._refuse("a range whose ends are in order")
            parts.append((low, high))
        ranges: Ranges = complement(ranges_of(parts)) if is_negated and parts else ranges_of(parts)
        if not ranges:
            self._refuse("at least one character in brackets")
        self._at += 1
        return "set", ranges

    def _group(self) -> Tree:
        self._at += 1
        self._skip(_SPACE_AND_LINES)
        tree = self._ways(is_nested=True)
        if not self._text.startswith(")", self._at):
            self._refuse("a closing bracket")
        self._at += 1
        return tree

    def _repetition(self) -> tuple[int, int | None] | None:
        """Reads how often an item may come: the least and the most, None for any number; None if nothing is said."""
        character = self._text[self._at : self._at + 1]
        if character in _COUNTS:
            self._at += 1
            return _COUNTS[character]
        if character != "{":
            return None
        match = _BOUNDS.match(self._text, self._at)
        if match is None:
            self._refuse("{n}, {n,} or {n,m}")
        low = int(match["low"])
        high = low if match["comma"] is None else int(match["high"]) if match["high"] else None
        if high is not None and high < low:
            self._refuse("bounds in order")
        if max(low, high or 0) > MAX_REPETITIONS:
            place = f"ebnf: line {self._line()}"
            details = {"value": max(low, high or 0), "unit": "repetitions", "bound": MAX_REPETITIONS}
            raise ConstraintError.because("over_limit", place, **details, remedy="repeat less, or without bound")
        self._at = match.end()
        return low, high

    def _character(self) -> int:
        """Reads a character of a literal or of brackets; returns its code point."""
        character = self._text[self._at : self._at + 1]
        if character != "\\":
            if not character:
                self._refuse("a closing quote or bracket")
            self._at += 1
            return ord(character)
        match = _ESCAPE.match(self._text, self._at)
        if match is None:
            self._refuse(r"an escape: \xHH, \uHHHH, \UHHHHHHHH, or \ before one of t r n \ " + '" [ ] -')
        one = match["one"]
        code = ord(_CONTROLS.get(one, one)) if one else int(match["x"] or match["u"] or match["U"], 16)
        if code in _SURROGATES or code > ANY[0][1]:
            self._refuse("the escape of a character; \\U takes those beyond U+FFFF")
        self._at = match.end()
        return code

    # ---- the text --------------------------------------------------------------------------------------------------

    def _skip(self, space: re.Pattern[str]) -> None:
        match = space.match(self._text, self._at)
        assert match is not None
        self._at = match.end()

    def _taken(self, pattern: re.Pattern[str], wanted: str) -> str:
        match = pattern.match(self._text, self._at)
        if match is None:
            self._refuse(wanted)
        self._at = match.end()
        return match.group()

    def _line(self) -> int:
        return self._text.count("\n", 0, self._at) + 1

    def _refuse(self, wanted: str) -> NoReturn:
        rest = self._text[self._at : self._at + 20]
        found = repr(rest) if rest else "the end"
        cause = f"{found} stands where GBNF takes {wanted}"
        raise ConstraintError.because("unfit", f"ebnf: line {self._line()}", cause=cause)

    def _refuse_token(self) -> NoReturn:
        match = _TOKEN.match(self._text, self._at)
        if match is None:
            self._refuse("a token such as <[5]>")
        remedy = "write the grammar in Lark, which takes <[5]> and <[^5]>"
        place = f"ebnf: line {self._line()}"
        raise ConstraintError.because("not_enforced", place, cause=f"the token {match.group()}", remedy=remedy)


# ---- left recursion ------------------------------------------------------------------------------------------------


def _check_left_recursion(rules: dict[str, Tree]) -> None:
    """Raises `ConstraintError` with the first rule that may begin with itself."""
    nullable = nullable_rules(rules)
    begins = {name: set(_beginnings(tree, nullable)) for name, tree in rules.items()}
    for name in rules:
        found, pending = set[str](), [name]
        while pending:
            new = begins[pending.pop()] - found
            found |= new
            pending += new
        if name in found:
            remedy = f"let a character come before {name}, or repeat with * or +"
            cause = "it may begin with itself"
            raise ConstraintError.because("unfit", f"ebnf: the rule {name}", cause=cause, remedy=remedy)


def nullable_rules(rules: dict[str, Tree]) -> set[str]:
    """Returns the rules that may be empty."""
    found: set[str] = set()
    while True:
        more = {name for name, tree in rules.items() if name not in found and _is_nullable(tree, found)}
        if not more:
            return found
        found |= more


def _is_nullable(tree: Tree, nullable: set[str]) -> bool:
    kind = tree[0]
    if kind == "set":
        return False
    if kind == "rule":
        return tree[1] in nullable
    if kind == "repeat":
        return tree[2] == 0 or _is_nullable(tree[1], nullable)
    return (all if kind == "cat" else any)(_is_nullable(each, nullable) for each in tree[1])


def _beginnings(tree: Tree, nullable: set[str]) -> list[str]:
    """Returns the rules that a tree may begin with."""
    kind = tree[0]
    if kind == "set" or tree == EMPTY:
        return []
    if kind == "rule":
        return [tree[1]]
    if kind == "repeat":
        return [] if tree[3] == 0 else _beginnings(tree[1], nullable)
    found: list[str] = []
    for part in tree[1]:
        found += _beginnings(part, nullable)
        if kind == "cat" and not _is_nullable(part, nullable):
            break
    return found


# ---- rules without an end ------------------------------------------------------------------------------------------


def _with_an_end(rules: dict[str, Tree]) -> dict[str, Tree]:
    """Returns the rules that a text can end, without ways into the others."""
    found: set[str] = set()
    while True:
        more = {name for name, tree in rules.items() if name not in found and _ending(tree, found) is not None}
        if not more:
            break
        found |= more
    if ROOT not in found:
        raise ConstraintError.because("unsatisfiable", "ebnf", cause=f"the rule {ROOT} never ends")
    return {name: ended for name, tree in rules.items() if (ended := _ending(tree, found)) is not None}


def _ending(tree: Tree, names: set[str]) -> Tree | None:
    """Returns the tree without ways into rules other than `names`; None if nothing is left."""
    kind = tree[0]
    if kind == "set":
        return tree
    if kind == "rule":
        return tree if tree[1] in names else None
    if kind == "repeat":
        inner = _ending(tree[1], names)
        return ("repeat", inner, tree[2], tree[3]) if inner is not None else EMPTY if tree[2] == 0 else None
    parts = [_ending(each, names) for each in tree[1]]
    left = tuple(each for each in parts if each is not None)
    if kind == "cat":
        return ("cat", left) if len(left) == len(parts) else None
    return ("alt", left) if left else None
