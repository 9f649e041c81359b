"""Reads the header of a GGUF file: the metadata and the place of each tensor.

Vocabularies are skipped. The reader of the package `gguf` takes 0.5 GiB and many seconds for one of 150,000 tokens, so
only its table of types is used. Format: https://github.com/ggml-org/ggml, `docs/gguf.md`.
"""

from __future__ import annotations

import math
import mmap
import pathlib
import struct
from typing import Any, NamedTuple

from manta.workers.models.model_config import ModelError

_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The `struct` code of each type of numbers."""
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32


class GgufTensor(NamedTuple):
    kind: str
    """Name of the type in ggml."""
    shape: tuple[int, ...]
    """[out_features, in_features], as in torch."""
    start: int
    """Byte offset in the file."""
    num_bytes: int


class GgufHeader(NamedTuple):
    values: dict[str, Any]
    """The metadata's numbers and strings. An array is replaced by a text with its length."""
    tensors: dict[str, GgufTensor]


def read_gguf_header(path: pathlib.Path) -> GgufHeader:
    """Reads the header. Raises `ModelError` if the package `gguf` is missing, or if the file is damaged or no GGUF
    file.
    """
    try:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as error:
        raise ModelError(f"{path} is a GGUF file, which needs the package gguf: pip install gguf") from error
    try:
        if path.stat().st_size == 0:
            raise ValueError("it is empty")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            cursor = _Cursor(mapped)
            num_tensors, num_values = cursor.counts()
            values = dict(cursor.value() for _ in range(num_values))
            entries = [cursor.tensor() for _ in range(num_tensors)]
        alignment = values.get("general.alignment", _DEFAULT_ALIGNMENT)
        data_start = -(-cursor.position // alignment) * alignment
        tensors = {}
        for name, shape, number, offset in entries:
            kind = GGMLQuantizationType(number)
            inputs, num_bytes = GGML_QUANT_SIZES[kind]
            tensors[name] = GgufTensor(kind.name, shape, data_start + offset, math.prod(shape) // inputs * num_bytes)
    except (ValueError, KeyError, ArithmeticError, TypeError) as error:
        why = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ModelError(f"{path} is no whole GGUF file ({why}); copy or download it again") from error
    return GgufHeader(values, tensors)


class _Cursor:
    """Reads a header from its beginning. Raises `ValueError` if it is damaged."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._mapped = mapped
        self.position = 0

    def counts(self) -> tuple[int, int]:
        """Reads magic and version; returns the numbers of tensors and of metadata entries."""
        magic = self._mapped[:4]
        if magic != b"GGUF":
            raise ValueError(f"it begins with {magic!r} and not with b'GGUF'")
        self.position = 4
        version = self._number("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} is not {' or '.join(map(str, _VERSIONS))}, or it is big-endian")
        return self._number("Q"), self._number("Q")

    def value(self) -> tuple[str, Any]:
        """Reads a metadata entry; returns its name and value."""
        return self._string(), self._value(self._number("I"))

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Reads a tensor's name, shape, type and offset."""
        name, num_dims = self._string(), self._number("I")
        sizes = [self._number("Q") for _ in range(num_dims)]
        return name, tuple(reversed(sizes)), self._number("I"), self._number("Q")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(_SCALARS[kind])
        kind, count = self._number("I"), self._number("Q")
        if kind == _STRING:
            for _ in range(count):
                self._skip(self._number("Q"))
        elif kind in _SCALARS:
            self._skip(count * struct.calcsize(f"<{_SCALARS[kind]}"))
        else:
            raise ValueError(f"an array of type {kind}")
        return f"an array of {count}"

    def _number(self, spelling: str) -> Any:
        start = self.position
        self._skip(struct.calcsize(f"<{spelling}"))
        (number,) = struct.unpack_from(f"<{spelling}", self._mapped, start)
        return number

    def _string(self) -> str:
        length = self._number("Q")
        start = self.position
        self._skip(length)
        return self._mapped[start : self.position].decode()

    def _skip(self, num_bytes: int) -> None:
        self.position += num_bytes
        if self.position > len(self._mapped):
            raise ValueError(f"its header goes on after its {len(self._mapped)} bytes")
