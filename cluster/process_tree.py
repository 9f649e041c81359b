"""Finds and ends everything that this process started, also what its own parent has left behind.

Ray's agents outlive the process that started them by seconds. A command calls `adopt_orphans` before it starts Ray;
from then on the system gives such processes to the command, which finds them below itself. While it serves it adopts
none, because it would have to collect each that ends. `manta serve` and `manta batch` use it. A library must not: it
would end what its user started.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import time

import psutil

_PR_SET_CHILD_SUBREAPER = 36
"""The option of Linux' `prctl` that makes a process the parent of its orphaned descendants."""
_END_WAIT_S = 10.0
"""Seconds to wait for the end of killed processes; one that waits for a disk may need longer, and ends by itself."""


def adopt_orphans(adopts: bool = True) -> None:
    """Makes this process the parent of descendants whose own parent ends, or no longer. Does nothing where the system
    cannot.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0)


def kill_below() -> None:
    """Kills all descendants of this process and waits for their ends.

    They are stopped first, so that none starts another one between being found and being killed.
    """
    known: set[psutil.Process] = set()
    while found := {each for each in _below() if each not in known}:
        known |= found
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.suspend()
    for process in known:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(list(known), timeout=_END_WAIT_S)


def end_below(patience_s: float) -> None:
    """Waits up to `patience_s` until no descendant of this process runs, then kills those that do."""
    deadline = time.monotonic() + patience_s
    while (left := _below()) and time.monotonic() < deadline:
        psutil.wait_procs(left, timeout=0.1)
    if left:
        kill_below()


def _below() -> list[psutil.Process]:
    """The descendants of this process that run; zombies, which only wait to be collected, are none."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
