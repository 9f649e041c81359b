"""A small file system for tests of a full disk."""

from __future__ import annotations

import contextlib
import errno
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def small_disk(num_bytes: int) -> Iterator[tuple[pathlib.Path, bool]]:
    """Yields a folder, and whether it is a file system of so many bytes, which not everybody may mount."""
    with tempfile.TemporaryDirectory() as folder:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", folder]
        is_small = shutil.which("mount") is not None and subprocess.run(mount, capture_output=True).returncode == 0
        try:
            yield pathlib.Path(folder), is_small
        finally:
            if is_small:
                subprocess.run(["umount", folder], check=True)


def fill(folder: pathlib.Path) -> pathlib.Path:
    """Writes a file that takes all the room that is left on a disk. Returns its path."""
    path = folder / "filling"
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(2**16))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    return path
