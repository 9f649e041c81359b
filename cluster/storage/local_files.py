"""Durable files in a folder, for a `Storage` that is a folder and no object store.

A file appears under its name complete and on disk, or not at all, even if the process or the machine dies. Unfinished
files are in `PARTIAL_FOLDER`, which no listing of the storage shows, under names that no two writers share.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator

PARTIAL_FOLDER = ".partial"
"""Folder of unfinished files, directly below the storage's root."""
STALE_PARTIAL_S = 86_400.0
"""Age in seconds after which an unfinished file counts as left behind; writing one takes seconds."""
_PARTIAL_NAME = re.compile("[0-9a-f]{32}")
_NO_LINKS = (errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)
"""Errors by which a file system says that it has no hard links."""


def write(root: str, path: str, content: bytes) -> None:
    """Creates or replaces the file `path`; readers see the old content or the new one."""
    make_folder(os.path.dirname(path))
    with _partial(root, content) as partial:
        os.replace(partial, path)
    sync_folder(os.path.dirname(path))


def create_exclusively(root: str, path: str, content: bytes) -> None:
    """Creates the file `path`. Raises `FileExistsError` if it exists; of several writers exactly one succeeds."""
    make_folder(os.path.dirname(path))
    with _partial(root, content) as partial:
        try:
            os.link(partial, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # Still exclusive, but a crash may leave the file torn
            with open(path, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
    sync_folder(os.path.dirname(path))


class DurableFile(io.BufferedWriter):
    """A new file that is written piece by piece, and is on disk when `close` returns. Raises `FileExistsError` if there
    is one.
    """

    def __init__(self, path: str) -> None:
        make_folder(os.path.dirname(path))
        super().__init__(io.FileIO(path, "x"))
        self._folder = os.path.dirname(path)

    def close(self) -> None:
        if not self.closed:
            try:
                self.flush()
                os.fsync(self.fileno())
                sync_folder(self._folder)
            finally:
                super().close()


def sizes(folder: str) -> dict[str, int]:
    """Returns the size in bytes of each entry by name; 0 for folders. Leaves out entries that disappear meanwhile."""
    found = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    found[entry.name] = 0 if entry.is_dir() else entry.stat().st_size
    except FileNotFoundError:
        return {}
    return found


def remove(path: str) -> None:
    """Removes a file, or a folder with its contents; several callers may do so at once."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError:
        if not os.path.isdir(path):
            raise
        _remove_folder(path)


def _remove_folder(path: str) -> None:
    """Removes a folder and ignores entries that disappear meanwhile. Raises the first other failure after removing all
    it can.
    """
    failures: list[BaseException] = []

    def note(_: object, __: str, failure: tuple[type[BaseException], BaseException, object]) -> None:
        if not isinstance(failure[1], FileNotFoundError):
            failures.append(failure[1])

    shutil.rmtree(path, onerror=note)
    if failures:
        raise failures[0]


def remove_stale_partials(root: str) -> None:
    """Removes unfinished files whose writers are gone."""
    folder = os.path.join(root, PARTIAL_FOLDER)
    for name in filter(_PARTIAL_NAME.fullmatch, sizes(folder)):
        path = os.path.join(folder, name)
        with contextlib.suppress(FileNotFoundError):
            if time.time() - os.stat(path).st_mtime > STALE_PARTIAL_S:
                os.unlink(path)


@contextlib.contextmanager
def _partial(root: str, content: bytes) -> Iterator[str]:
    """Yields the path of a new file that holds `content` on disk, and removes the file afterwards."""
    folder = os.path.join(root, PARTIAL_FOLDER)
    make_folder(folder)
    path = os.path.join(folder, secrets.token_hex(16))
    try:
        with open(path, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield path
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


def make_folder(path: str) -> None:
    """Makes a folder and its parents durably, accessible to this user only."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    make_folder(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
        sync_folder(parent)


def sync_folder(path: str) -> None:
    """Waits until the names in a folder are on disk, if the file system supports it."""
    with contextlib.suppress(OSError):
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
