"""Regular expressions for what stands between the quotes of a JSON string, made from those for the string's value.

The expressions are those of Rust's crate `regex`, as in llguidance's terminals. The spelling is the one that JSON
writers use: control characters, `"` and `\\` as escapes, everything else as itself. So each value has one text, and
intersections and complements of expressions keep their meaning. Source: RFC 8259, section 7, and
https://docs.rs/regex/latest/regex/#syntax.
"""

from __future__ import annotations

import functools
import json
import re
from typing import NamedTuple

import regex

from manta.structured.constraint import ConstraintError

_SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
"""Characters with an escape of two characters."""
_ESCAPED = (*range(32), 34, 92)
"""Code points that a string of JSON holds as escapes alone."""
_PLAIN = r"[^\x00-\x1f\x22\x5c]"
"""A class of the other characters."""
MAX_LENGTH = 2**18
"""Most characters of an expression for JSON text."""
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "a": 7}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_CLASSES = "dDsSwW"
_GROUP = re.compile(r"\(\?(?:P?<[^=!>][^>]*>|([a-zA-Z]*)(?:-([a-zA-Z]*))?([:)]))")
_QUANTIFIER = re.compile(r"\{[0-9,\s]*\}")
_POSIX = re.compile(r"\[:\^?[a-z]+:\]")
_OPERATORS = ("&&", "--", "~~")


class _Class(NamedTuple):
    """A set of characters, spelt for Rust's crate and for Python's module of the same name."""

    rust: str
    python: str


_ANY = _Class(r"[\x00-\x{10ffff}]", "(?s:.)")
_NO_LINE_BREAK = _Class(r"[^\n]", r"[^\n]")


def in_json(pattern: str, flags: str = "") -> str:
    """Returns an expression for the JSON spellings of the texts that `pattern` matches under `flags`. Raises
    `ConstraintError` for a pattern that cannot be read.
    """
    return _Reader(pattern, flags).quoted()


def text_in_json(text: str) -> str:
    """Returns the JSON spelling of one text."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class _Reader:
    """Copies a pattern, and replaces its characters and classes."""

    def __init__(self, pattern: str, flags: str) -> None:
        self._text = pattern
        self._at = 0
        self._dot_is_all = [self._checked(flags, "", "s" in flags)]
        """Whether `.` takes line breaks, for each open group."""

    def quoted(self) -> str:
        parts, length = [], 0
        while self._at < len(self._text) and length < MAX_LENGTH:
            parts.append(self._next())
            length += len(parts[-1])
        if length >= MAX_LENGTH:
            more = {"value": length, "unit": "characters as JSON up to here", "bound": MAX_LENGTH}
            raise ConstraintError.because("over_limit", f"/{self._text[:80]}/", **more, remedy="shorten it")
        return "".join(parts)

    def _fail(self, what: str) -> ConstraintError:
        remedy = "write the expression as Rust's regex crate reads it"
        return ConstraintError.because("unfit", f"/{self._text[:80]}/", cause=what, remedy=remedy)

    def _checked(self, on: str, off: str, result: bool) -> bool:
        if "x" in on or "u" in off:
            raise self._fail("it has the flag x or -u")
        return result

    def _next(self) -> str:
        character = self._text[self._at]
        if character == "(":
            return self._group()
        if character == "[":
            return _quoted_class(self._class())
        if character == "\\":
            return self._escape()
        self._at += 1
        if character == ")":
            if len(self._dot_is_all) == 1:
                raise self._fail("a parenthesis is closed that was not opened")
            self._dot_is_all.pop()
            return character
        if character == ".":
            return _quoted_class(_ANY if self._dot_is_all[-1] else _NO_LINE_BREAK)
        if character == "{":
            found = _QUANTIFIER.match(self._text, self._at - 1)
            if found is not None:
                self._at = found.end()
                return found[0]
        return character if character in "*+?|^${}" else _quoted_character(ord(character), character)

    def _group(self) -> str:
        found = _GROUP.match(self._text, self._at)
        if found is None:
            self._dot_is_all.append(self._dot_is_all[-1])
            self._at += 1
            return "("
        self._at = found.end()
        on, off, end = found[1] or "", found[2] or "", found[3]
        dot_is_all = self._checked(on, off, ("s" in on or self._dot_is_all[-1]) and "s" not in off)
        if end == ")":  # flags for the rest of this group
            self._dot_is_all[-1] = dot_is_all
        else:
            self._dot_is_all.append(dot_is_all)
        return found[0]

    def _escape(self) -> str:
        begin = self._at
        found = self._class_escape()
        if found is not None:
            return _quoted_class(_Class(f"[{found}]", found))
        if self._text[self._at + 1 : self._at + 2] in ("b", "B", "A", "z", "<", ">"):
            self._at += 2  # assertions, about which llguidance decides
            return self._text[begin : self._at]
        return _quoted_character(self._character_escape(), self._text[begin : self._at])

    def _class_escape(self) -> str | None:
        """Reads `\\d`, `\\p{L}` and the like; returns None, and reads nothing, at the escape of one character."""
        letter = self._text[self._at + 1 : self._at + 2]
        if letter and letter in _CLASSES:
            end = self._at + 2
        elif letter in ("p", "P") and self._text[self._at + 2 : self._at + 3] == "{":
            end = self._text.find("}", self._at) + 1
        elif letter in ("p", "P"):
            end = self._at + 3
        else:
            return None
        if not self._at < end <= len(self._text):
            raise self._fail("it has the name of a class without its end")
        text, self._at = self._text[self._at : end], end
        return text

    def _character_escape(self) -> int:
        letter = self._text[self._at + 1 : self._at + 2]
        if not letter:
            raise self._fail("it ends with a backslash")
        self._at += 2
        if letter in _CONTROLS:
            return _CONTROLS[letter]
        if letter not in _HEX_DIGITS:
            return ord(letter)
        if self._text[self._at : self._at + 1] == "{":
            digits, _, _ = self._text[self._at + 1 :].partition("}")
            self._at += len(digits) + 2
        else:
            digits = self._text[self._at : self._at + _HEX_DIGITS[letter]]
            self._at += len(digits)
        try:
            code = int(digits, 16)
            chr(code)
        except (ValueError, OverflowError):
            raise self._fail(f"\\{letter}{digits[:20]} names no character") from None
        return code

    # ---- classes -----------------------------------------------------------------------------------------------------

    def _class(self) -> _Class:
        """Reads a class from its `[` on, with the classes in it. A first `]` stands for itself."""
        self._at += 1
        rust, python = ["["], ["["]
        if self._text[self._at : self._at + 1] == "^":
            self._at += 1
            rust.append("^")
            python.append("^")
        is_first = True
        while is_first or self._text[self._at : self._at + 1] != "]":
            found = self._member()
            rust.append(found.rust)
            python.append(found.python)
            is_first = False
        self._at += 1
        return _Class("".join([*rust, "]"]), "".join([*python, "]"]))

    def _member(self) -> _Class:
        if self._at >= len(self._text):
            raise self._fail("it has a class without its end")
        posix = _POSIX.match(self._text, self._at)
        if posix is not None:
            self._at = posix.end()
            return _Class(posix[0], posix[0])
        character = self._text[self._at]
        if character == "[":
            return self._class()
        if character == "\\":
            found = self._class_escape()
            return _member_of(self._character_escape()) if found is None else _Class(found, found)
        operator = self._text[self._at : self._at + 2]
        if operator in _OPERATORS:
            self._at += 2
            return _Class(operator, operator)
        self._at += 1
        return _Class("-", "-") if character == "-" else _member_of(ord(character))


def _member_of(code: int) -> _Class:
    return _Class(f"\\x{{{code:x}}}", f"\\U{code:08x}")


def _quoted_character(code: int, source: str) -> str:
    """Returns a character of a pattern, which `source` spells there."""
    if code in _SHORT:
        return rf"(?:\\(?-i:{_in_class(_SHORT[code])}))"
    return _of_controls([code]) if code < 32 else source


def _quoted_class(given: _Class) -> str:
    held = _escaped_members(given.python)
    ways = [f"[{given.rust}&&{_PLAIN}]"]
    short = "".join(_in_class(_SHORT[code]) for code in held if code in _SHORT)
    if short:
        ways.append(rf"\\(?-i:[{short}])")
    others = [code for code in held if code not in _SHORT]
    if others:
        ways.append(_of_controls(others))
    return f"(?:{'|'.join(ways)})"


def _in_class(character: str) -> str:
    return rf"\x{ord(character):02x}"


def _of_controls(codes: list[int]) -> str:
    """Returns an expression for `\\u00XX` of some control characters, with digits of either case."""
    rows: dict[int, str] = {}
    for code in codes:
        rows[code >> 4] = rows.get(code >> 4, "") + "".join(sorted({f"{code & 15:x}", f"{code & 15:X}"}))
    ways = "|".join(f"{row}[{digits}]" for row, digits in rows.items())
    return rf"(?:\\(?-i:u)00(?:{ways}))"


@functools.lru_cache(maxsize=128)
def _escaped_members(python: str) -> tuple[int, ...]:
    """Returns the code points in a class that JSON escapes."""
    try:
        found = regex.compile(python, regex.VERSION1)
    except regex.error as error:
        remedy = "write the expression as Rust's regex crate reads it"
        raise ConstraintError.because("unfit", python[:80], cause=str(error), remedy=remedy) from error
    return tuple(code for code in _ESCAPED if found.fullmatch(chr(code)))
