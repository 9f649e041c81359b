"""The digest of a checkpoint's values: two checkpoints with the same digest compute the same.

A file is read once. Its digest is remembered in the cache under the file's device, inode, size and change time, which
nobody can set: whoever changes a file changes its digest, too. The prefix store and the packed weights ask for it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import os
import pathlib
import time
from typing import NamedTuple

from manta.structured import host
from manta.workers.cache_folder import cache_entry, one_at_a_time, read_private, write_private
from manta.workers.checkpoints.memory import weight_files

DIGEST_BYTES = 32
_CHUNK = 64 << 20
"""Bytes of a file that one thread reads. The digest of a file is that of the digests of its chunks."""
_PIECE = 1 << 20
SETTLED_S = 2.0
"""Age of a change in seconds from which on a digest is remembered. A second change within the same tick of the file
system's clock would leave the change time as it was.
"""
_LOCK = "reading.lock"
_MARK_BYTES = 8


class CheckpointChanged(RuntimeError):
    """A file was changed after it was first looked at, so nobody knows which values were loaded."""


class _Stamp(NamedTuple):
    device: int
    inode: int
    size: int
    changed_ns: int


class CheckpointValues:
    """The files of a checkpoint that decide what it computes, as they are now. Make it before the weights are loaded.

    Digests of files that have not changed for `settled_s` seconds are remembered. Raises `ModelError` if the weights
    are in no safetensors or GGUF files.
    """

    def __init__(self, folder: pathlib.Path, settled_s: float = SETTLED_S) -> None:
        self._settled_ns = time.time_ns() - int(settled_s * 1e9)
        self._paths = [*weight_files(folder), folder / "config.json"]
        self._stamps = [_stamp(path) for path in self._paths]

    def digest(self) -> str:
        """Returns the digest as hexadecimal digits. Reads the files that were never read before.

        Raises `CheckpointChanged` if a file has changed since this object was made, so that it is certain that the
        loaded values have this digest. Raises `OSError` and `UntrustedCache` if there is no cache.
        """
        folder = cache_entry("digests")
        with one_at_a_time(folder / _LOCK):  # the ranks of a machine ask at once
            digests = [self._found(folder, *each) for each in zip(self._paths, self._stamps, strict=True)]
        if self.have_changed():
            raise CheckpointChanged(f"a file of {self._paths[0].parent} has changed while it was loaded")
        return _joined(digests)

    def known(self) -> str | None:
        """Returns the digest if it is known without reading the files, which may have changed since this object was
        made. Raises `OSError` and `UntrustedCache` if there is no cache.
        """
        folder = cache_entry("digests")
        digests = [_remembered(_entry(folder, stamp)) for stamp in self._stamps]
        known = [digest for digest in digests if digest is not None]
        return _joined(known) if len(known) == len(digests) else None

    def have_changed(self) -> bool:
        """Returns whether a file has changed since this object was made."""
        return [_stamp(path) for path in self._paths] != self._stamps

    def _found(self, folder: pathlib.Path, path: pathlib.Path, stamp: _Stamp) -> bytes:
        """Returns the digest of a file from the cache, else from the file."""
        entry = _entry(folder, stamp)
        remembered = _remembered(entry)
        if remembered is not None:
            return remembered
        digest = _read(path, stamp.size)
        if stamp.changed_ns < self._settled_ns and _stamp(path) == stamp:
            with contextlib.suppress(OSError):  # it is read again
                write_private(entry, _with_mark(digest))
        return digest


def _joined(digests: list[bytes]) -> str:
    return hashlib.blake2b(b"".join(digests), digest_size=DIGEST_BYTES).hexdigest()


def _entry(folder: pathlib.Path, stamp: _Stamp) -> pathlib.Path:
    """Returns the path in the cache of the digest of a file."""
    return folder / hashlib.blake2b(repr(tuple(stamp)).encode(), digest_size=DIGEST_BYTES).hexdigest()


def _remembered(entry: pathlib.Path) -> bytes | None:
    """Returns a digest from the cache; None if it has none, or a torn one."""
    found = read_private(entry)
    if found is None or found[0] != _with_mark(bytes(found[0][:DIGEST_BYTES])):
        return None
    return bytes(found[0][:DIGEST_BYTES])


def _stamp(path: pathlib.Path) -> _Stamp:
    status = path.stat()
    return _Stamp(status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns)


def _with_mark(digest: bytes) -> bytes:
    """Returns a digest with a checksum of its own, because a torn entry must not count."""
    return digest + hashlib.blake2b(digest, digest_size=_MARK_BYTES).digest()


def _read(path: pathlib.Path, size: int) -> bytes:
    """Reads a file with all cores."""
    with path.open("rb") as file, concurrent.futures.ThreadPoolExecutor(host.num_cores()) as threads:
        chunks = threads.map(lambda start: _read_chunk(file.fileno(), start), range(0, size, _CHUNK))
        return hashlib.blake2b(b"".join(chunks), digest_size=DIGEST_BYTES).digest()


def _read_chunk(file: int, start: int) -> bytes:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for position in range(start, start + _CHUNK, _PIECE):
        digest.update(os.pread(file, _PIECE, position))
    return digest.digest()
