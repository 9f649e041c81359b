"""Reads the arguments of one call as they come, and returns the JSON that they make.

Each reader takes characters one by one, so its JSON does not depend on how the text was cut. Used by
`cluster/chat/call_readers.py`.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Protocol

from manta.cluster.chat.argument_forms import NUMBER, ArgumentForm, ArgumentForms
from manta.cluster.chat.reasoning import certain_length
from manta.cluster.chat.tool_formats import ToolFormat

LITERAL = re.compile(rf"null|true|false|{NUMBER}")
LITERAL_PREFIX = re.compile(r"-?[0-9]*(\.[0-9]*)?([eE][-+]?[0-9]*)?|n(u(ll?)?)?|t(r(ue?)?)?|f(a(l(se?)?)?)?")


class NotACall(ValueError):
    """The text is not a call of a known tool."""


class ArgumentsReader(Protocol):
    """Reads the arguments of a call, from their first character to their last one."""

    begun: bool
    """Whether the text is certainly a call's."""
    done: bool

    def read(self, character: str) -> str:
        """Returns the JSON that one more character makes certain. Raises `NotACall` if the character is out of
        place.
        """


class JsonArguments:
    """One JSON object, returned as it stands."""

    def __init__(self) -> None:
        self.begun = self.done = False
        self._closers: list[str] = []
        self._in_string = self._escaped = False

    def read(self, character: str) -> str:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            else:
                self._in_string = character != '"'
        elif not self._closers:
            if character.isspace():
                return ""
            if character != "{":
                raise NotACall
            self.begun = True
            self._closers.append("}")
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._closers.append("}" if character == "{" else "]")
        elif character in "}]":
            if character != self._closers.pop():
                raise NotACall
            self.done = not self._closers
        return character


class Marks:
    """Waits for texts in turn, with any white space before each."""

    def __init__(self, text: str) -> None:
        self._words = text.split()
        self._at = 0

    def read(self, character: str) -> bool:
        """Returns whether the last text is complete. Raises `NotACall`."""
        if not self._words:
            return True
        if self._at == 0 and character.isspace():
            return False
        if self._words[0][self._at] != character:
            raise NotACall
        self._at += 1
        if self._at == len(self._words[0]):
            self._words, self._at = self._words[1:], 0
        return not self._words


class TaggedArguments:
    """Arguments between marks, such as `<parameter=KEY>` and `</parameter>`, whose strings are raw."""

    def __init__(self, form: ToolFormat, forms: ArgumentForms, follows: str) -> None:
        """Reads `follows`, the text after the last argument, too."""
        self.begun = self.done = False
        before, between, after = form.argument_marks()
        self._before, self._follows, self._end = before.strip(), follows.split()[0], after.strip()
        self._key_end, _, self._value_begin = between.strip().partition("\n")
        self._has_lines = between.endswith("\n")
        self._forms = forms
        self._held = ""
        self._state = "outside"
        self._key = ""
        self._num_keys = 0
        self._marks = Marks("")
        self._value = _Value(forms.other, False)

    def read(self, character: str) -> str:
        if self._state == "value":
            return self._read_value(character)
        if self._state == "marks":
            if self._marks.read(character):
                self._state, self._held = "value", ""
                self._value = _Value(self._forms.of(self._key), self._has_lines)
            return ""
        self._held += character
        return self._read_key() if self._state == "key" else self._read_outside()

    def _read_outside(self) -> str:
        held = self._held = self._held.lstrip()
        if held == self._before:
            self._state, self._held = "key", ""
        elif held == self._follows:
            self.begun = self.done = True
            return "}" if self._num_keys else "{}"
        elif not self._before.startswith(held) and not self._follows.startswith(held):
            raise NotACall
        return ""

    def _read_key(self) -> str:
        if not self._held.endswith(self._key_end):
            if self._held[-1] == "\n":
                raise NotACall
            return ""
        self._key = self._held.removesuffix(self._key_end)
        start = ", " if self._num_keys else "{"
        self._num_keys += 1
        self.begun = True
        self._marks, self._held = Marks(self._value_begin), ""
        self._state = "marks" if self._value_begin else "value"
        self._value = _Value(self._forms.of(self._key), self._has_lines)
        return f"{start}{json.dumps(self._key, ensure_ascii=False)}: "

    def _read_value(self, character: str) -> str:
        if self._value.in_quotes:
            return self._value.read(character)
        self._held += character
        if self._held.endswith(self._end):
            text = self._held.removesuffix(self._end)
            self._state, self._held = "outside", ""
            return self._value.read(text) + self._value.end()
        certain = certain_length(self._held, self._end)
        text, self._held = self._held[:certain], self._held[certain:]
        return self._value.read(text)


class _Value:
    """One value as JSON: a raw string, or JSON itself, as the argument's form says."""

    def __init__(self, form: ArgumentForm, has_lines: bool) -> None:
        """Drops one line break at each end of the value if `has_lines`."""
        self._form = form
        self._has_lines = has_lines
        self._at_start = True
        self._line_break = ""
        self._kind = "string" if form.is_raw else "unknown"
        self._opened = False
        self._held = ""
        self.in_quotes = False
        """Whether the reader is inside a string of JSON, where a mark that ends the value is text."""
        self._escaped = False

    def read(self, text: str) -> str:
        return "".join(map(self._read, text))

    def end(self) -> str:
        if self._kind == "unknown":
            held = self._held.strip() if not self._form.is_mixed else self._held
            self._kind = "json" if self._is_literal(held) else "string"
            return self._given(held) + self._closed()
        return self._closed()

    def _closed(self) -> str:
        if self._kind == "json":
            return ""
        return '"' if self._opened else '""'

    def _read(self, character: str) -> str:
        if self._has_lines:
            if self._at_start and character == "\n":
                self._at_start = False
                return ""
            self._at_start = False
            if character == "\n":
                before, self._line_break = self._line_break, "\n"
                return self._given(before) if before else ""
            character, self._line_break = self._line_break + character, ""
        return self._given(character)

    def _given(self, text: str) -> str:
        if self._kind == "unknown":
            text = self._decide(text)
        if not text:
            return ""
        if self._kind == "json":
            self._watch_quotes(text)
            return text
        start = "" if self._opened else '"'
        self._opened = True
        return start + json.dumps(text, ensure_ascii=False)[1:-1]

    def _watch_quotes(self, text: str) -> None:
        for character in text:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = self.in_quotes
            elif character == '"':
                self.in_quotes = not self.in_quotes

    def _decide(self, text: str) -> str:
        """Returns everything that was held back, once the type of the value is known."""
        self._held += text
        held = self._held if self._form.is_mixed else self._held.lstrip()
        if not self._form.is_mixed and held[:1] in ("{", "[", '"'):
            self._kind = "json"
        elif not LITERAL_PREFIX.fullmatch(held if self._form.is_mixed else held.rstrip()):
            self._kind = "string"
        else:
            return ""
        self._held = ""
        return held

    def _is_literal(self, text: str) -> bool:
        if not LITERAL.fullmatch(text):
            return False
        name = {"n": "null", "t": "boolean", "f": "boolean"}.get(text[0], "number")
        return name in self._form.types or "string" not in self._form.types


class PythonArguments:
    """Keyword arguments in Python's syntax, up to the closing parenthesis. Each is returned when it is complete."""

    def __init__(self) -> None:
        self.begun = self.done = False
        self._held: list[str] = []
        """Characters of the key or the value under way, which may be a whole file."""
        self._key: str | None = None
        self._num_keys = 0
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def read(self, character: str) -> str:
        if self._quote:
            self._held.append(character)
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == self._quote:
                self._quote = ""
            return ""
        if self._key is None:
            return self._read_key(character)
        if self._depth == 0 and character in ",)":
            return self._end_value(character)
        if character in "\"'":
            self._quote = character
        elif character in "[{(":
            self._depth += 1
        elif character in "]})":
            self._depth -= 1
            if self._depth < 0:
                raise NotACall
        self._held.append(character)
        return ""

    def _read_key(self, character: str) -> str:
        if character == "=":
            self._key, self._held = "".join(self._held).strip(), []
            if not self._key:
                raise NotACall
            self._num_keys += 1
        elif character == ")" and not "".join(self._held).strip():
            self.begun = self.done = True
            return "}" if self._num_keys else "{}"
        elif character in "\"'()[]{},\n":
            raise NotACall
        else:
            self._held.append(character)
        return ""

    def _end_value(self, character: str) -> str:
        value = _python_literal("".join(self._held).strip())
        start = ", " if self._num_keys > 1 else "{"
        text = f"{start}{json.dumps(self._key, ensure_ascii=False)}: {value}"
        self.begun, self.done = True, character == ")"
        self._key, self._held = None, []
        return text + ("}" if self.done else "")


def _python_literal(text: str) -> str:
    """Returns a literal of Python or JSON as JSON. Raises `NotACall`."""
    try:
        json.loads(text, parse_constant=_no_constant)
        return text
    except (ValueError, RecursionError):
        pass
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise NotACall from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
