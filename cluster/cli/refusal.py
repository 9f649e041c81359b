"""Refusals of the command line, and how they are wrapped for a terminal."""

import textwrap

from manta.structured.visible_text import visible_lines


class Refusal(Exception):
    """An error that the user can fix. The message is one paragraph with the value, the bound and the remedy."""

    exit_code = 2


class NotStarted(Refusal):
    """A failure while the command started, after it had passed every check."""

    exit_code = 1


def paragraph(text: str) -> list[str]:
    """Returns the lines of a text for a terminal. Paths stay in one piece, so that they can be pasted."""
    lines = visible_lines(text).split("\n")
    if len(lines) > 1:  # YAML's caret marks a column
        return lines
    return textwrap.wrap(lines[0], width=100, break_long_words=False, break_on_hyphens=False)
