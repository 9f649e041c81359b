"""Reads one message of `manta chat` as it is typed or pasted, over several lines if need be."""

from __future__ import annotations

import contextlib
import select
import sys

PASTE_S = 0.05
"""Seconds within which the next line counts as pasted, because nobody types so fast."""
QUOTES = '"""'


def read_message() -> str:
    """Returns a message: one line, or several that

    - follow a `\\` at a line's end,
    - are between two lines of `\"\"\"`, or
    - were pasted into a terminal together.

    A terminal shows a prompt. Raises `EOFError` at the end of input.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() line editing and history
    text = _line("> ")
    if text.lstrip().startswith(QUOTES):
        return _quoted(text.lstrip().removeprefix(QUOTES))
    while (pasted := _is_pasted()) or text.endswith("\\"):
        text = f"{text if pasted else text[:-1]}\n{_line('. ')}"
    return text.strip()


def is_interactive() -> bool:
    """Returns whether somebody types and reads in a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _line(prompt: str) -> str:
    return input(prompt if is_interactive() else "")


def _quoted(text: str) -> str:
    """Returns the text up to the closing quotes."""
    while not text.rstrip().endswith(QUOTES):
        text = f"{text}\n{_line('. ')}"
    return text.rstrip().removesuffix(QUOTES).strip("\n")


def _is_pasted() -> bool:
    """Returns whether more input was pasted. In a pipe each line is a message, however fast it comes."""
    return sys.stdin.isatty() and bool(select.select([sys.stdin], [], [], PASTE_S)[0])
