"""The results of a batch in a storage: parts that are written whole, until they are joined to files at its end.

A batch that was killed has lost what it had not flushed, and asks those lines again; a line that two runners answered,
because one of them was thought dead, is in its file once.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Iterator

import msgspec

from cluster.batch.journal import DoneLines
from cluster.batch.lines import BatchResult, LineKey, encode
from cluster.batch.storage import Storage

FLUSH_S = 2.0
"""Between two parts at first; 100 parts later it is twice as long, so that a long batch has no more than can be read
again soon.
"""
FLUSH_BYTES = 1 << 20
"""Or when so much waits."""


class _Status(msgspec.Struct):
    status_code: int


class _Result(msgspec.Struct):
    id: str
    response: _Status | None = None

    @property
    def is_good(self) -> bool:
        return self.response is not None and self.response.status_code == 200


_decoder = msgspec.json.Decoder(_Result)


class StoredResults(DoneLines):
    """Those in `folder`, which are read at once, and those that are written from now on."""

    def __init__(self, storage: Storage, folder: str) -> None:
        super().__init__(folder)
        self.num_failed = 0
        self._storage = storage
        self._folder = folder
        self._name = f"{time.time_ns():020}"
        """Later runners have later names."""
        self._num_parts = 0
        self._waiting: collections.deque[bytes] = collections.deque()
        """One thread adds to it while another one takes what is there."""
        self._num_waiting_bytes = 0
        self._last_flush = time.monotonic()
        self._flushing = threading.Lock()
        for key, is_good, _ in self._stored():
            self._count(key, is_good)

    @property
    def num_good(self) -> int:
        return self.num_done - self.num_failed

    @property
    def is_due(self) -> bool:
        """Whether it is time to flush."""
        if self._num_waiting_bytes >= FLUSH_BYTES:
            return True
        pause_s = FLUSH_S * (1 + self._num_parts / 100)
        return bool(self._waiting) and time.monotonic() - self._last_flush >= pause_s

    def write(self, key: LineKey, result: BatchResult) -> None:
        """It is stored with the next flush."""
        line = encode(result)
        self._waiting.append(line)
        self._num_waiting_bytes += len(line)
        self._count(key, result.response is not None and result.response.status_code == 200)

    def flush(self) -> None:
        """Stores what waits. May be called in any thread."""
        with self._flushing:
            lines = [self._waiting.popleft() for _ in range(len(self._waiting))]
            self._num_waiting_bytes, self._last_flush = 0, time.monotonic()
            if lines:
                self._storage.write(f"{self._folder}/{self._name}-{self._num_parts:08}", b"".join(lines))
                self._num_parts += 1

    def stored(self) -> Iterator[tuple[bool, bytes]]:
        """Whether it is a good answer, and the line; each line of the input once."""
        seen = DoneLines(self._folder)
        for key, is_good, line in self._stored():
            if seen.note(key):
                yield is_good, line

    def _stored(self) -> Iterator[tuple[LineKey, bool, bytes]]:
        for name in self._storage.sizes(self._folder):
            for line in (self._storage.read(f"{self._folder}/{name}") or b"").splitlines(keepends=True):
                result = _decoder.decode(line)
                key = LineKey.from_id(result.id)
                assert key is not None, f"{self._folder}/{name} holds {result.id}"
                yield key, result.is_good, line

    def _count(self, key: LineKey, is_good: bool) -> None:
        self.num_failed += self.note(key) and not is_good
