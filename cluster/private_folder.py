"""A folder that only this user can enter, with a path short enough for sockets. It is removed with its process.

A Ray of our own has its files in one, because Ray makes its session folders writable for everybody, and another user
could move the sockets away and read logs. The ranks of one machine find each other in another one. The folders of the
last failed starts stay, because the user was told to read logs in them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import shutil
import tempfile

PREFIX = "manta-"
MAX_PATH_BYTES = 107 - 72
"""Of a socket's path (104 on macOS, where the system's folder is long and is not taken), less what Ray puts after the
folder: `/ray/session_2026-11-22_12-00-00_000000_1234567/sockets/plasma_store`.
"""
_LOCK = "lock"
_KEPT = "kept"
"""The file that marks the folder of a failed start."""
MAX_KEPT = 3
"""Folders of failed starts that stay. Each holds Ray's logs, less than a megabyte."""

_own: set[pathlib.Path] = set()
"""The folders of this process."""


class PrivateFolder:
    """A new folder. Making one also removes those of processes that were killed, and all but the newest `MAX_KEPT` of
    those that are kept.
    """

    is_kept = False
    """Whether somebody was told what to read there."""

    def __init__(self) -> None:
        parent = pathlib.Path(tempfile.gettempdir())
        if len(os.fsencode(parent)) + len(f"/{PREFIX}12345678") > MAX_PATH_BYTES:
            parent = pathlib.Path("/tmp")
        _remove_left(parent)
        unlocked = pathlib.Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=parent))  # mode 0700
        self._lock = os.open(unlocked / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Under this name others would take one without a lock for one that was left
        self.path = unlocked.rename(parent / unlocked.name.removeprefix("."))
        _own.add(self.path)

    def close(self) -> None:
        """Removes the folder, or marks it as one that stays."""
        if self.is_kept:
            (self.path / _KEPT).touch()
        else:
            shutil.rmtree(self.path, ignore_errors=True)
        _own.discard(self.path)
        os.close(self._lock)


def remove_own() -> None:
    """Removes all folders of this process, which is about to end."""
    for path in _own:
        shutil.rmtree(path, ignore_errors=True)


def _remove_left(parent: pathlib.Path) -> None:
    """Removes folders that no process holds. The system gives up a lock with the process that held it."""
    kept = sorted(parent.glob(f"{PREFIX}*/{_KEPT}"), key=_made, reverse=True)[:MAX_KEPT]
    for path in set(parent.glob(f"{PREFIX}*")) - {mark.parent for mark in kept}:
        with contextlib.suppress(OSError):  # somebody else's, or locked
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _made(mark: pathlib.Path) -> float:
    """The time at which a folder was marked; 0 for one that another process removes meanwhile."""
    try:
        return mark.stat().st_mtime
    except OSError:
        return 0.0
