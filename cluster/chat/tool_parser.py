"""Finds tool calls in a model's text as it grows, and returns their arguments as they come.

One `ToolCallParser` per answer, used by `cluster/chat/reader.py`. The joined pieces do not depend on how the text was
cut. Text that only looks like a call comes back as text.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from manta.cluster.chat.argument_forms import ArgumentForms
from manta.cluster.chat.argument_readers import NotACall
from manta.cluster.chat.call_readers import CallReader, FrameReader, ObjectReader
from manta.cluster.chat.reasoning import certain_length
from manta.cluster.chat.tool_formats import ToolFormat


class Piece(msgspec.Struct, frozen=True):
    """Text (`call` is None), or a part of call number `call`. The call's name comes first, without arguments."""

    text: str = ""
    call: int | None = None
    name: str | None = None
    call_id: str | None = None
    """Id that the model gave the call, set with `name`. None if the model gave none, or one that is taken."""
    arguments: str = ""


class ToolCallParser:
    """`feed` the text, then `finish`."""

    def __init__(
        self,
        form: ToolFormat,
        tools: Mapping[str, ArgumentForms],
        only_calls: bool = False,
        has_whole_marks: bool = False,
    ) -> None:
        """Takes the `tools` that may be called, by name. With `only_calls` the answer has no other text. With
        `has_whole_marks` no text ends with a part of a mark that begins calls.
        """
        self._form = form
        self._tools = tools
        self._text = ""
        """Text that is not decided yet: it may be a mark's beginning, or white space in front of a mark."""
        self._at_start = True
        self._reader: CallReader | None = None
        self._between: list[str] | None = None
        """Marks that may follow a call, in this order; None if the text does not follow one."""
        self._ids: set[str] = set()
        self._only_calls = only_calls
        self._has_whole_marks = has_whole_marks
        self.num_calls = 0
        self.is_cut = False
        """Whether the text ended within a call, set by `finish`."""

    def feed(self, text: str) -> list[Piece]:
        """Returns the pieces that are certain now."""
        self._text += text
        pieces: list[Piece] = []
        before = None
        while self._text and before != (state := (len(self._text), self._reader, self._between)):
            before = state
            if self._reader is not None:
                pieces += self._read_call(self._reader)
            elif self._between is not None:
                self._read_between(self._between)
            else:
                pieces += self._read_text()
        return pieces

    def finish(self, is_cut: bool = False) -> list[Piece]:
        """Returns the text that was held back. A call that was cut off before its arguments is left out. With `is_cut`
        the model had not ended the text, which may end with a part of a mark. That is left out too.
        """
        rest, reader = self._text, self._reader
        if reader is not None:
            self.is_cut = not reader.has_all_arguments
            rest = "" if reader.is_open or self._is_call(reader.raw, is_cut) else reader.raw
        elif self._between is not None:
            rest = ""
        elif self._only_calls or self.num_calls:
            self.is_cut, rest = bool(rest.strip()), ""  # it is the beginning of a mark, and no text follows calls
        elif is_cut and not self._has_whole_marks and rest.strip():
            self.is_cut, rest = True, ""
        self._reader, self._text = None, ""
        return _as_text(rest)

    def _is_call(self, raw: str, is_cut: bool) -> bool:
        """Returns whether a text whose end is missing is a call. The grammar allows no other text that begins as calls
        do. With `is_cut` the text may be too short to tell.
        """
        raw, bare = raw.lstrip(), self._form.bare_starts(self._tools)
        begins = raw.startswith((*self._form.begins, *bare))
        may_begin = is_cut and any(start.startswith(raw) for start in bare)
        return self._only_calls or self.num_calls > 0 or begins or may_begin

    # ---- outside calls -------------------------------------------------------------------------------------------

    def _read_text(self) -> list[Piece]:
        if self._at_start and self._form.is_bare:
            stripped = self._text.lstrip()
            if not stripped:
                return []
            if stripped.startswith("[" if self._form.calls == "list" else "{"):
                self._begin_call(self._text[: -len(stripped)], stripped, True)
                return []
        begins = [begin for begin in self._form.begins if begin in self._text]
        if begins:
            begin = min(begins, key=self._text.index)
            before, _, after = self._text.partition(begin)
            content = before.rstrip()
            self._begin_call(before[len(content) :] + begin, after, True)
            return _as_text(content)
        certain = min(certain_length(self._text, begin) for begin in self._form.begins)
        certain = len(self._text[:certain].rstrip())
        content, self._text = self._text[:certain], self._text[certain:]
        self._at_start = self._at_start and not content
        return _as_text(content)

    def _begin_call(self, skipped: str, rest: str, is_first: bool) -> None:
        self._at_start = False
        kind = FrameReader if self._form.call else ObjectReader
        self._reader = kind(self._form, self._tools, skipped, self._form.calls == "list" and is_first)
        self._text = rest

    def _read_between(self, marks: list[str]) -> None:
        """Reads the marks behind a call, each of which may be missing, or goes on to the next call."""
        rest = self._text.lstrip()
        following = self._following(marks)
        if not rest or any(mark.startswith(rest) and mark != rest for mark in (*marks, *following)):
            return
        for mark in following:
            if rest.startswith(mark):
                self._between = None
                self._begin_call("", rest[len(mark) :] if mark == "," else rest, False)
                return
        found = next((index for index, mark in enumerate(marks) if rest.startswith(mark)), None)
        if found is None:
            self._between = None
            return
        self._text = rest[len(marks[found]) :]
        self._between = marks[found + 1 :] or None

    def _marks_behind(self) -> list[str]:
        form = self._form
        tail = form.pieces()[-1].split() if form.calls == "section" else []
        return [*tail, *(["]"] if form.calls == "list" else []), *([form.end] if form.end else [])]

    def _following(self, marks: list[str]) -> tuple[str, ...]:
        """Returns the texts that begin another call after the same mark."""
        form = self._form
        if form.calls == "list":
            return (",",) if "]" in marks else ()
        return (form.pieces()[0].strip(),) if form.calls == "section" and marks else ()

    # ---- inside a call -------------------------------------------------------------------------------------------

    def _read_call(self, reader: CallReader) -> list[Piece]:
        """Reads on to the end of the call or of the text."""
        text, self._text = self._text, ""
        pieces: list[Piece] = []
        was_open = reader.is_open
        try:
            reader.read(text)
        except NotACall:
            if not reader.is_open:
                self._reader, self._text = None, reader.raw[len(reader.skipped) :] + text[reader.position :]
                return _as_text(reader.skipped)
            reader.done = True  # broken JSON in arguments that are out already: the call ends here
        if reader.is_open:
            if not was_open:
                pieces.append(Piece(call=self.num_calls, name=reader.name, call_id=self._new_id(reader.call_id)))
                self.num_calls += 1
            new = reader.take_arguments()
            if new:
                pieces.append(Piece(call=self.num_calls - 1, arguments=new))
        if reader.done:
            self._reader, self._between, self._text = None, self._marks_behind() or None, text[reader.position :]
        return pieces

    def _new_id(self, call_id: str | None) -> str | None:
        if call_id is None or call_id in self._ids:
            return None
        self._ids.add(call_id)
        return call_id


def _as_text(text: str) -> list[Piece]:
    return [Piece(text)] if text else []
