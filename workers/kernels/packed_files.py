"""Packed weights in files, so that an engine that starts maps what an earlier one has packed.

A file has the bytes of the memory that engines share (`shared_weights.py`), the checksum of each of its huge pages, and
a mark. Its name is a digest of all that its bytes depend on: the checkpoint's values, what is made of them, the kernels
and the code that packs. So what would be stale has another name. All checksums are compared before a file is used,
which takes as long as reading the weights once, as each decode step does.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import pathlib
import re
import shutil
import struct
from collections.abc import Callable
from importlib import metadata
from typing import NamedTuple, Protocol

import torch

from manta import DISTRIBUTION
from manta.structured.visible_logs import logger_of
from manta.workers.cache_folder import UntrustedCache, cache_entry, new_private, open_private
from manta.workers.kept_files import in_pages, remove, remove_oldest

logger = logger_of(__name__)

HUGE_PAGE = 2 << 20
SHARES, FILLS, READS_A_DISK = range(3)
"""What `manta_map_weights` maps a part of a file for."""
_WORKERS = pathlib.Path(__file__).parents[1]
_MARK = struct.Struct("<16sQ32s")
"""The end of a file: what it is, the bytes of its weights, and a digest of these two, its name and its checksums."""
_MAGIC = b"manta packed 1\n\n"
_CHECKSUM_BYTES = 8
_NAME = re.compile("[0-9a-f]{32}")
_PIECE = 16 << 20
"""Bytes that are written between two looks whether the process ends."""


def _code() -> str:
    """Returns a digest of the code that packs, in whichever version it is."""
    digest = hashlib.blake2b(torch.__version__.encode(), digest_size=16)
    with contextlib.suppress(metadata.PackageNotFoundError):  # a checkout that was never installed
        digest.update(metadata.version(DISTRIBUTION).encode())
    for path in sorted(_WORKERS.rglob("*.py")):
        digest.update(path.relative_to(_WORKERS).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


_CODE = _code()
"""The code as this process has imported it, which takes 10 ms. Later the files may be those of another version."""


class Values(Protocol):
    """The values of a checkpoint, as `CheckpointValues` knows them."""

    def known(self) -> str | None:
        """Returns their digest if no file has to be read for it."""
        ...

    def digest(self) -> str:
        """Returns their digest. Raises if they have changed since they were loaded."""
        ...

    def have_changed(self) -> bool:
        """Returns whether the files have changed since this object was made."""
        ...


class MappedFile(NamedTuple):
    """The weights of a file in memory. The caller unmaps them (`manta_unmap_weights`)."""

    address: int
    num_bytes: int
    """Bytes of the weights; a multiple of `HUGE_PAGE`."""


class PackedFiles:
    """The packed weights of one model in files. `form` says what is made of the `values`: dtype, rounding, the rank's
    share. The files of all models together have at most `max_bytes`, beyond which those leave that were used longest
    ago. An engine that has mapped one keeps what it has.
    """

    def __init__(self, values: Values, form: str, max_bytes: int) -> None:
        self._values = values
        self._form = form
        self._max_bytes = max_bytes

    def find(self, library: ctypes.CDLL) -> MappedFile | None:
        """Maps the file. None if there is none, if another user could have written it, or if it is not what was
        written, so that it is removed.
        """
        try:
            digest = self._values.known()
            if digest is None:
                return None
            path = self._path(library, digest)
            with open_private(path) as file:
                mapped = _map(library, file.fileno(), path)
        except (OSError, UntrustedCache):
            return None
        if mapped is None:
            logger.warning("%s is damaged and is removed", path)
            remove(path)
        elif self._values.have_changed():
            library.manta_unmap_weights(*mapped)
            return None
        else:
            _note_use(path)
        return mapped

    def keep(self, library: ctypes.CDLL, mapped: MappedFile, is_over: Callable[[], bool]) -> None:
        """Writes packed weights to a file, unless it is there or has no room. Reads the checkpoint's files if their
        digest is not known. Stops when `is_over` returns True.

        Raises `OSError`, `UntrustedCache` and `CheckpointChanged` if they cannot be kept.
        """
        path = self._path(library, self._values.digest())
        num_pages = mapped.num_bytes // HUGE_PAGE
        size = in_pages(mapped.num_bytes + num_pages * _CHECKSUM_BYTES + _MARK.size)
        if _is_there(path):
            _note_use(path)
            return
        if size > self._max_bytes:
            return
        remove_oldest(path.parent, _NAME, self._max_bytes - size)
        if 2 * size > shutil.disk_usage(path.parent).free:
            logger.warning("packed weights of %d bytes are not kept: they would take half of what the disk has", size)
            return
        sums = _checksums(library, mapped)
        if sums is None:
            return
        memory = memoryview((ctypes.c_char * mapped.num_bytes).from_address(mapped.address)).cast("B")
        try:
            with new_private(path) as file:
                for start in range(0, mapped.num_bytes, _PIECE):
                    if is_over():
                        raise InterruptedError("the process ends")
                    file.write(memory[start : start + _PIECE])
                file.write(sums + _mark(path.name, mapped.num_bytes, sums))
        except InterruptedError:
            return
        logger.info("packed weights of %d bytes are kept in %s", mapped.num_bytes, path)

    def _path(self, library: ctypes.CDLL, digest: str) -> pathlib.Path:
        content = repr((digest, self._form, pathlib.Path(library._name).name, _CODE))
        return cache_entry("packed") / hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def _is_there(path: pathlib.Path) -> bool:
    try:
        with open_private(path):
            return True
    except OSError:  # there is none, or another user could have written it: it is replaced
        return False


def _map(library: ctypes.CDLL, file: int, path: pathlib.Path) -> MappedFile | None:
    """Maps an open file. None if it does not hold what was written under this name."""
    size = os.fstat(file).st_size
    mark = os.pread(file, _MARK.size, max(0, size - _MARK.size))
    if len(mark) < _MARK.size:
        return None
    _, num_bytes, _ = _MARK.unpack(mark)
    num_pages = num_bytes // HUGE_PAGE
    if num_bytes % HUGE_PAGE or size != num_bytes + num_pages * _CHECKSUM_BYTES + _MARK.size:
        return None
    sums = os.pread(file, num_pages * _CHECKSUM_BYTES, num_bytes)
    if mark != _mark(path.name, num_bytes, sums):
        return None
    address = library.manta_map_weights(file, 0, num_bytes, READS_A_DISK)
    if address is None:
        raise OSError(f"{num_bytes} bytes of {path} cannot be mapped")
    mapped = MappedFile(address, num_bytes)
    if _checksums(library, mapped) == sums:
        return mapped
    library.manta_unmap_weights(*mapped)
    return None


def _checksums(library: ctypes.CDLL, mapped: MappedFile) -> bytes | None:
    """Returns the checksums of mapped huge pages; None if one cannot be read."""
    sums = (ctypes.c_uint64 * (mapped.num_bytes // HUGE_PAGE))()
    return bytes(sums) if library.manta_checksum_weights(mapped.address, len(sums), sums) else None


def _mark(name: str, num_bytes: int, sums: bytes) -> bytes:
    digest = hashlib.blake2b(repr((_MAGIC, name, num_bytes)).encode() + sums, digest_size=32).digest()
    return _MARK.pack(_MAGIC, num_bytes, digest)


def _note_use(path: pathlib.Path) -> None:
    """Makes a file the one that was used last."""
    with contextlib.suppress(OSError):  # somebody removes it
        os.utime(path, follow_symlinks=False)
