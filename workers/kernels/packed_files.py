"""Packed weights in files, so that an engine that starts maps what an earlier one has packed.

A file has the bytes of the memory that engines share (`shared_weights.py`), the checksum of each of its huge pages,
which of these pages have experts alone, and a mark. Its name is a digest of all that its bytes depend on: the
checkpoint's values, what is made of them, the kernels and the code that packs. So what would be stale has another name.

Before a file is used, its checksums are compared, for which the weights are read once. Those of experts are not: a step
reads only the experts that it chooses, so that a start need not read all of them. They are compared when they are
copied (`MappedFile.is_intact`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import mmap
import os
import pathlib
import re
import shutil
import struct
from collections.abc import Callable, Iterator
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
"""The end of a file: what it is, the bytes of its weights, and a digest of these two, its name and its table."""
_MAGIC = b"manta packed 2\n\n"
_CHECKSUM_BYTES = 8
_NAME = re.compile("[0-9a-f]{32}")
_LOWEST_BIT = bytes(number & 1 for number in range(256))
"""The only bit that mincore(2) defines of the byte of a page."""
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
"""The code as this process has imported it, which takes some 10 ms. Later the files may be those of another version."""


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


class PackedMemory(NamedTuple):
    """Packed weights in memory. The caller unmaps them (`manta_unmap_weights`)."""

    address: int
    num_bytes: int
    """Bytes of the weights; a multiple of `HUGE_PAGE`."""
    expert_pages: bytes
    """A byte for each huge page: 1 if it has nothing but experts, else 0."""


class MappedFile(NamedTuple):
    """The weights of a file in memory, whose experts have not been read."""

    memory: PackedMemory
    sums: bytes
    """The checksums of all huge pages when they were written."""
    path: pathlib.Path

    def num_resident(self) -> int:
        """Returns how many bytes of pages of experts the system has in memory, because somebody has read them."""
        return sum(_resident(self.memory.address + at, size) for at, size in _runs(self.memory.expert_pages, 1))

    def is_intact(self, library: ctypes.CDLL, copy: int) -> bool:
        """Returns whether a copy at an address has the experts that were written. Removes the file if not. Each call of
        the kernels has one page, for which they need no other threads: a step may be running.
        """
        pages = [at + page for at, size in _runs(self.memory.expert_pages, 1) for page in range(0, size, HUGE_PAGE)]
        if all(_has_checksum(library, copy, self.sums, page) for page in pages):
            return True
        logger.error(
            "%s is damaged and is removed; answers since the start may be wrong: restart the engine", self.path
        )
        remove(self.path)
        return False


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
            unmap(library, mapped.memory)
            return None
        else:
            _note_use(path)
        return mapped

    def keep(self, library: ctypes.CDLL, packed: PackedMemory, is_over: Callable[[], bool]) -> None:
        """Writes packed weights to a file, unless it is there or has no room. Reads the checkpoint's files if their
        digest is not known. Stops when `is_over` returns True.

        Raises `OSError`, `UntrustedCache` and `CheckpointChanged` if they cannot be kept.
        """
        path = self._path(library, self._values.digest())
        size = in_pages(_size_of(packed.num_bytes))
        if _is_there(path):
            _note_use(path)
            return
        if size > self._max_bytes:
            return
        remove_oldest(path.parent, _NAME, self._max_bytes - size)
        if 2 * size > shutil.disk_usage(path.parent).free:
            logger.warning("packed weights of %d bytes are not kept: they would take half of what the disk has", size)
            return
        sums = _checksums(library, packed.address, packed.num_bytes)
        if sums is None:
            return
        memory = memoryview((ctypes.c_char * packed.num_bytes).from_address(packed.address)).cast("B")
        try:
            with new_private(path) as file:
                for start in range(0, packed.num_bytes, _PIECE):
                    if is_over():
                        raise InterruptedError("the process ends")
                    file.write(memory[start : start + _PIECE])
                table = sums + packed.expert_pages
                file.write(table + _mark(path.name, packed.num_bytes, table))
                file.flush()
                os.fsync(file.fileno())  # experts are not compared at a start, and a crash must not leave them torn
        except InterruptedError:
            return
        logger.info("packed weights of %d bytes are kept in %s", packed.num_bytes, path)

    def _path(self, library: ctypes.CDLL, digest: str) -> pathlib.Path:
        content = repr((digest, self._form, pathlib.Path(library._name).name, _CODE))
        return cache_entry("packed") / hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def _is_there(path: pathlib.Path) -> bool:
    try:
        with open_private(path):
            return True
    except OSError:  # there is none, or another user could have written it: it is replaced
        return False


def unmap(library: ctypes.CDLL, memory: PackedMemory) -> None:
    library.manta_unmap_weights(memory.address, memory.num_bytes)


def _size_of(num_bytes: int) -> int:
    """Returns the bytes of the file of so many bytes of weights."""
    return num_bytes + num_bytes // HUGE_PAGE * (_CHECKSUM_BYTES + 1) + _MARK.size


def _map(library: ctypes.CDLL, file: int, path: pathlib.Path) -> MappedFile | None:
    """Maps an open file. None if it does not hold what was written under this name, as far as it is read."""
    size = os.fstat(file).st_size
    mark = os.pread(file, _MARK.size, max(0, size - _MARK.size))
    if len(mark) < _MARK.size:
        return None
    _, num_bytes, _ = _MARK.unpack(mark)
    num_pages = num_bytes // HUGE_PAGE
    if num_bytes % HUGE_PAGE or size != _size_of(num_bytes):
        return None
    table = os.pread(file, size - _MARK.size - num_bytes, num_bytes)
    if mark != _mark(path.name, num_bytes, table):
        return None
    address = library.manta_map_weights(file, 0, num_bytes, READS_A_DISK)
    if address is None:
        raise OSError(f"{num_bytes} bytes of {path} cannot be mapped")
    sums, expert_pages = table[:-num_pages], table[-num_pages:]
    memory = PackedMemory(address, num_bytes, expert_pages)
    if _compare(library, address, sums, expert_pages, 0):
        _read_in_huge_pages(memory)
        return MappedFile(memory, sums, path)
    unmap(library, memory)
    return None


def _runs(pages: bytes, kind: int) -> Iterator[tuple[int, int]]:
    """Yields the start and the size in bytes of each run of pages that are of a kind."""
    number = 0
    for found, run in itertools.groupby(pages):
        count = len(list(run))
        if found == kind:
            yield number * HUGE_PAGE, count * HUGE_PAGE
        number += count


def _compare(library: ctypes.CDLL, address: int, sums: bytes, pages: bytes, kind: int) -> bool:
    """Returns whether the pages of a kind, of memory at an address, have their checksums."""
    for at, size in _runs(pages, kind):
        first = at // HUGE_PAGE * _CHECKSUM_BYTES
        expected = sums[first : first + size // HUGE_PAGE * _CHECKSUM_BYTES]
        if _checksums(library, address + at, size) != expected:
            return False
    return True


def _has_checksum(library: ctypes.CDLL, address: int, sums: bytes, page: int) -> bool:
    """Returns whether the huge page that begins `page` bytes after an address has its checksum."""
    first = page // HUGE_PAGE * _CHECKSUM_BYTES
    return _checksums(library, address + page, HUGE_PAGE) == sums[first : first + _CHECKSUM_BYTES]


def _checksums(library: ctypes.CDLL, address: int, num_bytes: int) -> bytes | None:
    """Returns the checksums of mapped huge pages; None if one cannot be read."""
    sums = (ctypes.c_uint64 * (num_bytes // HUGE_PAGE))()
    return bytes(sums) if library.manta_checksum_weights(address, len(sums), sums) else None


def _read_in_huge_pages(memory: PackedMemory) -> None:
    """Has the system read one huge page of experts at a time, the one in which something is read. It would read more
    around it, or single small pages. Where files can have huge pages, it then keeps it as one.
    """
    for at, size in _runs(memory.expert_pages, 1):
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_RANDOM):  # refused advice costs only time
            _system().madvise(ctypes.c_void_p(memory.address + at), ctypes.c_size_t(size), advice)


@functools.cache
def _system() -> ctypes.CDLL:
    """Returns the C library of this process."""
    return ctypes.CDLL(None)


def _resident(address: int, num_bytes: int) -> int:
    """Returns the bytes of mapped pages that the system has in memory (mincore(2))."""
    pages = (ctypes.c_uint8 * (num_bytes // mmap.PAGESIZE))()
    if _system().mincore(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), pages) != 0:
        return 0
    return bytes(pages).translate(_LOWEST_BIT).count(1) * mmap.PAGESIZE


def _mark(name: str, num_bytes: int, table: bytes) -> bytes:
    digest = hashlib.blake2b(repr((_MAGIC, name, num_bytes)).encode() + table, digest_size=32).digest()
    return _MARK.pack(_MAGIC, num_bytes, digest)


def _note_use(path: pathlib.Path) -> None:
    """Makes a file the one that was used last."""
    with contextlib.suppress(OSError):  # somebody removes it
        os.utime(path, follow_symlinks=False)
