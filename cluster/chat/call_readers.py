"""Reads one tool call, character by character: its name, its id if the model gives one, and its arguments as they come.

`cluster/chat/tool_parser.py` makes a reader where a call may begin. A reader keeps its text until the text is certainly
a call. Text that only looks like a call can so be given back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from manta.cluster.chat.argument_forms import ArgumentForms
from manta.cluster.chat.argument_readers import (
    ArgumentsReader,
    JsonArguments,
    Marks,
    NotACall,
    PythonArguments,
    TaggedArguments,
)
from manta.cluster.chat.delimited_arguments import DelimitedArguments
from manta.cluster.chat.tool_formats import ToolFormat

_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")


class CallReader:
    """The base of the readers of both kinds of calls."""

    def __init__(self, form: ToolFormat, tools: Mapping[str, ArgumentForms], skipped: str) -> None:
        self.skipped = skipped
        """Text before the call that announced it, such as the mark that begins calls."""
        self._raw = [skipped]
        """The parts of `raw`. Characters are joined once, because a string that grows by each is copied each time."""
        self.name: str | None = None
        self.call_id: str | None = None
        """The id that the model gave the call; None if a new one is needed."""
        self.position = 0
        """Characters of the last text that were read."""
        self.done = False
        self._form = form
        self._tools = tools
        self._new: list[str] = []
        """Parts of the arguments that the caller has not taken yet."""

    @property
    def raw(self) -> str:
        """Everything so far, to give back if the text turns out not to be a call; kept until `is_open`."""
        return "".join(self._raw)

    @property
    def is_open(self) -> bool:
        """Whether the text is certainly a call: a known name, and arguments that begin or are left out."""
        raise NotImplementedError

    @property
    def has_all_arguments(self) -> bool:
        """Whether the arguments have ended."""
        raise NotImplementedError

    def take_arguments(self) -> str:
        """Returns the arguments' JSON since the last call of this method."""
        new, self._new = self._new, []
        return "".join(new)

    def read(self, text: str) -> None:
        """Reads to the end of the call or of the text. Raises `NotACall`."""
        self.position = 0
        for character in text:
            self._step(character)
            if not self.is_open:
                self._raw.append(character)
            self.position += 1
            if self.done:
                break

    def _step(self, character: str) -> None:
        raise NotImplementedError

    def _set_name(self, name: str) -> None:
        if name not in self._tools or self.name is not None:
            raise NotACall
        self.name = name


class ObjectReader(CallReader):
    """Reads a call that is one JSON object, `{"name": ..., "arguments": {...}}`, with its keys in any order."""

    def __init__(self, form: ToolFormat, tools: Mapping[str, ArgumentForms], skipped: str, may_open_list: bool) -> None:
        super().__init__(form, tools, skipped)
        self._list_mark = may_open_list
        self._begun_arguments = self._ended_arguments = False
        self._closers: list[str] = []
        self._in_string = self._escaped = False
        self._key: str | None = None
        self._value: list[str] = []

    @property
    def is_open(self) -> bool:
        return self.name is not None and (self.done or self._begun_arguments)

    @property
    def has_all_arguments(self) -> bool:
        return self.is_open and (self.done or self._ended_arguments)

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
            self._key, self._value = _parsed(self._value), []
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
        """Reads a closing bracket. If one closer is left, the bracket ends a value of the call's own object; if none is
        left, the bracket ends the call.
        """
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
            self._new = ["{}"]
        self.done = True

    def _append(self, character: str) -> None:
        if self._key != self._form.arguments_key:
            self._value.append(character)
            return
        if self._ended_arguments or not (self._begun_arguments or character == "{"):
            raise NotACall
        self._begun_arguments = True
        self._new.append(character)

    def _end_value(self) -> None:
        """Ends a value of the call's own object."""
        if self._key == self._form.arguments_key:
            self._ended_arguments = True
        if self._key == self._form.name_key and self._value:
            self._set_name(_parsed(self._value))
        self._value = []


def _parsed(value: list[str]) -> str:
    try:
        parsed = json.loads("".join(value))
    except ValueError:
        raise NotACall from None
    if not isinstance(parsed, str):
        raise NotACall
    return parsed


class FrameReader(CallReader):
    """Reads a call whose name and arguments stand between the texts of `ToolFormat.call`. White space between the words
    of those texts may be of any length.
    """

    def __init__(self, form: ToolFormat, tools: Mapping[str, ArgumentForms], skipped: str, may_open_list: bool) -> None:
        super().__init__(form, tools, skipped)
        pieces = form.pieces()
        at = pieces.index("{arguments}")
        self._pieces = [piece for piece in pieces[:at] if piece.strip()]
        if form.calls == "list" and may_open_list:
            self._pieces.insert(0, "[")
        self._follows = "".join(pieces[at + 1 :]).strip() or form.end
        self._values: dict[str, str] = {}
        self._value: list[str] = []
        self._marks = Marks("")
        self._arguments: ArgumentsReader | None = None
        self._begin_piece()

    @property
    def is_open(self) -> bool:
        return self._arguments is not None and self._arguments.begun

    @property
    def has_all_arguments(self) -> bool:
        return self._arguments is not None and self._arguments.done

    def _begin_piece(self) -> None:
        if self._pieces:
            self._value, self._marks = [], Marks(self._pieces[0])
            return
        assert self.name is not None
        self._arguments = self._reader(self._tools[self.name])
        self.call_id = self._form.call_id or None
        for placeholder, value in self._values.items():
            self.call_id = self.call_id and self.call_id.replace(placeholder, value)

    def _next_piece(self) -> None:
        self._pieces = self._pieces[1:]
        self._begin_piece()

    def _reader(self, forms: ArgumentForms) -> ArgumentsReader:
        if self._form.values == "python":
            return PythonArguments()
        if self._form.values == "delimited":
            return DelimitedArguments(self._form.quote)
        return TaggedArguments(self._form, forms, self._follows) if self._form.argument else JsonArguments()

    def _step(self, character: str) -> None:
        if self._arguments is not None:
            self._new.append(self._arguments.read(character))
            self.done = self._arguments.done
        elif self._pieces[0].startswith("{"):
            self._step_value(character)
        elif self._marks.read(character):
            self._next_piece()

    def _step_value(self, character: str) -> None:
        if character in _NAME_CHARACTERS:
            self._value.append(character)
        elif self._value:
            placeholder, value = self._pieces[0], "".join(self._value)
            if placeholder == "{name}":
                self._set_name(value)
            self._values[placeholder] = value
            self._next_piece()
            self._step(character)
        elif not character.isspace():
            raise NotACall
