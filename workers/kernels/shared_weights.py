"""Packed weights that the processes of a machine hold once: who packs them first lends them to all that come after.

They lie in memory of Linux's that is a file without a name (memfd_create(2)). Others find it among the open files of
this user's processes (/proc/PID/fd) by what is in it. When the last process that holds it has ended, however it ended,
the system frees it. Once the weights are whole it is sealed: then nobody can write to it, and nobody reads it before.

`workers/platforms/cpu.py` opens it while weights are read. Where there is no such memory, or no C++ compiler, each
process has a copy of its own.

If packed weights are kept in files (`packed_files.py`), the first process of a model maps the file that an earlier one
has written, which takes a twentieth of the processor time. Files lie in small pages. So a thread of low priority then
copies what was mapped to memory that is shared, and puts that in its place. Where a file has experts, the thread waits
until steps have read half of them: until then only those that are chosen are read from the disk.

Adapters are shared in the same way (`share_tensors`), each in a file of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import itertools
import os
import resource
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from ctypes import c_int, c_int64, c_void_p

import torch

from manta.structured.visible_logs import logger_of
from manta.workers.cache_folder import UntrustedCache, cache_entry
from manta.workers.kernels import build, idle_work
from manta.workers.kernels.packed_files import FILLS, HUGE_PAGE, SHARES, MappedFile, PackedFiles, PackedMemory, unmap

logger = logger_of(__name__)

PREFIX = "manta-weights-"
_LAYOUT = 2
"""The version of what lies in shared weights beside the tensors. Weights of another version are not used."""
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
_COPIED = 16 << 20
"""Bytes that are copied between two looks whether the process ends."""
_WAIT_SLICE_S = 0.02
_LOOK_AGAIN_S = 30.0
"""Seconds between two looks how much of the experts steps have read."""
_MOST_OF_EXPERTS = 0.5
"""Share of the experts' bytes from which on all are copied to huge pages."""
_FACTS = struct.Struct("<QQ")
"""The end of shared weights: where their facts begin, and how many there are."""
_MOST_OPEN = 0.5
"""Share of the files that the process may open beyond which it shares no more tensors. Its connections need the rest.
"""


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = build.load_library()
    if library is not None:
        library.manta_map_weights.argtypes = [c_int, c_int64, c_int64, c_int]
        library.manta_map_weights.restype = c_void_p
        library.manta_unmap_weights.argtypes = [c_void_p, c_int64]
        library.manta_unmap_weights.restype = None
        library.manta_checksum_weights.argtypes = [c_void_p, c_int64, c_void_p]
        library.manta_replace_weights.argtypes = [c_void_p, c_void_p, c_int64]
    return library


class SharedWeights:
    """Tensors that are asked for in the same order by whoever fills them and by all others. Together they have a
    multiple of `HUGE_PAGE`: weights share the huge pages in which they begin and end.
    """

    def __init__(self, library: ctypes.CDLL, is_whole: bool) -> None:
        self._library = library
        self.is_whole = is_whole
        self._end = 0
        self.takes_memory = not is_whole
        """Whether this process adds to the memory that the machine's processes hold."""
        self._facts: list[int] = []
        self._known_facts: bytes | None = None
        self._expert_ranges: list[tuple[int, int]] = []
        """The start and the end in bytes of neighbouring tensors of experts."""

    def place(self, size: int, dtype: torch.dtype, fill: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """The next tensor, [size], which nobody may write to. If it is not there yet, `fill` is given it first."""
        start, num_bytes = self._end + _CACHE_LINE, size * dtype.itemsize
        self._end = _up_to(start + num_bytes, _PAGE)
        if not self.is_whole:
            fill(self._added(start, num_bytes).view(dtype))
        return self._view(start, num_bytes).view(dtype)

    def place_expert(self, size: int, dtype: torch.dtype, fill: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """Does what `place` does for a tensor that a step reads only if it chooses an expert."""
        start = self._end
        placed = self.place(size, dtype, fill)
        if self._expert_ranges and self._expert_ranges[-1][1] == start:
            start = self._expert_ranges.pop()[0]
        self._expert_ranges.append((start, self._end))
        return placed

    def fact(self, find: Callable[[], bool]) -> bool:
        """Returns what `find` does, which whoever fills the tensors calls and all others need not. So they read none of
        the checkpoint's values.
        """
        if self.is_whole:
            if self._known_facts is None:
                self._known_facts = self._read_facts()
            found = self._known_facts[len(self._facts)]
        else:
            found = find()
        self._facts.append(int(found))
        return bool(found)

    def _read_facts(self) -> bytes:
        start, count = _FACTS.unpack(bytes(self._view(self.num_bytes - _FACTS.size, _FACTS.size).tolist()))
        return bytes(self._view(start, count).tolist())

    @property
    def expert_pages(self) -> bytes:
        """A byte for each huge page: 1 if it has nothing but experts, else 0."""
        pages = bytearray(self.num_bytes // HUGE_PAGE)
        for start, end in self._expert_ranges:
            first, last = _up_to(start, HUGE_PAGE) // HUGE_PAGE, end // HUGE_PAGE
            pages[first:last] = b"\1" * max(0, last - first)
        return bytes(pages)

    def _added(self, start: int, num_bytes: int) -> torch.Tensor:
        """Returns bytes [num_bytes] behind all others, to be written to."""
        raise NotImplementedError

    def _view(self, start: int, num_bytes: int) -> torch.Tensor:
        """Returns bytes [num_bytes] to be read."""
        raise NotImplementedError

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors together."""
        raise NotImplementedError

    def finish(self) -> None:
        """All have been asked for."""
        facts = self._facts
        start = self._end + _CACHE_LINE

        def write(to: torch.Tensor) -> None:
            to[: len(facts)] = torch.tensor(facts, dtype=torch.uint8)

        self.place(len(facts) + _FACTS.size, torch.uint8, write)  # with room for what is written at the end of all
        if _up_to(self._end, HUGE_PAGE) != self.num_bytes:
            raise RuntimeError(f"shared weights have {self.num_bytes} bytes, and {self._end} were asked for")
        if not self.is_whole:
            end = self._added(self.num_bytes - _FACTS.size, _FACTS.size)
            end.copy_(torch.frombuffer(bytearray(_FACTS.pack(start, len(facts))), dtype=torch.uint8))


class LentWeights(SharedWeights):
    """Tensors in memory that is a file, all of it in huge pages. It is open as long as one of them lives: so others
    find it.
    """

    def __init__(self, library: ctypes.CDLL, file: int, is_whole: bool) -> None:
        super().__init__(library, is_whole)
        self._file = file
        weakref.finalize(self, os.close, file).atexit = False

    @property
    def num_bytes(self) -> int:
        return os.fstat(self._file).st_size

    def _added(self, start: int, num_bytes: int) -> torch.Tensor:
        os.truncate(self._file, _up_to(self._end, HUGE_PAGE))
        return self._map(start, num_bytes, FILLS)

    def _view(self, start: int, num_bytes: int) -> torch.Tensor:
        return self._map(start, num_bytes, SHARES)

    def view(self, num_bytes: int) -> torch.Tensor:
        """Returns the first bytes [num_bytes] of memory that is whole, to be read."""
        return self._view(0, num_bytes)

    def _map(self, start: int, num_bytes: int, use: int) -> torch.Tensor:
        memory = _mapped(self._library, self._file, start, num_bytes, use)
        # This keeps the file open, too. At the end of the process threads may still read what is mapped
        weakref.finalize(memory, self._unmap, ctypes.addressof(memory), num_bytes).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _unmap(self, address: int, num_bytes: int) -> None:
        self._library.manta_unmap_weights(address, num_bytes)

    def finish(self) -> None:
        """The file may be lent from now on."""
        super().finish()
        if not self.is_whole:
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)
            self.is_whole = True

    def keep_in(self, files: PackedFiles) -> None:
        """Has the finished weights written to a file. Nobody waits for it."""
        library, num_bytes, file = self._library, self.num_bytes, os.dup(self._file)
        expert_pages = self.expert_pages

        def keep(is_over: Callable[[], bool]) -> None:
            try:
                memory = _mapped(library, file, 0, num_bytes, SHARES)
                address = ctypes.addressof(memory)
                packed = PackedMemory(address, num_bytes, expert_pages)
                files.keep(library, packed, is_over)
                unmap(library, packed)
            finally:
                os.close(file)

        idle_work.begin(keep, "packed weights are not kept")


class KeptWeights(SharedWeights):
    """Tensors of a file on a disk, which is mapped as a whole as long as one of them lives."""

    def __init__(self, library: ctypes.CDLL, mapped: MappedFile) -> None:
        super().__init__(library, is_whole=True)
        self.takes_memory = True  # as far as it is read
        self._mapped = mapped
        self._memory = (ctypes.c_char * mapped.memory.num_bytes).from_address(mapped.memory.address)
        weakref.finalize(self._memory, unmap, library, mapped.memory).atexit = False

    @property
    def num_bytes(self) -> int:
        return self._mapped.memory.num_bytes

    def _view(self, start: int, num_bytes: int) -> torch.Tensor:
        if start + num_bytes > self.num_bytes:
            raise RuntimeError(f"kept weights have {self.num_bytes} bytes, and more were asked for")
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=num_bytes, offset=start)

    def move_to_huge_pages(self, name: str) -> None:
        """Has the weights put into memory that is lent under this name, once steps have read enough of their experts.
        Nobody waits for it.
        """
        library, mapped, memory = self._library, self._mapped, weakref.ref(self._memory)
        expert_bytes = sum(mapped.memory.expert_pages) * HUGE_PAGE

        def move(is_over: Callable[[], bool]) -> None:
            if memory() is None:
                return
            if mapped.num_resident() < _MOST_OF_EXPERTS * expert_bytes:
                idle_work.begin(move, failure, _LOOK_AGAIN_S)
                return
            with _alone(_digest(f"copy of {name}")):  # of several processes one copies, and the others map its copy
                held = memory()
                if held is None:
                    return
                file = _find(name)
                if file is None:
                    file = _copied(library, mapped, name, is_over)
                if file is not None and not _replaced(library, mapped, file):
                    os.close(file)
                    file = None
                if file is not None:
                    weakref.finalize(held, os.close, file).atexit = False

        failure = "kept weights stay in small pages"
        idle_work.begin(move, failure)


def _mapped(library: ctypes.CDLL, file: int, start: int, num_bytes: int, use: int) -> ctypes.Array[ctypes.c_char]:
    """Maps a part of a file. Raises `MemoryError` if the system refuses."""
    address = library.manta_map_weights(file, start, num_bytes, use)
    if address is None:
        raise MemoryError(f"{num_bytes} bytes of shared weights cannot be mapped")
    return (ctypes.c_char * num_bytes).from_address(address)


def _copied(library: ctypes.CDLL, mapped: MappedFile, name: str, is_over: Callable[[], bool]) -> int | None:
    """Returns new memory of this name with what is mapped, opened and sealed; None if the process ends meanwhile, or if
    experts are not what was written.
    """
    file, source = _make(name), mapped.memory
    try:
        os.truncate(file, source.num_bytes)
        memory = _mapped(library, file, 0, source.num_bytes, FILLS)
        address, is_intact = ctypes.addressof(memory), False
        try:
            for start in range(0, source.num_bytes, _COPIED):
                if is_over():
                    break
                ctypes.memmove(address + start, source.address + start, min(_COPIED, source.num_bytes - start))
            else:
                is_intact = mapped.is_intact(library, address)
        finally:
            library.manta_unmap_weights(address, source.num_bytes)
        if is_intact:
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
            return file
    except BaseException:
        os.close(file)
        raise
    os.close(file)
    return None


def _replaced(library: ctypes.CDLL, mapped: MappedFile, file: int) -> bool:
    """Puts the content of a file in the place of what is mapped, which is the same. Returns whether that succeeded."""
    source = mapped.memory
    address = library.manta_map_weights(file, 0, source.num_bytes, SHARES)
    if address is None:
        return False
    if library.manta_replace_weights(source.address, address, source.num_bytes):
        return True
    library.manta_unmap_weights(address, source.num_bytes)
    return False


def _up_to(size: int, unit: int) -> int:
    return -(-size // unit) * unit


@contextlib.contextmanager
def shared_weights(content: str, files: PackedFiles | None = None) -> Iterator[SharedWeights | None]:
    """Gives the shared weights that `content` and the kernels name in full. They are those of a process that has them,
    else those in `files`, else new ones that are lent after the end of the context, and then kept in `files`. None if
    memory cannot be shared here.
    """
    library = _library()
    if library is None or not hasattr(os, "memfd_create"):
        yield None
        return
    name = _name(library, content)
    with _alone(name):
        file = _find(name)
        if file is None and not _has_huge_pages():
            yield None
            return
        mapped = None if file is not None or files is None else files.find(library)
        if mapped is not None:
            kept = KeptWeights(library, mapped)
            yield kept
            kept.finish()
            kept.move_to_huge_pages(name)
            return
        weights = LentWeights(library, _make(name) if file is None else file, is_whole=file is not None)
        is_new = not weights.is_whole
        yield weights
        weights.finish()
        if is_new and files is not None:
            weights.keep_in(files)


def share_tensors(content: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns tensors with the same values in memory that the processes of a machine share, which nobody may write to.
    It is that of a process which has them, else new memory that is lent from then on. `content` names the values in
    full. Small tensors cost little more than their bytes: only memory of a huge page or more lies in huge pages.

    Returns the given tensors if memory cannot be shared here, or if this process has too many open files.
    """
    library = _library()
    if library is None or not hasattr(os, "memfd_create") or _has_many_files():
        return [*tensors]
    sizes = (_up_to(each.nbytes, _CACHE_LINE) for each in tensors)
    *starts, num_bytes = itertools.accumulate(sizes, initial=0)
    placed, name = list(zip(starts, tensors, strict=True)), _name(library, f"tensors {content}")
    try:
        with _alone(name):
            file = _find(name)
            if file is None:
                file = _written(library, name, num_bytes, placed)
            weights = LentWeights(library, file, is_whole=True)
        if weights.num_bytes == num_bytes:
            whole = weights.view(num_bytes)
            found = [whole[start:][: each.nbytes].view(each.dtype).view(each.shape) for start, each in placed]
            if all(map(torch.equal, found, tensors)):
                return found
        logger.warning("memory of the name %s has other values than those that were read, and is not used", name)
    except (OSError, MemoryError) as error:
        logger.warning("tensors of %d bytes are not shared: %s", num_bytes, error)
    return [*tensors]


def _written(library: ctypes.CDLL, name: str, num_bytes: int, placed: Iterable[tuple[int, torch.Tensor]]) -> int:
    """Returns new memory of this name with tensors at their places in it, opened and sealed."""
    file = _make(name)
    try:
        os.truncate(file, num_bytes)
        for start, tensor in placed:
            _write(file, tensor.reshape(-1).view(torch.uint8).numpy().data, start)
        in_huge_pages = num_bytes // HUGE_PAGE * HUGE_PAGE
        if in_huge_pages and _has_huge_pages():
            memory = _mapped(library, file, 0, in_huge_pages, FILLS)  # which makes them
            library.manta_unmap_weights(ctypes.addressof(memory), in_huge_pages)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(file)
        raise
    return file


def _write(file: int, content: memoryview, start: int) -> None:
    """Writes bytes at a place of a file, which the system may take in several pieces."""
    while content:
        num_written = os.pwrite(file, content, start)
        content, start = content[num_written:], start + num_written


def _has_many_files() -> bool:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most != resource.RLIM_INFINITY and len(os.listdir("/proc/self/fd")) > _MOST_OPEN * most


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
        LentWeights(library, _make(f"{PREFIX}trial"), is_whole=False).place(HUGE_PAGE, torch.uint8, lambda _: None)
    except MemoryError:
        return False
    return True


def _name(library: ctypes.CDLL, content: str) -> str:
    return PREFIX + _digest(f"{_LAYOUT} {library._name} {content}")


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


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
