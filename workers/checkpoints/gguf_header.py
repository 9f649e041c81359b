"""Reads the header of a GGUF file: the metadata and the place of each tensor.

Arrays, such as vocabularies, are skipped and read on demand. The reader of the package `gguf` takes 0.5 GiB and many
seconds for a vocabulary of 150,000 tokens, so only its table of types is used. Nothing is allocated for a count before
the file has proved to hold that many bytes. Format: https://github.com/ggml-org/ggml, `docs/gguf.md`.
"""

from __future__ import annotations

import itertools
import math
import mmap
import pathlib
import struct
from typing import Any, NamedTuple

import msgspec

from manta.workers.models.model_config import ModelError

_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The `struct` code of each type of numbers."""
_STRING, _ARRAY = 8, 9
_ALIGNMENT_KEY = "general.alignment"
_DEFAULT_ALIGNMENT = 32
_MOST_ALIGNMENT = 1 << 20
_MOST_DIMS = 4
"""Most dimensions of a tensor in ggml."""
_MOST_KEY_BYTES = 65_535
"""Longest name that the format allows."""
_MOST_ITEMS = 2**24
"""Most metadata entries, tensors, or items of an array. The longest arrays in use are vocabularies and merges, of up to
half a million items. Without a bound, a sparse file would be walked for hours.
"""
_MOST_TEXT_BYTES = 16 << 20
"""Longest value. The longest in use are chat templates, of some ten thousand bytes."""


class GgufTensor(NamedTuple):
    kind: str
    """Name of the type in ggml."""
    shape: tuple[int, ...]
    """[out_features, in_features], as in torch."""
    start: int
    """Byte offset in the file."""
    num_bytes: int
    file: int = 0
    """The number of the file among those of the model."""


class GgufArray(msgspec.Struct, frozen=True):
    """The place of an array of numbers or strings in the file."""

    kind: int
    """The format's number of the type of the items."""
    count: int
    start: int
    """Byte offset of the first item."""

    def __str__(self) -> str:
        return f"an array of {self.count}"


class GgufHeader(NamedTuple):
    values: dict[str, Any]
    """The metadata's numbers, strings and `GgufArray`s."""
    tensors: dict[str, GgufTensor]


def read_gguf_header(path: pathlib.Path) -> GgufHeader:
    """Reads the header. Raises `ModelError` if the package `gguf` is missing, or if the file is damaged or no GGUF
    file.
    """
    try:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as error:
        raise ModelError(f"{path} is a GGUF file, which needs the package gguf: pip install gguf") from error
    block_sizes = {kind.value: (kind.name, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
    try:
        if path.stat().st_size == 0:
            raise ValueError("it is empty")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            cursor = _Cursor(mapped)
            num_tensors, num_values = cursor.counts()
            values: dict[str, Any] = {}
            for _ in range(num_values):
                name, value = cursor.value()
                _add(values, name, value, "key")
            entries = [cursor.tensor() for _ in range(num_tensors)]
        alignment = _alignment(values)
        data_start = -(-cursor.position // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, number, offset in entries:
            if number not in block_sizes:
                raise ValueError(f"tensor {name!r} is of type {number}, which ggml does not have")
            if offset % alignment:
                raise ValueError(f"the offset {offset} of tensor {name!r} is no multiple of {alignment}")
            kind, block, block_bytes = block_sizes[number]
            if not shape or shape[-1] % block:
                raise ValueError(f"tensor {name!r} has shape {list(shape)}, and {kind} has blocks of {block}")
            num_bytes = math.prod(shape) // block * block_bytes
            _add(tensors, name, GgufTensor(kind, shape, data_start + offset, num_bytes), "tensor")
        _refuse_overlaps(tensors)
    except ValueError as error:
        raise ModelError(f"{path} is no whole GGUF file ({error}); copy or download it again") from error
    return GgufHeader(values, tensors)


def read_gguf_array(path: pathlib.Path, array: GgufArray) -> list[Any]:
    """Returns the items of an array. Raises `ModelError` if its strings are not UTF-8."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        if array.kind in _SCALARS:
            return list(struct.unpack_from(f"<{array.count}{_SCALARS[array.kind]}", mapped, array.start))
        cursor = _Cursor(mapped, array.start)
        try:
            return [cursor.string(_MOST_TEXT_BYTES) for _ in range(array.count)]
        except ValueError as error:
            raise ModelError(f"{path} is no whole GGUF file ({error}); copy or download it again") from error


def _add(items: dict[str, Any], name: str, item: Any, what: str) -> None:
    if name in items:
        raise ValueError(f"it has two {what}s of the name {name!r}")
    items[name] = item


def _alignment(values: dict[str, Any]) -> int:
    """Returns the number of bytes of which the places of tensors are multiples. The format asks for a multiple of 8,
    and ggml for a power of 2.
    """
    alignment = values.get(_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT)
    allowed = [1 << power for power in range(3, _MOST_ALIGNMENT.bit_length())]
    if type(alignment) is not int or alignment not in allowed:
        raise ValueError(f"{_ALIGNMENT_KEY} is {alignment!r} and no power of 2 from 8 to {_MOST_ALIGNMENT}")
    return alignment


def _refuse_overlaps(tensors: dict[str, GgufTensor]) -> None:
    in_order = sorted(tensors.items(), key=lambda item: item[1].start)
    for (name, tensor), (next_name, next_tensor) in itertools.pairwise(in_order):
        if tensor.start + tensor.num_bytes > next_tensor.start:
            raise ValueError(f"tensors {name!r} and {next_name!r} overlap")


class _Cursor:
    """Reads a header from its beginning, or values from a place. Raises `ValueError` if it is damaged."""

    def __init__(self, mapped: mmap.mmap, position: int = 0) -> None:
        self._mapped = mapped
        self.position = position

    def counts(self) -> tuple[int, int]:
        """Reads magic and version; returns the numbers of tensors and of metadata entries."""
        magic = self._mapped[:4]
        if magic != b"GGUF":
            raise ValueError(f"it begins with {magic!r} and not with b'GGUF'")
        self.position = 4
        version = self._number("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} is not {' or '.join(map(str, _VERSIONS))}, or it is big-endian")
        return self._count("tensors"), self._count("metadata entries")

    def value(self) -> tuple[str, Any]:
        """Reads a metadata entry; returns its name and value."""
        return self.string(_MOST_KEY_BYTES), self._value(self._number("I"))

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Reads a tensor's name, shape, type and offset."""
        name, num_dims = self.string(_MOST_KEY_BYTES), self._number("I")
        if num_dims > _MOST_DIMS:
            raise ValueError(f"tensor {name!r} has {num_dims} dimensions, more than {_MOST_DIMS}")
        sizes = [self._number("Q") for _ in range(num_dims)]
        if 0 in sizes:
            raise ValueError(f"tensor {name!r} has a dimension of 0")
        return name, tuple(reversed(sizes)), self._number("I"), self._number("Q")

    def string(self, most_bytes: int) -> str:
        """Reads a text."""
        length = self._number("Q")
        if length > most_bytes:
            raise ValueError(f"it has a text of {length} bytes, more than {most_bytes}")
        start = self.position
        self._skip(length)
        return self._mapped[start : self.position].decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string(_MOST_TEXT_BYTES)
        if kind != _ARRAY:
            return self._number(_code(kind))
        kind, count = self._number("I"), self._count("items")
        array = GgufArray(kind, count, self.position)
        if kind == _STRING:
            for _ in range(count):
                self._skip(self._number("Q"))
        else:
            self._skip(count * struct.calcsize(f"<{_code(kind)}"))
        return array

    def _count(self, what: str) -> int:
        count: int = self._number("Q")
        if count > _MOST_ITEMS:
            raise ValueError(f"it has {count} {what}, more than {_MOST_ITEMS}")
        return count

    def _number(self, spelling: str) -> Any:
        start = self.position
        self._skip(struct.calcsize(f"<{spelling}"))
        (number,) = struct.unpack_from(f"<{spelling}", self._mapped, start)
        return number

    def _skip(self, num_bytes: int) -> None:
        self.position += num_bytes
        if self.position > len(self._mapped):
            raise ValueError(f"its header goes on after its {len(self._mapped)} bytes")


def _code(kind: int) -> str:
    """Returns the `struct` code of a type of numbers."""
    if kind not in _SCALARS:
        raise ValueError(f"a value or an item is of type {kind}, which the format does not have")
    return _SCALARS[kind]
