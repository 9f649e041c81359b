"""Lists of structs that Ray carries as one piece of msgpack.

Pickled one by one, as Ray would, they cost both processes several times as much, while the engine's own thread waits
for the interpreter (benchmarks/results/2026-11-23.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

Item = TypeVar("Item", bound=msgspec.Struct)

_encoder = msgspec.msgpack.Encoder()


class Packed(list[Item]):
    """Of `kind`. It arrives as a plain list."""

    def __init__(self, kind: type[Item], items: Iterable[Item]) -> None:
        super().__init__(items)
        self._kind = kind

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            return _unpacked, (self._kind, _encoder.encode(list(self)))
        except (OverflowError, ValueError):  # a number of more than 64 bits, or half a character: the engine refuses it
            return list, (list(self),)


def _unpacked(kind: type[Item], data: bytes) -> list[Item]:
    return msgspec.msgpack.decode(data, type=list[kind])  # type: ignore[valid-type]
