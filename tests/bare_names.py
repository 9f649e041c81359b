"""Refuses the bare names of the rooms: `manta.cluster` is the same folder as `cluster/`, and a module that a process
imports under both names exists twice in it.

A checkout on the search path has both. The suite refuses the bare ones in each of its processes, so that strings,
pickles and child processes are caught too. `conftest.py` calls `refuse_everywhere`. Imports only the standard library,
because every Python process that a test starts runs this file at first.
"""

import os
import pathlib
import sys
import sysconfig

ROOMS = ("cluster", "workers", "structured", "specdecode")
VARIABLE = "MANTA_REFUSE_BARE_NAMES"
"""Environment variable with the path of this file. Tests that need a user's own `workers/` unset it."""
START = f'import os, sys; p = os.environ.get("{VARIABLE}"); p and exec(open(p).read(), {{"__name__": "bare_names"}})\n'
"""Text of the file in `site-packages` that each start of Python in this environment runs; see the module `site`."""


class Refuser:
    """A finder of `sys.meta_path` that stands before all others."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """Raises `ImportError` for a bare name of a room."""
        if name in ROOMS:
            raise ImportError(f"import manta.{name} instead of {name}: each of its modules would exist twice")


def refuse() -> None:
    """Refuses bare names in this process."""
    if not any(type(finder).__name__ == Refuser.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, Refuser())  # type: ignore[arg-type]


def refuse_everywhere() -> None:
    """Refuses bare names in this process and in all processes of this environment's Python that it starts."""
    refuse()
    os.environ[VARIABLE] = str(pathlib.Path(__file__).resolve())
    start = pathlib.Path(sysconfig.get_path("purelib")) / "manta_bare_names.pth"
    if not start.is_file() or start.read_text() != START:
        beside = start.with_suffix(f".{os.getpid()}")
        beside.write_text(START)
        beside.rename(start)  # another process of the suite never reads half of it


if __name__ == "bare_names":  # run by START
    refuse()
