"""Sums and gathers between the ranks of one machine, through shared memory: thin ctypes calls into `all_reduce.cpp`.

`workers/platforms/cpu_group.py` opens it where all ranks can map the same file, and takes gloo elsewhere. Nothing is
compiled at import.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import mmap
import os
import pathlib
import tempfile
import weakref
from collections.abc import Iterator
from ctypes import POINTER, c_int, c_int64, c_void_p
from typing import Any

import torch

from manta.workers.kernels import build, layout
from manta.workers.kernels.cpu_linear import DTYPES, HasNative, NativeLinear
from manta.workers.kernels.linears import GatheringLinear, SummedLinear
from manta.workers.kernels.weights import Linear

_SharedGroup = layout.structure("_SharedGroup", "memory", "file rank num_ranks round dead alone")
_RowParallel = layout.structure("_RowParallel", "run state group", "dtype out_features")
_ColumnParallel = layout.structure("_ColumnParallel", "run state group", "in_bytes out_bytes")
_MEMORY = pathlib.Path("/dev/shm")
"""A file here is memory and nothing else; one elsewhere is also written to a disk."""


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = build.load_library()
    if library is not None:
        structures = (_SharedGroup, _RowParallel, _ColumnParallel)
        sizes = {f"the size of {each.__name__[1:]}": ctypes.sizeof(each) for each in structures}
        layout.check("all_reduce.cpp", library.manta_all_reduce_layout, sizes)
        library.manta_all_reduce.argtypes = [POINTER(_SharedGroup), c_int, c_void_p, c_int64]
        library.manta_gather.argtypes = [POINTER(_SharedGroup), c_void_p, c_void_p, c_int64]
        library.manta_all_gather.argtypes = [POINTER(_SharedGroup), c_void_p, c_void_p, c_int64, c_int64]
        library.manta_all_reduce.restype = library.manta_gather.restype = library.manta_all_gather.restype = None
    return library


def create_file(num_ranks: int) -> str | None:
    """The path of a file for all ranks to map; None if there are no kernels, too many ranks or too little memory."""
    library = _library()
    if library is None or num_ranks > library.manta_all_reduce_layout(5):
        return None
    folder = _MEMORY if _MEMORY.is_dir() else None
    file, path = tempfile.mkstemp(prefix="manta-ranks-", dir=folder)
    try:
        header, slot = (library.manta_all_reduce_layout(which) for which in (3, 4))
        size = header + 2 * num_ranks * slot
        os.truncate(file, size)
        if hasattr(os, "posix_fallocate"):  # else what is missing would end the process when it is written to
            os.posix_fallocate(file, 0, size)
    except OSError:
        os.unlink(path)
        return None
    finally:
        os.close(file)
    return path


class SharedGroup:
    """One rank's end of the file `path`, which may be unlinked once all ranks have mapped it. Raises `OSError` if it
    cannot be mapped.

    Each rank holds a lock on the file until its process ends or this object is dropped. A rank counts as dead if others
    wait for it and it holds no lock, so no rank may wait before all have locked.
    """

    def __init__(self, path: str, rank: int, num_ranks: int) -> None:
        library = _library()
        if library is None:
            raise OSError("there is no library of kernels to share memory by")
        self._library = library
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        weakref.finalize(self, os.close, file)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        self._memory = mmap.mmap(file, 0)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.state: Any = _SharedGroup(address, file, rank, num_ranks, 0, 0, 0)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of `x`, float32 or bfloat16 of any shape, which is overwritten if it is contiguous."""
        x = x.contiguous()
        self._library.manta_all_reduce(self.state, DTYPES[x.dtype], x.data_ptr(), x.numel())
        self.raise_error()
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        x = x.contiguous()
        parts = x.new_empty((self.state.num_ranks, *x.shape)) if self.state.rank == 0 else None
        to = None if parts is None else parts.data_ptr()
        self._library.manta_gather(self.state, x.data_ptr(), to, x.numel() * x.itemsize)
        self.raise_error()
        return None if parts is None else list(parts)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' x [num_rows, width] side by side, [num_rows, num_ranks * width]."""
        x = x.contiguous()
        num_rows, width = x.shape
        gathered = x.new_empty(num_rows, self.state.num_ranks * width)
        self._library.manta_all_gather(self.state, x.data_ptr(), gathered.data_ptr(), num_rows, width * x.itemsize)
        self.raise_error()
        return gathered

    def row_parallel(self, linear: Linear, out_features: int, dtype: torch.dtype) -> Linear:
        """`linear`, followed by the sum over ranks. If C++ can call `linear`, it can call this too."""
        if isinstance(linear, HasNative):
            return _RowParallelLinear(linear, out_features, dtype, self)
        return SummedLinear(linear, self.all_reduce)

    def column_parallel(self, linear: Linear, in_features: int, out_features: int, dtype: torch.dtype) -> Linear:
        """`linear` between two gathers. If C++ can call `linear`, it can call this too."""
        if isinstance(linear, HasNative):
            return _ColumnParallelLinear(linear, in_features, out_features, dtype, self)
        return GatheringLinear(linear, self.all_gather)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """A context in which nothing is summed and nobody is waited for, in C++ neither."""
        self.state.alone = True
        try:
            yield
        finally:
            self.state.alone = False

    def raise_error(self) -> None:
        """Raises `RuntimeError` if a rank died in this call or an earlier one."""
        if self.state.dead:
            raise RuntimeError(f"rank {self.state.dead - 1} of {self.state.num_ranks} died")


class _RowParallelLinear(SummedLinear):
    """A sum over ranks that C++ can call."""

    def __init__(self, linear: Any, out_features: int, dtype: torch.dtype, group: SharedGroup) -> None:
        super().__init__(linear, group.all_reduce)
        self._native_linear: HasNative = linear
        self._sizes = DTYPES[dtype], out_features
        self._group = group
        self._state: Any = None

    def native(self) -> NativeLinear:
        inner = self._native_linear.native()
        if self._state is None:  # callers keep its address
            self._state = _RowParallel(inner.run, inner.state, ctypes.addressof(self._group.state), *self._sizes)
        return _native(self._group._library.manta_run_row_parallel, self._state, self._group, inner)


class _ColumnParallelLinear(GatheringLinear):
    """A linear between two gathers over ranks that C++ can call."""

    def __init__(
        self, linear: Any, in_features: int, out_features: int, dtype: torch.dtype, group: SharedGroup
    ) -> None:
        super().__init__(linear, group.all_gather)
        self._native_linear: HasNative = linear
        self._row_bytes = in_features * dtype.itemsize, out_features * dtype.itemsize
        self._group = group
        self._state: Any = None

    def native(self) -> NativeLinear:
        inner = self._native_linear.native()
        if self._state is None:
            self._state = _ColumnParallel(inner.run, inner.state, ctypes.addressof(self._group.state), *self._row_bytes)
        return _native(self._group._library.manta_run_column_parallel, self._state, self._group, inner)


def _native(function: Any, state: Any, group: SharedGroup, inner: NativeLinear) -> NativeLinear:
    """The call of `function` with `state`, which the caller keeps alive, around `inner`."""
    run = ctypes.cast(function, c_void_p).value
    assert run is not None
    return NativeLinear(run, ctypes.addressof(state), group.raise_error, begin=inner.begin)
