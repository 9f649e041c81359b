"""Lists of structs that Ray transfers as one msgpack message.

Pickling the structs one by one costs both processes several times as much, and makes the engine's own thread wait for
the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

Item = TypeVar("Item", bound=msgspec.Struct)

_encoder = msgspec.msgpack.Encoder()


class Packed(list[Item]):
    """A list of structs of type `kind`. It arrives as a plain list."""

    def __init__(self, kind: type[Item], items: Iterable[Item]) -> None:
        super().__init__(items)
        self._kind = kind

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            return _unpacked, (self._kind, _encoder.encode(list(self)))
        except (OverflowError, ValueError):  # an int beyond 64 bits or a lone surrogate: the engine refuses the request
            return list, (list(self),)


def _unpacked(kind: type[Item], data: bytes) -> list[Item]:
    return msgspec.msgpack.decode(data, type=list[kind])  # type: ignore[valid-type]
