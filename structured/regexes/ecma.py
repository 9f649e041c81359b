"""Reads regular expressions as ECMA-262 does with its `u` flag, which is the dialect of JSON Schema.

`parse` makes a tree. What the tree leaves out does not change which texts match: names and numbers of groups, and how
eagerly a quantifier repeats. Beyond the `u` flag two spellings are read, because no dialect means anything else by
them: a backslash before any punctuation, and a `}` that closes nothing. Source: ECMA-262, section 22.2.1.
"""

from __future__ import annotations

import functools
from typing import Literal, NoReturn

from manta.structured.regexes import characters
from manta.structured.regexes.automata import ANY, EMPTY, Ranges, Tree, complement, ranges_of

MAX_NESTING = 100
"""Deepest nesting of groups."""
MAX_COUNT = 2**31
"""A quantifier that counts further is taken for this one: no text is so long."""

START: Tree = ("start",)
END: Tree = ("end",)
LOOKS = {"(?=": (False, False), "(?!": (False, True), "(?<=": (True, False), "(?<!": (True, True)}
"""How a group that looks around begins, and whether it looks behind and is negated."""
_ASSERTIONS = ("^", "$", "\\b", "\\B", *LOOKS)
"""How what takes no quantifier begins."""
_FOREIGN = {
    "(?P<": ("named group", "write (?<name>...)"),
    "(?P=": ("backreference", "write the pattern without it"),
    "(?>": ("atomic group", "write (?:...)"),
    "(?(": ("conditional", "write the pattern without it"),
    "(?#": ("comment", "leave it out"),
}
"""Groups of other dialects, with what to do."""
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11}


class Unreadable(Exception):
    """The pattern is not one of ECMA-262, or has a construct that no automaton can hold."""

    def __init__(self, kind: Literal["invalid", "not_regular"], name: str, text: str, position: int, remedy: str = ""):
        super().__init__(kind, name, text, position, remedy)
        self.kind = kind
        """Whether the pattern is wrong, or right and no regular language."""
        self.name = name
        """The construct."""
        self.text = text
        """The construct's beginning."""
        self.position = position
        """Characters of the pattern in front of it."""
        self.remedy = remedy

    def __str__(self) -> str:
        return f"the {self.name} {self.text} at position {self.position}"


@functools.lru_cache(maxsize=512)
def parse(pattern: str) -> Tree:
    """The tree of a pattern: a `Tree` of automata, in which may stand `START`, `END`, `("edge", is_negated, word)` for
    the edge of a word of these characters, and `("look", is_behind, is_negated, tree)`. Raises `Unreadable`.
    """
    return _Parser(pattern).parse()


class _Flags:
    """The modifiers of the group that is read: `i`, `m` and `s`."""

    def __init__(self, on: frozenset[str] = frozenset()) -> None:
        self.ignores_case = "i" in on
        self.has_lines = "m" in on
        self.dot_is_all = "s" in on
        self.on = on


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._depth = 0
        self._flags = _Flags()
        self._names: set[str] = set()

    def parse(self) -> Tree:
        tree = self._alternatives()
        if self._at < len(self._text):
            self._fail("unmatched", ")", self._at)
        return tree

    def _fail(self, name: str, text: str, position: int, remedy: str = "") -> NoReturn:
        raise Unreadable("invalid", name, text, position, remedy)

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, text: str) -> bool:
        if not self._text.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def _next(self) -> str:
        if self._at >= len(self._text):
            self._fail("pattern", "that ends too soon", self._at)
        self._at += 1
        return self._text[self._at - 1]

    # ---- structure ---------------------------------------------------------------------------------------------------

    def _alternatives(self) -> Tree:
        found = [self._sequence()]
        while self._take("|"):
            found.append(self._sequence())
        return found[0] if len(found) == 1 else ("alt", tuple(found))

    def _sequence(self) -> Tree:
        parts: list[Tree] = []
        while self._peek() not in ("", "|", ")"):
            term = self._term()
            if term != EMPTY:
                parts.append(term)
        return parts[0] if len(parts) == 1 else ("cat", tuple(parts))

    def _term(self) -> Tree:
        begin = self._at
        tree = self._atom()
        while self._peek() and self._peek() in "*+?{":
            at = self._at
            low, high = self._bounds()
            if self._text.startswith(_ASSERTIONS, begin):
                self._fail("quantifier", self._text[at : self._at], at, "put a group before it")
            self._take("?")  # how eagerly it repeats does not matter for what is found
            text = self._text[at : self._at + 1]
            if self._peek() == "+":
                self._fail("possessive quantifier", text, at, "write the pattern without it")
            if self._peek() and self._peek() in "*?{":
                self._fail("quantifier", self._peek(), self._at, f"put {self._text[begin : self._at]} in a group")
            tree = tree if tree == EMPTY else ("repeat", tree, low, high)
        return tree

    def _bounds(self) -> tuple[int, int | None]:
        at = self._at
        mark = self._next()
        if mark != "{":
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[mark]
        end = self._text.find("}", at)
        low, comma, high = self._text[self._at : end].partition(",")
        if end >= 0 and comma and not low and _is_number(high):
            self._fail("quantifier", self._text[at : end + 1], at, f"write {{0,{high}}}")
        if end < 0 or not _is_number(low) or (high and not _is_number(high)):
            self._fail("brace", "{", at, r"write \{")
        self._at = end + 1
        least, most = _count(low), (_count(high) if high else None) if comma else _count(low)
        if most is not None and most < least:
            self._fail("quantifier", self._text[at : self._at], at, "put the smaller number first")
        return least, most

    def _atom(self) -> Tree:
        at = self._at
        character = self._next()
        if character == "^":
            return self._line_edge(START, is_behind=True)
        if character == "$":
            return self._line_edge(END, is_behind=False)
        if character == ".":
            return ("set", ANY if self._flags.dot_is_all else characters.DOT)
        if character == "(":
            return self._group(at)
        if character == "[":
            return ("set", self._class(at))
        if character == "\\":
            return self._escape(at)
        if character in "*+?{":
            self._fail("quantifier", character, at, rf"write \{character}")
        if character == "]":
            self._fail("unmatched", character, at, rf"write \{character}")
        return self._literal(ord(character))

    def _line_edge(self, edge: Tree, is_behind: bool) -> Tree:
        if not self._flags.has_lines:
            return edge
        return ("alt", (edge, ("look", is_behind, False, ("set", characters.LINE_ENDS))))

    def _literal(self, code: int) -> Tree:
        return ("set", self._cased(((code, code),)))

    def _cased(self, ranges: Ranges) -> Ranges:
        return characters.with_cases(ranges) if self._flags.ignores_case else ranges

    def _group(self, at: int) -> Tree:
        self._depth += 1
        if self._depth > MAX_NESTING:
            self._fail("nesting", f"of more than {MAX_NESTING} groups", at, "flatten it")
        begin, flags = self._group_begin(at), self._flags
        if begin not in LOOKS and begin not in ("(", "(?:"):
            self._flags = self._modified(at)
        tree = self._alternatives()
        self._flags = flags
        if not self._take(")"):
            self._fail("open group", begin, at, "close it")
        self._depth -= 1
        return ("look", *LOOKS[begin], tree) if begin in LOOKS else tree

    def _group_begin(self, at: int) -> str:
        """Reads how a group begins, up to its flags if it has any."""
        for begin in LOOKS:
            if self._text.startswith(begin, at):
                self._at = at + len(begin)
                return begin
        for begin, (name, remedy) in _FOREIGN.items():
            if self._text.startswith(begin, at):
                self._fail(name, begin, at, remedy)
        if not self._take("?"):
            return "("
        if self._take("<"):
            name, closed, _ = self._text[self._at :].partition(">")
            if not closed or not _is_name(name) or name in self._names:
                self._fail("group name", f"<{name[:20]}", self._at - 1, "give each group a name of its own")
            self._names.add(name)
            self._at += len(name) + 1
            return "("
        return "(?:" if self._take(":") else "(?"

    def _modified(self, at: int) -> _Flags:
        """Reads the modifiers of a group such as `(?i-s:`."""
        added, closed, _ = self._text[self._at :].partition(":")
        on, minus, off = added.partition("-")
        letters = on + off
        if not closed or not set(letters) <= set("ims") or len(set(letters)) < len(letters) or not letters:
            self._fail("group", self._text[at : at + 4], at, "write flags as (?i:...)")
        self._at += len(added) + 1
        return _Flags((self._flags.on | set(on)) - set(off if minus else ""))

    # ---- escapes -----------------------------------------------------------------------------------------------------

    def _escape(self, at: int) -> Tree:
        character = self._peek()
        if character in ("b", "B"):
            self._at += 1
            return ("edge", character == "B", self._cased(characters.WORD))
        if character == "k" or (character.isascii() and character.isdigit() and character != "0"):
            raise Unreadable("not_regular", "backreference", f"\\{character}", at, "write the pattern without it")
        found = self._class_escape(at)
        return ("set", found) if found is not None else self._literal(self._character_escape(at))

    def _class_escape(self, at: int) -> Ranges | None:
        """The set that an escape such as `\\w` or `\\p{L}` names; None for the escape of a character."""
        character = self._peek()
        if character and character in "dDwWsS":
            self._at += 1
            named = self._cased(characters.CLASSES[character.lower()])
            return complement(named) if character.isupper() else named
        if character not in ("p", "P") or not character:
            return None
        self._at += 1
        name, closed, _ = self._text[self._at :].removeprefix("{").partition("}")
        found = characters.property_ranges(name) if closed and self._peek() == "{" else None
        if found is None:
            text = self._text[at : self._at + len(name) + 2]
            self._fail("property", text[:40], at, r"name one of Unicode, such as \p{L} or \p{Script=Greek}")
        self._at += len(name) + 2
        found = self._cased(found)
        return complement(found) if character == "P" else found

    def _character_escape(self, at: int) -> int:
        character = self._next()
        if character in _CONTROLS:
            return _CONTROLS[character]
        if character == "0" and not (self._peek().isascii() and self._peek().isdigit()):
            return 0
        if character == "c" and self._peek().isascii() and self._peek().isalpha():
            return ord(self._next()) % 32
        if character == "x":
            return self._hex(at, 2)
        if character == "u":
            return self._code_point(at)
        if character.isascii() and character.isalnum():
            remedy = {"A": "write ^", "Z": "write $", "z": "write $"}.get(character, f"write {character}")
            self._fail("escape", f"\\{character}", at, remedy)
        return ord(character)

    def _hex(self, at: int, count: int) -> int:
        digits = self._text[self._at : self._at + count]
        if len(digits) < count or not _is_hex(digits):
            self._fail("escape", self._text[at : at + 2 + count], at, f"give {count} hexadecimal digits")
        self._at += count
        return int(digits, 16)

    def _code_point(self, at: int) -> int:
        if not self._take("{"):
            code = self._hex(at, 4)
            low = self._text[self._at + 2 : self._at + 6]
            is_pair = 0xD800 <= code <= 0xDBFF and self._text.startswith("\\u", self._at) and _is_hex(low)
            if is_pair and len(low) == 4 and 0xDC00 <= int(low, 16) <= 0xDFFF:
                self._at += 6
                return 0x10000 + (code - 0xD800) * 0x400 + int(low, 16) - 0xDC00
            return code
        digits, closed, _ = self._text[self._at :].partition("}")
        if not closed or not _is_hex(digits) or len(digits.lstrip("0")) > 6 or int(digits, 16) > 0x10FFFF:
            self._fail("escape", self._text[at : at + 10], at, r"write \u{0} to \u{10FFFF}")
        self._at += len(digits) + 1
        return int(digits, 16)

    # ---- classes -----------------------------------------------------------------------------------------------------

    def _class(self, at: int) -> Ranges:
        """Reads a class behind its `[`. `[]` holds nothing, `[^]` everything."""
        is_negated = self._take("^")
        parts: list[tuple[int, int]] = []
        while not self._take("]"):
            begin = self._at
            if not self._peek():
                self._fail("open class", self._text[at : at + 10], at, "close it")
            low = self._member()
            follows = self._text[self._at : self._at + 2]
            if follows[:1] != "-" or follows[1:] in ("]", ""):
                parts += low
                continue
            self._at += 1
            high = self._member()
            if not (_is_one(low) and _is_one(high) and low[0][0] <= high[0][0]):
                self._fail("range", self._text[begin : self._at], begin, r"give two characters in order, or write \-")
            parts.append((low[0][0], high[0][0]))
        found = self._cased(ranges_of(parts))
        return complement(found) if is_negated else found

    def _member(self) -> Ranges:
        at = self._at
        character = self._next()
        if character != "\\":
            return ((ord(character), ord(character)),)
        if self._take("b"):
            return ((8, 8),)
        found = self._class_escape(at)
        if found is not None:
            return found
        code = self._character_escape(at)
        return ((code, code),)


def _is_one(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _count(digits: str) -> int:
    return min(int(digits), MAX_COUNT) if len(digits) < 20 else MAX_COUNT


def _is_hex(text: str) -> bool:
    return bool(text) and all(character in "0123456789abcdefABCDEF" for character in text)


def _is_name(text: str) -> bool:
    return text.replace("$", "_").replace("\u200c", "_").replace("\u200d", "_").isidentifier()
