"""Bounds a folder of the cache: the files in it that were used longest ago leave first.

The last use of a file is its modification time. The prefix store and the packed weights call it.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import time

from manta.workers.cache_folder import PARTIAL

STALE_S = 600.0
"""Age in seconds of the last write to an unfinished file from which on it counts as left behind."""
_PAGE = 4096
_PARTIAL_NAME = re.compile(re.escape(PARTIAL) + "[0-9a-f]{32}")


def remove_oldest(
    folder: pathlib.Path,
    names: re.Pattern[str],
    max_bytes: int,
    max_files: int | None = None,
    keep_s: float = float("inf"),
) -> None:
    """Removes files with these names: those that were not used for `keep_s` seconds, then those that were used longest
    ago, until at most `max_bytes` and `max_files` are left. Removes unfinished files that were left behind, too.

    Raises `OSError` if the folder cannot be read.
    """
    now, found = time.time(), []
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                age = now - status.st_mtime
                if _PARTIAL_NAME.fullmatch(entry.name) and age > STALE_S:
                    remove(entry.path)
                elif names.fullmatch(entry.name):
                    found.append((age, in_pages(status.st_size), entry.path))
    found.sort()
    total = 0
    for number, (age, size, path) in enumerate(found):
        total += size
        is_beyond = total > max_bytes or (max_files is not None and number >= max_files)
        if age > keep_s or is_beyond:
            remove(path)


def in_pages(num_bytes: int) -> int:
    """Returns the bytes that a file takes, in whole pages."""
    return -(-num_bytes // _PAGE) * _PAGE


def remove(path: str | pathlib.Path) -> None:
    """Removes a file, which somebody else may have removed."""
    with contextlib.suppress(OSError):
        os.unlink(path)
