"""Messages with a length in front, over the pipes and sockets between this process and its helpers on the machine."""

from __future__ import annotations

import struct
from typing import Protocol


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class Writable(Protocol):
    def write(self, data: bytes, /) -> object: ...
    def flush(self) -> object: ...


def frame(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def write_frame(stream: Writable, data: bytes) -> None:
    stream.write(frame(data))
    stream.flush()


def read_frame(stream: Readable) -> bytes | None:
    """The next message; None at the end of the stream, also if it ends within a message because the writer died."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    (length,) = struct.unpack("<I", head)
    data = stream.read(length)
    return data if len(data) == length else None
