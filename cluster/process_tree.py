"""Finds and ends all processes below this one, including those whose own parent has ended.

Ray's agents outlive the process that started them by seconds. A command calls `adopt_orphans` before it starts Ray;
from then on the system makes such orphans children of the command, which then finds them. While the command serves it
adopts none, because it would have to collect each one that ends. `manta serve` and `manta batch` use this module. A
library must not, because it would end processes of its user.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import time

import psutil

_PR_SET_CHILD_SUBREAPER = 36
"""Option of Linux's `prctl` that makes a process the parent of its orphaned descendants."""
_END_WAIT_S = 10.0
"""Seconds to wait for the end of killed processes; one that waits for a disk may need longer, and ends by itself."""


def adopt_orphans(adopts: bool = True) -> None:
    """Makes this process the parent of descendants whose own parent ends, or with `adopts` false no longer. Does
    nothing where the system cannot.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0)


def kill_below() -> None:
    """Kills all descendants of this process and waits until they have ended.

    They are suspended first, so that none starts another process between being found and being killed.
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
    """Waits up to `patience_s` seconds until no descendant of this process runs, then kills the rest."""
    deadline = time.monotonic() + patience_s
    while (left := _below()) and time.monotonic() < deadline:
        psutil.wait_procs(left, timeout=0.1)
    if left:
        kill_below()


def _below() -> list[psutil.Process]:
    """Returns the running descendants of this process, without zombies."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
