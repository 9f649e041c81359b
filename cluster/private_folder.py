"""A folder that only this user can enter, with a path short enough for sockets; removed when its process ends.

A Ray of our own keeps its files in one. Ray makes its session folders writable for everybody, so that another user
could move the sockets away and read logs. The ranks of one machine find each other in another one. The folders of the
last failed starts stay, because the error messages name logs in them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pathlib
import shutil
import tempfile

PREFIX = "manta-"
MAX_PATH_BYTES = 107 - 72
"""Longest path of a folder, in bytes: that of a socket (107; 104 on macOS, whose long temporary folder is not used)
less what Ray appends, `/ray/session_2026-11-22_12-00-00_000000_1234567/sockets/plasma_store`.
"""
_LOCK = "lock"
_MARK = b"a private folder of Manta\n"
"""Content of the lock file, by which a folder proves to be one of ours."""
_KEPT = "kept"
"""Name of the file that marks the folder of a failed start."""
MAX_KEPT = 3
"""Folders of failed starts that stay. Each holds Ray's logs, less than a megabyte."""

_own: set[pathlib.Path] = set()
"""Folders of this process."""


class PrivateFolder:
    """A new folder. Its creation also removes the folders of killed processes, and all kept ones but the newest
    `MAX_KEPT`.
    """

    is_kept = False
    """Whether the folder stays because a message names a file in it."""

    def __init__(self) -> None:
        parent = pathlib.Path(tempfile.gettempdir())
        if len(os.fsencode(parent)) + len(f"/{PREFIX}12345678") > MAX_PATH_BYTES:
            parent = pathlib.Path("/tmp")
        _remove_left(parent)
        unlocked = pathlib.Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=parent))  # mode 0700
        try:
            self._lock = _locked(unlocked / _LOCK)
            # Before the lock is taken, the name has a dot, because others remove an unlocked folder with this name as
            # a leftover
            self.path = unlocked.rename(parent / unlocked.name.removeprefix("."))
        except BaseException:
            shutil.rmtree(unlocked, ignore_errors=True)
            raise
        _own.add(self.path)

    def close(self) -> None:
        """Removes the folder, or marks it as kept."""
        if self.is_kept:
            (self.path / _KEPT).touch()
        else:
            shutil.rmtree(self.path, ignore_errors=True)
        _own.discard(self.path)
        os.close(self._lock)


def _locked(path: pathlib.Path) -> int:
    """Returns the descriptor of a new lock file, which this process has locked."""
    lock = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.write(lock, _MARK) < len(_MARK):
            raise OSError(errno.ENOSPC, f"{path} has no room")
    except BaseException:
        os.close(lock)
        raise
    return lock


def remove_own() -> None:
    """Removes all folders of this process, which is about to end."""
    for path in _own:
        shutil.rmtree(path, ignore_errors=True)


def _remove_left(parent: pathlib.Path) -> None:
    """Removes the folders that no process has locked. The system releases a lock when its process ends."""
    ours = list(filter(_is_ours, parent.glob(f"{PREFIX}*")))
    kept = sorted((path for path in ours if (path / _KEPT).exists()), key=_made, reverse=True)[:MAX_KEPT]
    for path in set(ours) - set(kept):
        with contextlib.suppress(OSError):  # locked, or another process removes it
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _is_ours(path: pathlib.Path) -> bool:
    """Returns whether a process of this user made the folder as a `PrivateFolder`."""
    try:
        is_own = not path.is_symlink() and path.stat().st_uid == os.getuid()
        return is_own and (path / _LOCK).is_file() and (path / _LOCK).read_bytes() == _MARK
    except OSError:
        return False


def _made(path: pathlib.Path) -> float:
    """Returns the time at which a folder was marked as kept; 0 if another process removes it meanwhile."""
    try:
        return (path / _KEPT).stat().st_mtime
    except OSError:
        return 0.0
