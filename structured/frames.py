"""Messages over the pipes and sockets between processes: each is sent as a frame, its length and then its bytes."""

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
"""A frame's first four bytes: how many bytes follow."""


def frame(data: bytes) -> bytes:
    return _HEAD.pack(len(data)) + data


def write_frame(stream: Writable, data: bytes) -> None:
    stream.write(frame(data))
    stream.flush()


def read_frame(stream: Readable) -> bytes | None:
    """The next message; None at the end of the stream, also if it ends within a message because the writer died."""
    head = stream.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    (length,) = _HEAD.unpack(head)
    data = stream.read(length)
    return data if len(data) == length else None


async def receive_frame(stream: asyncio.StreamReader, limit: int) -> bytes:
    """The next message. Raises `asyncio.IncompleteReadError` or `OSError` at the end of the stream, and
    `ConnectionError` if the message has more than `limit` bytes.
    """
    (length,) = _HEAD.unpack(await stream.readexactly(_HEAD.size))
    if length > limit:
        raise ConnectionError(f"a frame of {length} bytes exceeds the limit of {limit}")
    return await stream.readexactly(length)
