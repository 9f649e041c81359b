"""Answers to unknown commands and flags: the usage of the subcommand, and the nearest known name."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from manta.cluster.cli.flags import ANSWERS, KEYS_ARE_SEEN
from manta.cluster.cli.refusal import Refusal
from manta.structured.visible_text import say

ANSWERED = ("serve", "check", "batch")
"""Subcommands whose users may type flags of other servers."""


class VisibleParser(argparse.ArgumentParser):
    """A parser whose errors quote the command line in its visible form. It takes no abbreviation of a flag, because a
    later flag could make it ambiguous.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        say("{}: error: {}", self.prog, message, file=sys.stderr)
        self.exit(2)


class CommandParser(VisibleParser):
    """The parser of one subcommand. argparse itself leaves unknown flags to the parser above, whose usage shows no
    flags.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            if flag in ANSWERS and self.prog.split()[-1] in ANSWERED:
                self.error(f"there is no {flag}: {ANSWERS[flag]}")
            if flag == "--api-key":
                self.error(f"there is no {flag}: put the key into MANTA_API_KEY; {KEYS_ARE_SEEN}")
            known = [option for action in self._actions for option in action.option_strings]
            self.error(f"there is no {flag}{nearest(flag, known)}")
        return options, unknown


def check_command(argv: Sequence[str], commands: Sequence[str]) -> None:
    """Raises `Refusal` if the first word is no subcommand."""
    if argv and not argv[0].startswith("-") and argv[0] not in commands:
        raise Refusal(
            f"there is no command {argv[0]!r}{nearest(argv[0], commands)}; the commands are {', '.join(commands)}"
        )


def nearest(name: str, known: Sequence[str]) -> str:
    """Returns ` (did you mean ...?)` if a known name is similar; else empty."""
    found = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {found[0]}?)" if found else ""
