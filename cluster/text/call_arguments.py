"""The arguments of a call as chat templates read them: an object, and where a template wants a text, its JSON.

Templates differ: some write the arguments with `tojson`, some join them to a text, and some go through their members.
"""

from __future__ import annotations

import json
from typing import Any

_DECODER = json.JSONDecoder()
_CLOSING = {"{": "}", "[": "]"}


class Arguments(dict[str, Any]):
    """The arguments of a call."""

    def __radd__(self, text: str) -> str:
        return text + self.json_text()

    def json_text(self) -> str:
        """Returns the arguments as JSON."""
        return json.dumps(self, ensure_ascii=False)


class WrittenArguments(Arguments):
    """Arguments that are no whole object, mostly because the answer was cut within them. As an object they have the
    members whose values have begun; as a text they are what was written.
    """

    def __init__(self, text: str) -> None:
        super().__init__(_begun_members(text))
        self._written = text

    def __str__(self) -> str:
        return self._written

    def json_text(self) -> str:
        return self._written


def arguments_of(text: str) -> Arguments:
    """Returns the arguments of a call that are written so. A blank text and null are no arguments. Raises `ValueError`
    or `RecursionError` for a text that is no JSON, nor the beginning of an object.
    """
    text = text.strip()
    if not text:
        return Arguments()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        if not _is_cut_object(text):
            raise
        return WrittenArguments(text)
    if value is None:
        return Arguments()
    return Arguments(value) if isinstance(value, dict) else WrittenArguments(text)


def _is_cut_object(text: str) -> bool:
    """Returns whether a text opens an object that it does not close."""
    if not text.startswith("{"):
        return False
    closers: list[str] = []
    is_quoted = is_escaped = False
    for character in text:
        if is_quoted:
            is_quoted = is_escaped or character != '"'
            is_escaped = character == "\\" and not is_escaped
        elif character == '"':
            is_quoted = True
        elif character in _CLOSING:
            closers.append(_CLOSING[character])
        elif character in "}]" and (not closers or character != closers.pop()):
            return False
        if not closers:
            return False
    return True


def _begun_members(text: str) -> dict[str, Any]:
    """Returns the members of an object that is cut; none of another text. A string that was cut is kept as far as it
    goes; a list or object is not.
    """
    members: dict[str, Any] = {}
    if not text.startswith("{"):
        return members
    at = 1
    try:
        while True:
            key, at = _DECODER.raw_decode(text, _behind(text, at, ","))
            members[key], at = _value(text, _behind(text, at, ":"))
    except (ValueError, RecursionError):
        return members


def _value(text: str, at: int) -> tuple[Any, int]:
    """Returns the value that begins at a place, and the place behind it."""
    try:
        return _DECODER.raw_decode(text, at)
    except ValueError:
        if text[at : at + 1] != '"':
            raise
        return json.loads(_without_cut_escape(text[at:]) + '"'), len(text)


def _behind(text: str, at: int, mark: str) -> int:
    """Returns the place of the next character behind white space and perhaps a mark."""
    rest = text[at:].lstrip().removeprefix(mark).lstrip()
    return len(text) - len(rest)


def _without_cut_escape(text: str) -> str:
    """Returns the beginning of a string up to an escape that its end cuts in two."""
    head, backslash, tail = text.rpartition("\\")
    num_before = len(head) - len(head.rstrip("\\"))
    is_cut = tail == "" or (tail.startswith("u") and len(tail) < 5)
    return head if backslash and is_cut and num_before % 2 == 0 else text
