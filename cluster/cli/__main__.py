"""The command `manta`: its exit codes, and how errors and Ctrl-C end it. `cluster/cli/commands.py` has the subcommands.

Exit codes:

- 0: done,
- 1: the answer is no (`check`), or the start failed (`serve`, `batch`),
- 2: something that the user can fix,
- 128 plus a signal's number: the signal ended the command,
- 141: the reader of standard output closed it, as `manta check | head` may.

Everything is imported where Ctrl-C is caught.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

_RAY_USERS = ("serve", "batch")
"""Subcommands that start Ray in this process."""
_OBJECTS_BETWEEN_COLLECTIONS = 100_000
"""Allocations between two runs of the garbage collector. With Python's default of 700 the collector takes a tenth
of the time in which a command imports Ray.
"""
_OUTPUT_CLOSED = 141
"""Exit code of a shell for a command that SIGPIPE (13) ends."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `manta` with `arguments` and returns the exit code. Without `arguments` it takes those of the process, as
    the installed command does, and may end the process.
    """
    argv = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        from manta.structured.visible_logs import guard_process

        gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
        guard_process()
    code = _guarded(argv)
    if arguments is None and argv[:1] and argv[0] in _RAY_USERS and "ray" in sys.modules:
        from manta.cluster.cli.interruption import leave

        leave(code)
    return code


def _guarded(argv: list[str]) -> int:
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # here, because Python's own flush at exit would print a traceback
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered has no reader
        return _OUTPUT_CLOSED


def _run(argv: list[str]) -> int:
    from manta.cluster.cli.commands import run
    from manta.cluster.cli.refusal import Refusal, paragraph
    from manta.structured.visible_text import say_lines

    try:
        return run(argv)
    except Refusal as error:
        say_lines(paragraph(f"manta: {error}"), file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
