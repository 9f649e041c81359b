"""The results of a batch in a storage: parts that are written whole, and joined to files at the batch's end.

Parts of different runners have different names, so a line that two runners answered may be stored twice; `stored`
returns it once. A torn or undecodable line of a part counts as not answered. Results that were not flushed when a
runner was killed are computed again.
"""

from __future__ import annotations

import collections
import secrets
import threading
import time
from collections.abc import Iterator

import msgspec

from manta.cluster.batch.journal import DoneLines
from manta.cluster.batch.lines import BatchResult, LineKey, encode
from manta.cluster.storage.storage import Storage
from manta.structured.visible_logs import logger_of

logger = logger_of(__name__)

FLUSH_S = 2.0
"""Seconds between two flushes at first. After 100 parts it has doubled, because a restart reads all parts."""
FLUSH_BYTES = 1 << 20
"""Bytes of unflushed results that make a flush due."""


class _Status(msgspec.Struct):
    status_code: int


class _StoredResult(msgspec.Struct):
    id: str
    response: _Status | None = None

    @property
    def is_good(self) -> bool:
        return self.response is not None and self.response.status_code == 200


class StoredLine(msgspec.Struct, frozen=True):
    """One result as a part holds it."""

    key: LineKey
    is_good: bool
    """Whether the endpoint answered with status 200."""
    text: bytes
    """The line with its newline."""


_decoder = msgspec.json.Decoder(_StoredResult)


class StoredResults(DoneLines):
    """The results in `folder`, which the constructor reads, and those that are written from now on."""

    def __init__(self, storage: Storage, folder: str) -> None:
        super().__init__(folder)
        self.num_failed = 0
        self._storage = storage
        self._folder = folder
        self._name = f"{time.time_ns():020}-{secrets.token_hex(8)}"
        """Prefix of this writer's part names; a later writer has a greater one."""
        self._num_parts = 0
        self._waiting: collections.deque[bytes] = collections.deque()
        """Lines to be flushed. One thread appends while another one removes what it has stored."""
        self._num_bytes_written = self._num_bytes_flushed = 0
        """Bytes written and flushed. Each is changed by one thread at a time; the difference is unflushed."""
        self._last_flush = time.monotonic()
        self._flushing = threading.Lock()
        for line in self._stored():
            self._count(line.key, line.is_good)

    @property
    def num_good(self) -> int:
        return self.num_done - self.num_failed

    @property
    def is_due(self) -> bool:
        """Whether a flush is due."""
        if self._num_bytes_written - self._num_bytes_flushed >= FLUSH_BYTES:
            return True
        pause_s = FLUSH_S * (1 + self._num_parts / 100)
        return bool(self._waiting) and time.monotonic() - self._last_flush >= pause_s

    def write(self, key: LineKey, result: BatchResult) -> None:
        """Takes a result, which the next flush stores."""
        line = encode(result)
        self._waiting.append(line)
        self._num_bytes_written += len(line)
        self._count(key, result.response is not None and result.response.status_code == 200)

    def flush(self) -> None:
        """Stores the unflushed results; after a failure they stay unflushed. May be called in any thread."""
        with self._flushing:
            self._last_flush = time.monotonic()
            lines = list(self._waiting)
            if not lines:
                return
            name = f"{self._name}-{self._num_parts:08}"
            self._num_parts += 1  # a retry gets another name, because the store may yet execute the failed write
            self._storage.write(f"{self._folder}/{name}", b"".join(lines))
            for line in lines:
                self._waiting.popleft()
                self._num_bytes_flushed += len(line)

    def stored(self) -> Iterator[StoredLine]:
        """Yields all stored results, one for each line of the input."""
        seen = DoneLines(self._folder)
        for line in self._stored():
            if seen.note(line.key):
                yield line

    def _stored(self) -> Iterator[StoredLine]:
        for name in self._storage.sizes(self._folder):
            for text in (self._storage.read(f"{self._folder}/{name}") or b"").split(b"\n"):
                line = _stored_line(text)
                if line is not None:
                    yield line
                elif text:
                    logger.warning("%s/%s holds a line that cannot be decoded; it is asked again", self._folder, name)

    def _count(self, key: LineKey, is_good: bool) -> None:
        self.num_failed += self.note(key) and not is_good


def _stored_line(text: bytes) -> StoredLine | None:
    """Returns the result on a line; None if it is torn or empty."""
    try:
        result = _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    key = LineKey.from_id(result.id)
    return None if key is None else StoredLine(key, result.is_good, text + b"\n")
