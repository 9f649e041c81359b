"""How the command line answers what it does not know: with the usage of the subcommand, and the nearest name."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any

from cluster.cli.flags import ANSWERS, KEYS_ARE_SEEN
from cluster.cli.refusal import Refusal

ANSWERED = ("serve", "check", "batch")
"""Subcommands whose users type flags of other servers."""


class CommandParser(argparse.ArgumentParser):
    """Of one subcommand. argparse leaves what it does not know to the parser above, whose usage has no flags."""

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
    """` (did you mean ...?)`, if something known is near."""
    found = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {found[0]}?)" if found else ""
