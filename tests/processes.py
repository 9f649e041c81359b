"""Finds and ends processes that a test started. Any of them may end while it is looked at."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import psutil

from tests.patience import PATIENCE_S


def running_below(pid: int | None, title: str = "") -> list[psutil.Process]:
    """Returns the processes below `pid` (None: this process) that run and have `title` in their command line, oldest
    first. Zombies do not count.
    """
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and title in " ".join(process.cmdline()):
                found.append(process)
    return sorted(found, key=lambda process: process.create_time())


def kill_tree(pid: int) -> None:
    """Kills a process and everything that it started, and waits for their ends."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        kill_all([*root.children(recursive=True), root])


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """Kills processes, of which some may have ended by themselves, and waits for their ends."""
    processes = list(processes)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=PATIENCE_S)
