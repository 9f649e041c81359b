"""Refusals of the command line, and how they are wrapped for a terminal."""

import textwrap


class Refusal(Exception):
    """An error that the user can fix. The message is one paragraph with the value, the bound and the remedy."""

    exit_code = 2


class NotStarted(Refusal):
    """A failure while the command started, after it had passed every check."""

    exit_code = 1


def paragraph(text: str) -> str:
    """Wraps text for a terminal. Paths stay in one piece, so that they can be pasted."""
    if "\n" in text:  # YAML's caret marks a column
        return text
    return textwrap.fill(text, width=100, break_long_words=False, break_on_hyphens=False)
