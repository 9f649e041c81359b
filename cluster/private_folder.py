"""A folder that only this user can enter, with a path short enough for sockets. It is removed with its process.

A Ray of our own has its files in one, because Ray makes its session folders writable for everybody, and another user
could move the sockets away and read logs. The ranks of one machine find each other in another one. After a failed start
Ray's folder stays for its logs until the next start.
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


class PrivateFolder:
    """Made at once; folders that processes left which were killed are removed on the way."""

    is_kept = False
    """Somebody was told what to read there."""

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

    def close(self) -> None:
        """Removes it, or leaves it to the next one that is made."""
        if not self.is_kept:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_left(parent: pathlib.Path) -> None:
    """The system gives up a lock with the process that held it."""
    for path in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else's, or locked
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
