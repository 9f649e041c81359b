"""The subcommands of `manta`, one module each; `cluster/cli/commands.py` calls them."""

import textwrap


class Refusal(Exception):
    """Something that the user can mend. The message is one paragraph with the value, the bound and the remedy."""

    exit_code = 2


class NotStarted(Refusal):
    """The command passed every check and failed while it started."""

    exit_code = 1


def paragraph(text: str) -> str:
    """Text for a terminal. Paths stay in one piece, so that they can be pasted."""
    if "\n" in text:  # YAML's caret stands below a column
        return text
    return textwrap.fill(text, width=100, break_long_words=False, break_on_hyphens=False)
