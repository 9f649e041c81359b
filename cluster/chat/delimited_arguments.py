"""Reads the arguments of one call in Gemma 4's syntax as they come, and returns the JSON that they make.

An object is `{key:value,...}` with keys that have no quotes, a list `[value,...]`, and a string stands between two
marks, within which nothing is escaped. Numbers, `true`, `false` and `null` are those of JSON.
"""

from __future__ import annotations

import json

from manta.cluster.chat.argument_readers import LITERAL, LITERAL_PREFIX, NotACall
from manta.cluster.chat.reasoning import certain_length


class DelimitedArguments:
    """An `ArgumentsReader` of one object whose strings stand between two `quote`."""

    def __init__(self, quote: str) -> None:
        self.begun = self.done = False
        self._quote = quote
        self._closers: list[str] = []
        self._held = ""
        """The key, literal or mark under way, or the end of a string that may be a part of its mark."""
        self._state = "start"
        """The place in the syntax. At `start` the reader expects the object's bracket, at `first` and `next` a key or
        an item, at `value` a key's value, at `colon` the colon after a key in quotes, and at `end` a comma or bracket.
        In `string` and `quoted_key` it is between two marks.
        """

    def read(self, character: str) -> str:
        """Returns the JSON that one more character makes certain. Raises `NotACall`."""
        if self._state in ("string", "quoted_key"):
            return self._read_text(character)
        if character.isspace() and not self._held:
            return ""
        if self._state == "start":
            if character != "{":
                raise NotACall
            self.begun = True
            return self._open(character)
        if self._state == "colon":
            return self._expect_colon(character)
        if self._state == "end":
            return self._read_end(character)
        if self._is_key:
            return self._read_key(character)
        return self._read_value(character)

    @property
    def _is_key(self) -> bool:
        return self._state != "value" and self._closers[-1] == "}"

    def _open(self, bracket: str) -> str:
        self._closers.append("}" if bracket == "{" else "]")
        self._state = "first"
        return bracket

    def _close(self, bracket: str) -> str:
        if bracket != self._closers.pop():
            raise NotACall
        self._state = "end"
        self.done = not self._closers
        return bracket

    def _read_text(self, character: str) -> str:
        self._held += character
        if self._held.endswith(self._quote):
            text, self._held = self._held.removesuffix(self._quote), ""
            is_key, self._state = self._state == "quoted_key", "end"
            if is_key:
                self._state = "colon"
            return f'{_escaped(text)}"'
        certain = certain_length(self._held, self._quote)
        text, self._held = self._held[:certain], self._held[certain:]
        return _escaped(text)

    def _expect_colon(self, character: str) -> str:
        if character != ":":
            raise NotACall
        self._state = "value"
        return ": "

    def _read_end(self, character: str) -> str:
        if character == ",":
            self._state = "next"
            return ", "
        return self._close(character)

    def _begins_text(self, state: str) -> bool:
        """Returns whether the mark of a string or of a key in quotes is complete, which `state` then is."""
        if self._held != self._quote:
            return False
        self._held, self._state = "", state
        return True

    def _read_key(self, character: str) -> str:
        if character == "}" and not self._held and self._state == "first":
            return self._close(character)
        if character == ":" and self._held:
            key, self._held, self._state = self._held.strip(), "", "value"
            return f"{json.dumps(key, ensure_ascii=False)}: "
        if character in ",:{}[]\n":
            raise NotACall
        self._held += character
        return '"' if self._begins_text("quoted_key") else ""

    def _read_value(self, character: str) -> str:
        if not self._held:
            if character in "{[":
                return self._open(character)
            if character == "]" and self._state == "first":
                return self._close(character)
        elif character in ",}]" and LITERAL.fullmatch(literal := self._held.rstrip()):
            self._held = ""
            return literal + self._read_end(character)
        self._held += character
        if self._begins_text("string"):
            return '"'
        if not self._quote.startswith(self._held) and not LITERAL_PREFIX.fullmatch(self._held.rstrip()):
            raise NotACall
        return ""


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
