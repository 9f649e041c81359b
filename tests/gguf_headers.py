"""Writes the header of a GGUF file value by value, also as no writer would: to try what a reader does with damage.

The format is https://github.com/ggml-org/ggml, `docs/gguf.md`.
"""

from __future__ import annotations

import pathlib
import struct
from typing import Any, NamedTuple

import gguf

_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The `struct` code of each type of numbers."""
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = 4, 5, 6, 7, 8, 9, 10, 11, 12


class Value(NamedTuple):
    """A value of a type; an array's is the type of its items and their list."""

    kind: int
    value: Any


class Tensor(NamedTuple):
    name: str
    dims: tuple[int, ...]
    """In ggml's order: the fastest first."""
    kind: int
    offset: int


class Header(NamedTuple):
    values: list[tuple[str, Value]]
    tensors: list[Tensor]
    data: bytes

    def with_value(self, key: str, value: Value | None) -> Header:
        """Returns a header in which a key has another value, or none."""
        others = [(name, old) for name, old in self.values if name != key]
        return self._replace(values=others if value is None else [*others, (key, value)])

    def encoded(self, alignment: int = 32) -> tuple[bytes, list[int]]:
        """Returns the file, and the end of each part of its header."""
        parts = [
            b"GGUF",
            struct.pack("<I", 3),
            struct.pack("<Q", len(self.tensors)),
            struct.pack("<Q", len(self.values)),
        ]
        for key, value in self.values:
            parts += [_text(key), struct.pack("<I", value.kind), _encoded(value)]
        for tensor in self.tensors:
            parts += [_text(tensor.name), struct.pack("<I", len(tensor.dims))]
            parts += [struct.pack("<Q", size) for size in tensor.dims]
            parts += [struct.pack("<I", tensor.kind), struct.pack("<Q", tensor.offset)]
        ends, position = [], 0
        for part in parts:
            position += len(part)
            ends.append(position)
        return b"".join(parts) + b"\0" * (-position % alignment) + self.data, ends


def read_header(path: pathlib.Path) -> Header:
    """Reads a file that the package `gguf` has written."""
    reader = gguf.GGUFReader(path)
    values = []
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            kinds = [int(kind) for kind in field.types]
            contents = field.contents()
            values.append((key, Value(kinds[0], (kinds[1], contents) if kinds[0] == ARRAY else contents)))
    start = reader.data_offset
    tensors = [
        Tensor(tensor.name, tuple(map(int, tensor.shape)), int(tensor.tensor_type), tensor.data_offset - start)
        for tensor in reader.tensors
    ]
    return Header(values, tensors, path.read_bytes()[start:])


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _encoded(value: Value) -> bytes:
    if value.kind == STRING:
        return _text(value.value)
    if value.kind != ARRAY:
        return _number(value.kind, value.value)
    kind, items = value.value
    head = struct.pack("<IQ", kind, len(items))
    if kind == STRING:
        return head + b"".join(map(_text, items))
    return head + b"".join(_number(kind, item) for item in items)


def _number(kind: int, number: Any) -> bytes:
    """Returns the bytes of a number. A type that the format does not have gets one byte."""
    return struct.pack(f"<{_CODES.get(kind, 'B')}", number)
