"""The safetensors files of a checkpoint, or its GGUF file, mapped into memory: only tensors in use are read.

Imports no framework. `Checkpoint` and the readers of other frameworks make arrays of what this module finds. Once a
tensor is copied its pages are given back, so loading takes at most about as much memory as the packed weights.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import pathlib
from collections.abc import Iterable, Mapping

from workers.checkpoints.memory import TensorEntry, weight_headers
from workers.models.model_config import ModelError

_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".k_scale", ".v_scale", ".q_scale")
"""Buffers that old checkpoints store and every implementation computes, and the scales of a quantised KV cache, which
here is not quantised.
"""


class TensorFiles:
    """The tensors of a folder's weight files, mapped but not read.

    Raises `ModelError` if there are none, or if a file is truncated or not safetensors.
    """

    def __init__(self, folder: str | pathlib.Path, read_ahead: bool = True) -> None:
        """With `read_ahead` the system starts to read all of a cold file while the first weights are packed."""
        self.folder = pathlib.Path(folder)
        self._read_ahead = read_ahead
        self._entries: dict[str, tuple[mmap.mmap, TensorEntry]] = {}
        self._taken: set[str] = set()
        for path, entries in weight_headers(self.folder):
            self._map(path, entries)

    def _map(self, path: pathlib.Path, entries: Mapping[str, TensorEntry]) -> None:
        with path.open("rb") as file:
            # torch warns of memory that it cannot write to, so the mapping is private and writable. Nothing writes to
            # it.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._entries |= {name: (mapped, entry) for name, entry in entries.items()}
        if self._read_ahead:
            _advise(mapped, "MADV_WILLNEED")

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def entry(self, name: str) -> TensorEntry:
        """Raises `ModelError` if the tensor is missing."""
        if name not in self._entries:
            raise ModelError(f"tensor {name} is missing from {self.folder}")
        return self._entries[name][1]

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self.entry(name).shape

    def kind_of(self, name: str) -> str:
        """Returns a tensor's dtype in safetensors' spelling, or its GGUF type."""
        return self.entry(name).dtype

    def find(self, name: str, shape: tuple[int, ...], item_bytes: Mapping[str, int]) -> tuple[mmap.mmap, TensorEntry]:
        """Returns the mapped file of a tensor and its place there. `item_bytes` has the dtypes that the caller reads,
        in safetensors' spelling, and the bytes of an element of each.

        Raises `ModelError` naming the tensor if it is missing, not of `shape`, or of another dtype.
        """
        if name not in self._entries:
            raise ModelError(f"tensor {name} of shape {list(shape)} is missing from {self.folder}")
        mapped, entry = self._entries[name]
        if entry.shape != shape:
            raise ModelError(f"tensor {name} has shape {list(entry.shape)}; its config.json asks for {list(shape)}")
        if entry.dtype not in item_bytes:
            raise ModelError(f"tensor {name} is {entry.dtype}; only {', '.join(item_bytes)} weights are supported")
        if entry.end - entry.start != math.prod(shape) * item_bytes[entry.dtype]:
            raise ModelError(f"tensor {name} has {entry.end - entry.start} bytes, which do not fill {list(shape)}")
        self._taken.add(name)
        return mapped, entry

    def find_blocks(self, name: str, shape: tuple[int, ...]) -> tuple[mmap.mmap, TensorEntry]:
        """As `find`, for a tensor of a GGUF type, whose elements are stored in blocks."""
        mapped, entry = self._entries[name]
        if entry.shape != shape:
            raise ModelError(f"tensor {name} has shape {list(entry.shape)}; its configuration asks for {list(shape)}")
        self._taken.add(name)
        return mapped, entry

    def release(self, names: Iterable[str]) -> None:
        """Gives back the memory of tensors that were copied. Their views stay valid; reading one reads the file
        again.
        """
        for name in names:
            mapped, entry = self._entries[name]
            start = -(-entry.start // mmap.PAGESIZE) * mmap.PAGESIZE
            length = entry.end // mmap.PAGESIZE * mmap.PAGESIZE - start
            if length > 0:
                _advise(mapped, "MADV_DONTNEED", start, length)

    def check_all_used(self, but: Iterable[str] = ()) -> None:
        """Raises `ModelError` naming tensors that were never asked for: the model would silently run without them."""
        left = [name for name in self._entries.keys() - self._taken - set(but) if not name.endswith(_IGNORED_SUFFIXES)]
        if left:
            shown = ", ".join(sorted(left)[:5])
            raise ModelError(f"{self.folder} holds {len(left)} tensors that its architecture does not have: {shown}")


def _advise(mapped: mmap.mmap, name: str, *part: int) -> None:
    """Advises the system about pages. If it does not know the advice, or refuses it, only speed or memory is lost."""
    if hasattr(mmap, name):
        with contextlib.suppress(OSError):
            mapped.madvise(getattr(mmap, name), *part)
