"""Framed messages over pipes and sockets: the length, then the bytes."""

from __future__ import annotations

import asyncio
import struct
from typing import Protocol


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class Writable(Protocol):
    def write(self, data: bytes, /) -> object: ...
    def flush(self) -> object: ...


_HEAD = struct.Struct("<I")
"""A frame's head: the number of bytes that follow."""


def frame(data: bytes) -> bytes:
    return _HEAD.pack(len(data)) + data


def write_frame(stream: Writable, data: bytes) -> None:
    stream.write(frame(data))
    stream.flush()


def read_frame(stream: Readable) -> bytes | None:
    """Returns the next message, or None at the end of the stream, also if the writer died within a message."""
    head = stream.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    (length,) = _HEAD.unpack(head)
    data = stream.read(length)
    return data if len(data) == length else None


async def receive_frame(stream: asyncio.StreamReader, limit: int) -> bytes:
    """Returns the next message. Raises `asyncio.IncompleteReadError` or `OSError` at the end of the stream, and
    `ConnectionError` if the message exceeds `limit` bytes.
    """
    (length,) = _HEAD.unpack(await stream.readexactly(_HEAD.size))
    if length > limit:
        raise ConnectionError(f"a frame of {length} bytes exceeds the limit of {limit}")
    return await stream.readexactly(length)
