"""Maps a checkpoint's safetensors or GGUF file into memory, so that only the tensors in use are read.

Imports no framework; the readers of each framework make arrays of the mapped tensors. Pages of a copied tensor are
given back, so loading takes about as much memory as the packed weights.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import pathlib
import platform
import sys
from collections.abc import Container, Iterable, Mapping

import msgspec

from manta.structured.visible_logs import logger_of
from manta.workers.checkpoints.memory import TensorEntry, weight_headers
from manta.workers.checkpoints.stored_files import open_file
from manta.workers.load_meter import LoadMeter
from manta.workers.models.draft_heads import DRAFT_PREFIXES
from manta.workers.models.families import describe
from manta.workers.models.model_config import ModelConfig, ModelError

logger = logger_of(__name__)

_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".k_scale", ".v_scale", ".q_scale")
"""Tensors that are not used: buffers that old checkpoints store but implementations compute, and the scales of a
quantised KV cache, which Manta does not have.
"""
_MAP_NORESERVE, _USUAL_MACHINES = 0x4000, ("x86_64", "aarch64")
"""The flag of Linux, which Python has from 3.13 on, and processors for which it has this value."""
_HEAD = "lm_head.weight"
_COMPARED_BYTES = 2**24
"""Bytes of the embedding and of the head that are compared at a time."""
_SMALL_BYTES = 4 << 20
"""The most bytes of a tensor that is read as a whole where little is read."""
_REMEDY = "copy or download configuration and weights of one model again"


class TensorFiles:
    """The tensors of a folder's weight files, mapped but not read.

    Raises `ModelError` if there are no files, or if one is truncated or not safetensors.
    """

    def __init__(self, folder: str | pathlib.Path) -> None:
        self.folder = pathlib.Path(folder)
        self._maps: list[mmap.mmap] = []
        self._entries: dict[str, tuple[mmap.mmap, TensorEntry]] = {}
        self._paths: dict[str, pathlib.Path] = {}
        """The file of each tensor."""
        self._taken: set[str] = set()
        self._meter: LoadMeter | None = None
        """Counts the bytes of each tensor when it is first read."""
        self._unreleased: list[str] = []
        """Tensors that were found since the last release."""
        self._reads_little = False
        headers = weight_headers(self.folder)
        self._source = headers[0][0] if len(headers) == 1 else self.folder
        """The only file, or the folder of several."""
        for path, entries in headers:
            self._map(path, entries)

    def _map(self, path: pathlib.Path, entries: Mapping[str, TensorEntry]) -> None:
        folder = self.folder if path.is_relative_to(self.folder) else path.parent  # a GGUF file lies elsewhere
        with open_file(folder, path.relative_to(folder)) as file:
            mapped = _map_privately(file.fileno())
        self._entries |= {name: (mapped, entry) for name, entry in entries.items()}
        self._paths |= dict.fromkeys(entries, path)
        self._maps.append(mapped)

    def count_into(self, meter: LoadMeter) -> None:
        """Has a meter count the stored bytes of what is read from now on, and expect those of all tensors."""
        self._meter = meter
        meter.expect(sum(entry.end - entry.start for _, entry in self._entries.values()))

    def read_ahead(self) -> None:
        """Has the system read all of the files, for a caller that will read most of them."""
        for mapped in self._maps:
            _advise(mapped, "MADV_WILLNEED")

    def read_little(self) -> None:
        """Has the system read nothing around what is read, for a caller that reads small tensors and rows of tables."""
        self._reads_little = True
        for mapped in self._maps:
            _advise(mapped, "MADV_RANDOM")

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def entry(self, name: str) -> TensorEntry:
        """Returns a tensor's header. Raises `ModelError` if it is missing."""
        if name not in self._entries:
            raise ModelError(f"tensor {name} is missing from {self._source}; {_REMEDY}")
        return self._entries[name][1]

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self.entry(name).shape

    def kind_of(self, name: str) -> str:
        """Returns a tensor's dtype in safetensors' spelling, or its GGUF type."""
        return self.entry(name).dtype

    def find(self, name: str, shape: tuple[int, ...], item_bytes: Mapping[str, int]) -> tuple[mmap.mmap, TensorEntry]:
        """Returns the mapped file of a tensor and the tensor's place in it. `item_bytes` maps the dtypes that the
        caller reads, in safetensors' spelling, to the bytes of an element.

        Raises `ModelError` naming the tensor if it is missing or has another shape or dtype.
        """
        if name not in self._entries:
            raise ModelError(f"tensor {name} of shape {list(shape)} is missing from {self._source}; {_REMEDY}")
        mapped, entry = self._entries[name]
        self._check_shape(name, entry, shape)
        place = f"in {self._paths[name]}"
        if entry.dtype not in item_bytes:
            raise ModelError(f"tensor {name} is {entry.dtype}; only {', '.join(item_bytes)} is read {place}; {_REMEDY}")
        if (num_bytes := entry.end - entry.start) != math.prod(shape) * item_bytes[entry.dtype]:
            raise ModelError(
                f"tensor {name} has {num_bytes} bytes, which do not fill {list(shape)}, {place}; {_REMEDY}"
            )
        self._take(name)
        return mapped, entry

    def find_blocks(self, name: str, shape: tuple[int, ...]) -> tuple[mmap.mmap, TensorEntry]:
        """Finds a tensor of a GGUF type like `find`. Its elements are stored in blocks."""
        entry = self.entry(name)
        self._check_shape(name, entry, shape)
        self._take(name)
        return self._entries[name][0], entry

    def _take(self, name: str) -> None:
        if self._meter is not None and name not in self._taken:
            entry = self.entry(name)
            self._meter.add(entry.end - entry.start)
        self._taken.add(name)
        self._unreleased.append(name)

    def _check_shape(self, name: str, entry: TensorEntry, shape: tuple[int, ...]) -> None:
        if entry.shape != shape:
            raise ModelError(
                f"tensor {name} has shape {list(entry.shape)} in {self._paths[name]}, and the configuration asks for "
                f"{list(shape)}; {_REMEDY}"
            )

    def expect(self, mapped: mmap.mmap, entry: TensorEntry) -> None:
        """Has the system read a small tensor whose data are wanted, where it reads nothing else ahead."""
        if self._reads_little and entry.end - entry.start <= _SMALL_BYTES:
            start = entry.start // mmap.PAGESIZE * mmap.PAGESIZE
            _advise(mapped, "MADV_WILLNEED", start, entry.end - start)

    def expect_all(self, name: str) -> None:
        """Has the system read a tensor of any size that is read from its beginning to its end."""
        mapped, entry = self._entries[name]
        start = entry.start // mmap.PAGESIZE * mmap.PAGESIZE
        _advise(mapped, "MADV_WILLNEED", start, entry.end - start)

    def as_stored(self, config: ModelConfig) -> ModelConfig:
        """Returns the configuration of a tied model without its tie, if a file holds a head unlike the embedding. So
        does transformers.
        """
        if not config.tie_word_embeddings or _HEAD not in self._entries:
            return config
        embedding = describe(config).embedding.weight_name
        if not self._holds_other_head(embedding):
            return config
        logger.warning(
            "%s says tie_word_embeddings, but %s differs from %s; it is used. Set tie_word_embeddings to false",
            self.folder / "config.json",
            _HEAD,
            embedding,
        )
        return msgspec.structs.replace(config, tie_word_embeddings=False)

    def _holds_other_head(self, embedding: str) -> bool:
        if embedding not in self._entries:
            return False
        stored = self._entries[_HEAD], self._entries[embedding]
        head, table = (entry for _, entry in stored)
        if (head.dtype, head.shape) != (table.dtype, table.shape):
            return True
        for offset in range(0, head.end - head.start, _COMPARED_BYTES):
            length = min(_COMPARED_BYTES, head.end - head.start - offset)
            starts = [(file, entry.start + offset) for file, entry in stored]
            pieces = [file[start : start + length] for file, start in starts]
            if pieces[0] != pieces[1]:
                return True
        self._unreleased.append(_HEAD)
        return False

    def release(self) -> None:
        """Gives back the memory of the tensors that were found since the last call. Their views stay valid, but reading
        one reads the file again.
        """
        for name in self._unreleased:
            mapped, entry = self._entries[name]
            start = -(-entry.start // mmap.PAGESIZE) * mmap.PAGESIZE
            length = entry.end // mmap.PAGESIZE * mmap.PAGESIZE - start
            if length > 0:
                _advise(mapped, "MADV_DONTNEED", start, length)
        self._unreleased.clear()

    def check_all_used(
        self, but: Iterable[str] = (), below: tuple[str, ...] = (), of_modules: Container[str] = ()
    ) -> None:
        """Raises `ModelError` naming tensors that were never read, because the model would silently run without
        them. `but` are names, and `below` beginnings of names, of tensors that need not be read, and `of_modules` the
        names without their last part.
        """
        left = [
            name
            for name in self._entries.keys() - self._taken - set(but)
            if not name.endswith(_IGNORED_SUFFIXES)
            and not name.startswith((*DRAFT_PREFIXES, *below))
            and name.rpartition(".")[0] not in of_modules
        ]
        if left:
            shown = ", ".join(sorted(left)[:5])
            raise ModelError(f"{self.folder} holds {len(left)} tensors that its architecture does not have: {shown}")


def _map_privately(file: int) -> mmap.mmap:
    """Maps a file. torch warns of memory that it cannot write to, so the mapping is private and writable, and nothing
    writes to it. But for `MAP_NORESERVE`, Linux would refuse one larger than its memory, which it might have to copy.
    """
    if sys.platform != "linux" or platform.machine() not in _USUAL_MACHINES:
        return mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
    return mmap.mmap(file, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def _advise(mapped: mmap.mmap, name: str, *part: int) -> None:
    """Advises the system about pages. Refused or unknown advice costs only speed or memory."""
    if hasattr(mmap, name):
        with contextlib.suppress(OSError):
            mapped.madvise(getattr(mmap, name), *part)
