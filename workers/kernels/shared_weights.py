"""Packed weights that the processes of a machine hold once: who packs them first lends them to all that come after.

They lie in memory of Linux's that is a file without a name (memfd_create(2)). Others find it among the open files of
this user's processes (/proc/PID/fd) by what is in it. When the last process that holds it has ended, however it ended,
the system frees it. Once the weights are whole it is sealed: then nobody can write to it, and nobody reads it before.

`workers/platforms/cpu.py` opens it while weights are read. Where there is no such memory, or no C++ compiler, each
process has a copy of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import time
import weakref
from collections.abc import Callable, Iterator
from ctypes import c_int, c_int64, c_void_p

import torch

from manta.structured.visible_logs import logger_of
from manta.workers.cache_folder import UntrustedCache, cache_entry
from manta.workers.kernels import build

logger = logger_of(__name__)

PREFIX = "manta-weights-"
HUGE_PAGE = 2 << 20
"""The file has a multiple of it: all of it lies in huge pages, and weights share those in which they begin and end."""
_PAGE = 4096
_CACHE_LINE = 64
"""A weight begins so much after a page does. Where both begin at once, a decode step of 64 rows takes 4% longer in AMX,
and one of 32 rows 2%: measured, not explained. What malloc gives to a process begins there too.
"""
PATIENCE_S = 120.0
"""Longest wait for another process that packs the same weights. After it, a process packs a copy of its own."""
_SEALS = 0x0001 | 0x0002 | 0x0004 | 0x0008
"""F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_WRITE: names that Python has on Linux alone."""
_LOCKS = "weights.lock"
_WAIT_SLICE_S = 0.02


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = build.load_library()
    if library is not None:
        library.manta_map_weights.argtypes = [c_int, c_int64, c_int64, c_int]
        library.manta_map_weights.restype = c_void_p
        library.manta_unmap_weights.argtypes = [c_void_p, c_int64]
        library.manta_unmap_weights.restype = None
    return library


class SharedWeights:
    """Tensors in one file, which are asked for in the same order by whoever fills it and by all others. The file is
    open as long as one of them lives: so others find it.
    """

    def __init__(self, library: ctypes.CDLL, file: int, is_whole: bool) -> None:
        self._library = library
        self._file = file
        weakref.finalize(self, os.close, file).atexit = False
        self.is_whole = is_whole
        self._end = 0

    def place(self, size: int, dtype: torch.dtype, fill: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """The next tensor, [size], which nobody may write to. If it is not there yet, `fill` is given it first."""
        start, num_bytes = self._end + _CACHE_LINE, size * dtype.itemsize
        self._end = _up_to(start + num_bytes, _PAGE)
        if not self.is_whole:
            os.truncate(self._file, _up_to(self._end, HUGE_PAGE))
            fill(self._map(start, num_bytes, writes=True).view(dtype))
        return self._map(start, num_bytes, writes=False).view(dtype)

    def _map(self, start: int, num_bytes: int, writes: bool) -> torch.Tensor:
        address = self._library.manta_map_weights(self._file, start, num_bytes, writes)
        if address is None:
            raise MemoryError(f"{num_bytes} bytes of shared weights cannot be mapped")
        memory = (ctypes.c_char * num_bytes).from_address(address)
        # This keeps the file open, too. At the end of the process threads may still read what is mapped
        weakref.finalize(memory, self._unmap, address, num_bytes).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _unmap(self, address: int, num_bytes: int) -> None:
        self._library.manta_unmap_weights(address, num_bytes)

    def finish(self) -> None:
        """All have been asked for: the file may be lent from now on."""
        size = os.fstat(self._file).st_size
        if _up_to(self._end, HUGE_PAGE) != size:
            raise RuntimeError(f"shared weights have {size} bytes, and {self._end} were asked for")
        if not self.is_whole:
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)
            self.is_whole = True


def _up_to(size: int, unit: int) -> int:
    return -(-size // unit) * unit


@contextlib.contextmanager
def shared_weights(content: str) -> Iterator[SharedWeights | None]:
    """Gives the shared weights that `content` and the kernels name in full. They are those of a process that has them,
    else new ones that are lent after the end of the context. None if memory cannot be shared here.
    """
    library = _library()
    if library is None or not hasattr(os, "memfd_create"):
        yield None
        return
    name = _name(library, content)
    with _alone(name):
        file = _find(name)
        if file is not None:
            weights = SharedWeights(library, file, is_whole=True)
        elif _has_huge_pages():
            weights = SharedWeights(library, _make(name), is_whole=False)
        else:
            yield None
            return
        yield weights
        weights.finish()


def _make(name: str) -> int:
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


@functools.cache
def _has_huge_pages() -> bool:
    """Whether the system has some for files (Linux 6.1). With small pages a decode step of one row takes up to a third
    longer. So each process then has a copy of its own, which it can have on huge pages.
    """
    library = _library()
    assert library is not None
    try:
        SharedWeights(library, _make(f"{PREFIX}trial"), is_whole=False).place(HUGE_PAGE, torch.uint8, lambda _: None)
    except MemoryError:
        return False
    return True


def _name(library: ctypes.CDLL, content: str) -> str:
    return PREFIX + hashlib.blake2b(f"{library._name} {content}".encode(), digest_size=16).hexdigest()


def _find(name: str) -> int | None:
    """A file that is whole, of some process of this user; opened."""
    target = f"/memfd:{name} (deleted)"
    for path in _open_files():
        with contextlib.suppress(OSError):  # it has been closed
            if os.readlink(path) == target and (file := _open(path)) is not None:
                return file
    return None


def _open_files() -> Iterator[str]:
    """Yields the open files of all processes that this one may look into."""
    for process in filter(str.isdigit, os.listdir("/proc")):
        folder = f"/proc/{process}/fd"
        with contextlib.suppress(OSError):  # somebody else's, or it has ended
            yield from [f"{folder}/{file}" for file in os.listdir(folder)]


def _open(path: str) -> int | None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if os.fstat(file).st_uid == os.geteuid() and fcntl.fcntl(file, fcntl.F_GET_SEALS) == _SEALS:
        return file
    os.close(file)  # not whole, or made by a stranger
    return None


@contextlib.contextmanager
def _alone(name: str) -> Iterator[None]:
    """One process at a time, so that two that start together do not both pack. The system gives up the lock of a
    process that ends. Without a place for the lock, or with a holder who takes too long, each goes on by itself.
    """
    file = None
    try:
        with contextlib.suppress(OSError, UntrustedCache):
            file = os.open(cache_entry("kernels") / _LOCKS, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            _lock(file, _byte(name))
        yield
    finally:
        if file is not None:
            os.close(file)


def _byte(name: str) -> int:
    """Returns the byte of a name's lock in the file of locks, which need not be that long."""
    return int(name[-15:], 16)


def _lock(file: int, byte: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            return
        except BlockingIOError:
            time.sleep(_WAIT_SLICE_S)
    logger.warning("another process has packed the same weights for %.0f s; a copy is made", PATIENCE_S)
