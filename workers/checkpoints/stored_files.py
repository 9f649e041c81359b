"""Opens every file of a checkpoint, whose author is not trusted.

A file must lie in the checkpoint's folder, be a regular file and not exceed a size. JSON must be an object without
repeated keys. Every other module of `workers/checkpoints/` and `cluster/text/` opens files through this one, so
`manta check` and `manta serve` refuse the same files with the same words. Imports no framework.
"""

from __future__ import annotations

import errno
import json
import os
import pathlib
import stat
from typing import Any, BinaryIO

from manta.workers.models.model_config import ModelError

MOST_JSON_BYTES = 16 * 2**20
"""Largest JSON file of a configuration. Published ones have up to 2 MiB, and parsing takes up to 30 times as much."""
MOST_INDEX_BYTES = 64 * 2**20
"""Largest index of weight files. That of DeepSeek-V3, with 90,000 tensors, has 9 MiB."""
MOST_TOKENIZER_BYTES = 128 * 2**20
"""Largest `tokenizer.json`. That of Gemma 3, with 262,000 tokens, has 33 MiB."""
MOST_TEMPLATE_BYTES = 2**20
"""Largest chat template. Published ones have up to 30 KiB."""
COPY_AGAIN = "copy or download it again"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


class _KeyTwiceError(ValueError):
    """An object has a key twice, so two readers may take different values."""


def find_file(folder: pathlib.Path, name: str | pathlib.Path) -> pathlib.Path | None:
    """Returns the path of a file of a checkpoint; None if there is nothing of that name.

    `name` is relative to the folder. Links may lead to another file in the folder, or from a snapshot of the hub's
    cache to the blobs of the same model. Raises `ModelError` if the path leads elsewhere or to no regular file.
    """
    path = folder / name
    try:
        if not os.path.lexists(path):
            return None
        real = pathlib.Path(os.path.realpath(path, strict=True))
        mode = real.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        raise ModelError(f"{_shown(path)} cannot be opened: {_reason(error)}; {COPY_AGAIN}") from error
    if not any(real.is_relative_to(root) for root in _roots(folder)):
        raise ModelError(
            f"{_shown(path)} leads out of the model's folder, to {_shown(real)}, and only files in the "
            "folder are read; copy the file into the folder"
        )
    if not stat.S_ISREG(mode):
        raise ModelError(f"{_shown(path)} is {_kind(mode)} and no file; {COPY_AGAIN}")
    return path


def open_file(folder: pathlib.Path, name: str | pathlib.Path) -> BinaryIO:
    """Opens a file of a checkpoint for reading. Raises `ModelError` if it is missing, and as `find_file` does."""
    path = find_file(folder, name)
    if path is None:
        raise ModelError(f"{_shown(folder / name)} is missing; {COPY_AGAIN}")
    try:
        # Without blocking, because somebody may have put a pipe in the file's place.
        opened = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")
    except OSError as error:
        raise ModelError(f"{_shown(path)} cannot be opened: {_reason(error)}; {COPY_AGAIN}") from error
    if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
        opened.close()
        raise ModelError(f"{_shown(path)} is no file; {COPY_AGAIN}")
    return opened


def read_text(folder: pathlib.Path, name: str, most_bytes: int) -> str:
    """Returns the text of a file. Raises `ModelError` if it has more than `most_bytes` or is not UTF-8, and as
    `open_file` does.
    """
    path = folder / name
    with open_file(folder, name) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        size = path.stat().st_size
        raise ModelError(f"{_shown(path)} has {size} bytes and the limit is {most_bytes}; {COPY_AGAIN}")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{_shown(path)} is not UTF-8 at byte {error.start}; {COPY_AGAIN}") from error


def read_json(folder: pathlib.Path, name: str, most_bytes: int = MOST_JSON_BYTES) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises `ModelError` if it holds anything else, and as `read_text` does."""
    text, path = read_text(folder, name, most_bytes), folder / name
    try:
        return parse_object(text)
    except ValueError as error:
        if text.startswith(_LFS_POINTER.decode()):
            raise ModelError(lfs_remedy(path)) from error
        raise ModelError(f"{_shown(path)} {error}; {COPY_AGAIN}") from error


def parse_object(text: str) -> dict[str, Any]:
    """Returns a JSON object. Raises `ValueError`, whose message goes on after the file's name."""
    try:
        loaded = json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    except _KeyTwiceError:
        raise
    except ValueError as error:  # also a number of thousands of digits
        raise ValueError(f"is not valid JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"must hold a JSON object, not a {type(loaded).__name__}")
    return loaded


def lfs_pointer(folder: pathlib.Path, name: str) -> str | None:
    """Returns the remedy if a file is only a Git LFS pointer, else None."""
    with open_file(folder, name) as file:
        if file.read(len(_LFS_POINTER)) != _LFS_POINTER:
            return None
    return lfs_remedy(folder / name)


def lfs_remedy(path: pathlib.Path) -> str:
    return f"{path} is a Git LFS pointer and not the file itself; run 'git lfs pull' in {path.parent}"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _KeyTwiceError(f"has the key {_shown(name)!r} twice in one object")
            seen.add(name)
    return found


def _roots(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the folders in which the files of a checkpoint may lie."""
    own = pathlib.Path(os.path.realpath(folder))
    return [own, own.parent.parent / "blobs"] if own.parent.name == "snapshots" else [own]


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOENT:
        return "it is a link to a file that does not exist"
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def _shown(name: str | pathlib.Path) -> str:
    """Returns a name in characters that every terminal and encoding can show, cut at 300."""
    return str(name)[:300].encode("utf-8", "backslashreplace").decode()
