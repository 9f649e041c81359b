"""Finds tool calls in a model's text as it grows, and gives their arguments out as they come.

One `ToolCallParser` per answer, used by `cluster/chat/plan.py`. What it gives out, joined, does not depend on
how the text was cut. Text that only looks like a call comes back as text.
"""

from __future__ import annotations

import json

import msgspec

from cluster.chat.reasoning import certain_length
from cluster.chat.tool_formats import ToolFormat


class Piece(msgspec.Struct, frozen=True):
    """Text (`call` None), or part of call number `call`: its name comes first, with no arguments."""

    text: str = ""
    call: int | None = None
    name: str | None = None
    arguments: str = ""


class NotACall(ValueError):
    """This text is no call of a known tool."""


class ToolCallParser:
    """`feed` the text, then `finish`."""

    def __init__(self, form: ToolFormat, names: frozenset[str]) -> None:
        self._form = form
        self._names = names
        self._text = ""
        """Not yet decided: it may be a mark's beginning, or white space in front of one."""
        self._at_start = True
        self._scanner: _CallScanner | None = None
        self._between = False
        """After a call: its end mark or the next call of its list may come."""
        self.num_calls = 0

    def feed(self, text: str) -> list[Piece]:
        """What is certain now."""
        self._text += text
        pieces: list[Piece] = []
        before = None
        while self._text and before != (state := (len(self._text), self._scanner, self._between)):
            before = state
            if self._scanner is not None:
                pieces += self._scan(self._scanner)
            elif self._between:
                self._read_between()
            else:
                pieces += self._read_text()
        return pieces

    def finish(self) -> list[Piece]:
        """What was held back; a call that was cut off before its arguments is text."""
        rest = self._text
        if self._scanner is not None:
            rest = "" if self._scanner.is_open else self._scanner.raw
        elif self._between or (self.num_calls and not rest.strip()):
            rest = ""
        self._scanner, self._text = None, ""
        return _as_text(rest)

    # ---- outside calls -------------------------------------------------------------------------------------------

    def _read_text(self) -> list[Piece]:
        if self._at_start and self._form.is_bare:
            stripped = self._text.lstrip()
            if not stripped:
                return []
            if stripped.startswith("{"):
                self._begin_call(self._text[: -len(stripped)], stripped)
                return []
        found = self._text.find(self._form.begin)
        if found >= 0:
            before, after = self._text[:found], self._text[found + len(self._form.begin) :]
            content = before.rstrip()
            self._begin_call(before[len(content) :] + self._form.begin, after)
            return _as_text(content)
        certain = len(self._text[: certain_length(self._text, self._form.begin)].rstrip())
        content, self._text = self._text[:certain], self._text[certain:]
        self._at_start = self._at_start and not content
        return _as_text(content)

    def _begin_call(self, skipped: str, rest: str) -> None:
        self._at_start = False
        self._scanner = _CallScanner(self._form, self._names, skipped)
        self._text = rest

    def _read_between(self) -> None:
        rest, end = self._text.lstrip(), "]" if self._form.is_list else self._form.end
        if not rest or (end.startswith(rest) and rest != end):
            return
        self._between = False
        if self._form.is_list and rest.startswith(","):
            self._begin_call("", rest[1:])
        elif rest.startswith(end):
            self._text = rest.removeprefix(end)

    # ---- inside a call -------------------------------------------------------------------------------------------

    def _scan(self, scanner: _CallScanner) -> list[Piece]:
        """Reads on to the end of the call or of the text."""
        text, self._text = self._text, ""
        pieces: list[Piece] = []
        was_open = scanner.is_open
        try:
            scanner.read(text)
        except NotACall:
            if not scanner.is_open:
                self._scanner, self._text = None, text[scanner.position :]
                return _as_text(scanner.raw)
            scanner.done = True  # broken JSON in arguments that are out already: the call ends here
        if scanner.is_open:
            if not was_open:
                pieces.append(Piece(call=self.num_calls, name=scanner.name))
                self.num_calls += 1
            new = scanner.take_arguments()
            if new:
                pieces.append(Piece(call=self.num_calls - 1, arguments=new))
        if scanner.done:
            self._scanner, self._between, self._text = None, True, text[scanner.position :]
        return pieces


class _CallScanner:
    """Reads one `{"name": ..., "arguments": {...}}` character by character, its arguments as they stand."""

    def __init__(self, form: ToolFormat, names: frozenset[str], skipped: str) -> None:
        self.raw = skipped
        """Everything so far, to give back if it turns out to be no call; kept until `is_open`."""
        self.name: str | None = None
        self.position = 0
        """Characters of the last text that were read."""
        self.done = False
        self._names = names
        self._list_mark = form.is_list
        self._arguments_key = form.arguments_key
        self._arguments = ""
        """Not yet taken."""
        self._begun_arguments = self._ended_arguments = False
        self._closers: list[str] = []
        self._in_string = self._escaped = False
        self._key: str | None = None
        self._value = ""

    @property
    def is_open(self) -> bool:
        """Whether this is certainly a call: a known name, and arguments that begin or are left out."""
        return self.name is not None and (self.done or self._begun_arguments)

    def take_arguments(self) -> str:
        """The arguments' text since the last time."""
        new, self._arguments = self._arguments, ""
        return new

    def read(self, text: str) -> None:
        """Reads to the call's end or the text's. Raises `NotACall`."""
        self.position = 0
        for character in text:
            self._step(character)
            if not self.is_open:
                self.raw += character
            self.position += 1
            if self.done:
                break

    def _step(self, character: str) -> None:
        if self._in_string:
            self._append(character)
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                if len(self._closers) == 1 and self._key is not None:
                    self._end_value()
        elif not self._closers:
            self._step_outside(character)
        elif character == '"':
            self._in_string = True
            self._append(character)
        elif character in "{[":
            self._closers.append("}" if character == "{" else "]")
            self._append(character)
        elif character in "}]":
            self._close(character)
        elif len(self._closers) == 1 and character == ":" and self._key is None:
            self._key, self._value = self._parsed(self._value), ""
        elif len(self._closers) == 1 and character == ",":
            self._end_value()
            self._key = None
        elif len(self._closers) > 1 or not character.isspace():
            self._append(character)

    def _step_outside(self, character: str) -> None:
        if character == "{":
            self._closers.append("}")
        elif character == "[" and self._list_mark:
            self._list_mark = False
        elif not character.isspace():
            raise NotACall

    def _close(self, character: str) -> None:
        if character != self._closers.pop():
            raise NotACall
        if self._closers:
            self._append(character)
            if len(self._closers) == 1:
                self._end_value()
            return
        self._end_value()
        if self.name is None:
            raise NotACall
        if not self._begun_arguments:
            self._arguments = "{}"
        self.done = True

    def _append(self, character: str) -> None:
        if self._key != self._arguments_key:
            self._value += character
            return
        if self._ended_arguments or not (self._begun_arguments or character == "{"):
            raise NotACall
        self._begun_arguments = True
        self._arguments += character

    def _end_value(self) -> None:
        """A value of the call's own object is complete."""
        if self._key == self._arguments_key:
            self._ended_arguments = True
        if self._key == "name" and self._value:
            name = self._parsed(self._value)
            if name not in self._names or self.name is not None:
                raise NotACall
            self.name = name
        self._value = ""

    @staticmethod
    def _parsed(value: str) -> str:
        try:
            parsed = json.loads(value)
        except ValueError:
            raise NotACall from None
        if not isinstance(parsed, str):
            raise NotACall
        return parsed


def _as_text(text: str) -> list[Piece]:
    return [Piece(text)] if text else []
