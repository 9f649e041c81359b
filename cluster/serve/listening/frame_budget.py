"""Bounds how many WebSocket frames a client has read, each time and each second.

A frame takes 6 bytes and up to 20 us of the event loop, whatever it holds, so a client could stop every stream with
empty ones. `cluster/serve/listening/upgraded.py` gives the parser a few frames each time, and stops reading from a
client that has used up its allowance until it has some again. Nothing is lost and no connection ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable

FRAMES_AT_ONCE = 128
"""Most frames that are parsed in one turn of the event loop: about 2 ms."""
FRAMES_PER_S = 1000.0
"""Frames that one connection may send each second, for long. A message is one frame for most clients, and 8 MB in
pieces of 4 KiB are 2048.
"""
ADDRESS_FRAMES_PER_S = 4000.0
"""Frames of all connections of one address each second: about 6% of a processor."""
BURST_S = 2.0
"""Seconds of an allowance that a client which has sent nothing may use at once."""


class Allowance:
    """A number of frames that grows by `per_second` up to `BURST_S` times that. `clock` tells seconds."""

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._clock = clock
        self._left = per_second * BURST_S
        self._at = clock()

    @property
    def left(self) -> int:
        """Frames that may be taken now."""
        now = self._clock()
        self._left = min(self._left + (now - self._at) * self._per_second, self._per_second * BURST_S)
        self._at = now
        return int(self._left)

    def take(self, num_frames: int) -> None:
        self._left -= num_frames

    def wait_s(self, num_frames: int) -> float:
        """Returns the seconds until so many frames are left, as of the last look."""
        return max(0.0, (num_frames - self._left) / self._per_second)


class FrameCutter:
    """Finds where frames begin in the bytes of one connection, by their heads (RFC 6455, section 5.2)."""

    def __init__(self) -> None:
        self._head = bytearray()
        """Bytes of a head that has not come whole."""
        self._num_payload_bytes = 0
        """Bytes of the present frame that are still to come."""

    def cut(self, data: bytes | bytearray, most_frames: int) -> tuple[int, int]:
        """Returns the length of the beginning of `data` in which at most so many frames begin, and their number."""
        position = num_frames = 0
        while position < len(data):
            if not self._num_payload_bytes and not self._head:
                if num_frames == most_frames:
                    break
                num_frames += 1
            position = self._pass(data, position)
        return position, num_frames

    def _pass(self, data: bytes | bytearray, position: int) -> int:
        """Returns the position behind the next part of a frame, as far as it is there."""
        if self._num_payload_bytes:
            num_passed = min(self._num_payload_bytes, len(data) - position)
            self._num_payload_bytes -= num_passed
            return position + num_passed
        end = position + self._num_head_bytes() - len(self._head)
        self._head += data[position:end]
        if len(self._head) == self._num_head_bytes():
            self._num_payload_bytes = self._payload_length()
            self._head.clear()
        return min(end, len(data))

    def _num_head_bytes(self) -> int:
        """Returns the length of the present head, as far as the bytes that have come tell it."""
        if len(self._head) < 2:
            return 2
        return 2 + {126: 2, 127: 8}.get(self._head[1] & 127, 0) + 4 * (self._head[1] >> 7)

    def _payload_length(self) -> int:
        length = self._head[1] & 127
        if length < 126:
            return length
        return int.from_bytes(self._head[2 : 4 if length == 126 else 10])
