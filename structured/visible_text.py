"""Text on its way to a terminal: clients, checkpoints and models wrote parts of it, and none of them may control the
terminal or forge a line of Manta's.

`say` prints a sentence of Manta's with foreign values in it, and `pass_on` prints foreign text that the user asked for.
Nothing else in the product prints (`tests/house/test_foreign_text.py`). `structured/visible_logs.py` does the same for
log lines.
"""

from __future__ import annotations

import numbers
import sys
import traceback
import unicodedata
from collections.abc import Iterable
from typing import TextIO

MAX_VALUE = 4000
"""Most characters of one foreign value in a line: enough for any refusal, and 50 lines of a terminal."""
MAX_LINE = 4 * MAX_VALUE
"""Most characters of a line, in which several values were shown before."""
MAX_TEXT = 65_536
"""Most characters of a text of several lines, such as a traceback. The middle is left out, not the cause at the end."""
_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode's categories of characters that are escaped: control codes, formats such as the bidirectional overrides,
halves of surrogate pairs, and separators of lines and paragraphs.
"""
_JOINERS = frozenset("\u200c\u200d")
"""Formats that stay, because Persian, Indic scripts and emoji need them. They move nothing."""


def visible(value: object, limit: int = MAX_VALUE) -> str:
    """Returns `value` as a part of one line: its control and format characters, line breaks too, are escaped as in
    Python's literals. A longer one is cut at `limit` characters, which its full length follows.
    """
    text = str(value)
    shown = _escaped(text[:limit], limit)
    return shown if len(text) <= limit and len(shown) <= limit else f"{shown[:limit]}{_cut_mark(text)}"


def cut(text: str, limit: int) -> str:
    """Returns `text`, or its first `limit` characters and its full length. The text is not escaped."""
    return text if len(text) <= limit else f"{text[:limit]}{_cut_mark(text)}"


def visible_lines(text: str, limit: int = MAX_TEXT) -> str:
    """Returns a text of several lines, each as `visible` does. All lines but the first are indented, so that none of
    them looks like a line of Manta's.
    """
    if len(text) > limit:
        text = f"{text[: limit // 2]}\n...{_cut_mark(text)} ...\n{text[-limit // 2 :]}"
    first, *others = (visible(line, MAX_LINE) for line in text.split("\n"))
    return "\n".join([first, *(f"  {line}" if line else "" for line in others)])


def visible_traceback(error: BaseException) -> str:
    """Returns the traceback of an error as `visible_lines` does."""
    return visible_lines("".join(traceback.format_exception(error)).rstrip("\n"))


def say(template: str, *values: object, file: TextIO | None = None, end: str = "\n", flush: bool = False) -> None:
    """Prints `template.format(*values)` on `file`, by default standard output. The template is a text of Manta's, which
    may have several lines. Numbers are formatted as they are, and every other value as `visible` shows it.
    """
    shown = [value if isinstance(value, numbers.Number) else visible(value) for value in values]
    _write(template.format(*shown) + end, file, flush)


def say_lines(lines: Iterable[str], file: TextIO | None = None, flush: bool = False) -> None:
    """Prints lines, each as `visible` shows it."""
    _write("".join(f"{visible(line, MAX_LINE)}\n" for line in lines), file, flush)


def pass_on(text: str, flush: bool = False) -> None:
    """Prints text that the user asked for, such as a model's answer, on standard output. A terminal gets it with all
    but line breaks and tabs escaped, and a pipe or a file gets it as it is.
    """
    _write(_escaped(text, None, kept="\n\t") if sys.stdout.isatty() else text, None, flush)


def _escaped(text: str, limit: int | None, kept: str = "") -> str:
    """Returns the text with its unsafe characters escaped; of a longer result, no less than `limit` characters."""
    if text.isprintable():
        return text
    parts, length = [], 0
    for character in text:
        is_safe = character in kept or character in _JOINERS or unicodedata.category(character) not in _UNSAFE
        part = character if is_safe else character.encode("unicode_escape").decode()
        parts.append(part)
        length += len(part)
        if limit is not None and length > limit:
            break
    return "".join(parts)


def _cut_mark(text: str) -> str:
    return f"… ({len(text):,} characters)"


def _write(text: str, file: TextIO | None, flush: bool) -> None:
    """Writes text, escaping what the stream's encoding does not have."""
    stream = sys.stdout if file is None else file
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    if flush:
        stream.flush()
