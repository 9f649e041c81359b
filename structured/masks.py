"""Where masks live: one block of memory that grammar workers write, the engine's pool watches and the sampler reads.

A session owns a *slot*, and one more for each draft that it has at a time. Its worker writes the slot's row and then
the number of the job that the row is for, so that whoever sees the number may read the row, without a message and
without a copy. Workers of another process map the same memory. `MaskBatch` is what travels on to the ranks.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from typing import IO, NamedTuple

import msgspec
import numpy as np

MAX_ADJUSTMENTS = 256
"""Logits that one session may change beyond its mask, for one token."""

ERROR_BYTES = 480

MAX_FORCED = 16
"""Forced tokens that come back in a row."""

MAX_CHOICES = 8
"""Where no more tokens than this may come next, what is forced behind each comes back too."""

FINISHED, FAILED, REFUSED = 1, 2, 4
"""Flags of a slot: nothing may follow but the end; its session failed; the grammar refuses a draft before this row."""

NO_MASK, LATE = -1, -2
"""In `MaskBatch.slots`: a point that is not constrained, and one that is not drawn in this step: its mask is late, or
it stands behind a draft that is refused.
"""


def row_words(vocab_size: int) -> int:
    """int32 words of a packed row."""
    return -(-vocab_size // 32)


class MaskBatch(NamedTuple):
    """The masks of one step. A sampler in this process reads the rows where the grammar workers wrote them; what is
    pickled for another one is `packed`.
    """

    step_id: int
    slots: list[int]
    """For each sample point, also the several of one sequence, the row of `rows`, `NO_MASK` or `LATE`."""
    rows: np.ndarray
    """int32 [slots, words]: token `t` is bit `t % 32` of word `t // 32`, 1 allows."""
    adjustments: dict[int, tuple[np.ndarray, np.ndarray]]
    """Sample point to token ids int32 [n] and what is added to their logits, float32 [n]."""

    def packed(self) -> MaskBatch:
        """The same masks over the rows that are used, each once: int32 [used rows, words], a copy."""
        used = sorted({slot for slot in self.slots if slot >= 0})
        place = {slot: row for row, slot in enumerate(used)}
        return self._replace(slots=[place.get(slot, slot) for slot in self.slots], rows=self.rows[used])

    def __reduce__(self) -> tuple[type[MaskBatch], tuple[object, ...]]:
        return MaskBatch, tuple(self.packed())


class BufferShape(msgspec.Struct, frozen=True, array_like=True):
    """Sizes of a `MaskBuffer`, and where another process finds it."""

    num_slots: int
    num_words: int
    num_workers: int
    path: str | None = None


class MaskBuffer:
    """Arrays over one block of memory. Each is written by one side only, per slot or per worker.

    Order of stores: a worker writes `done` last. Python's own calls order them on every processor that it runs on.
    """

    def __init__(self, shape: BufferShape, shared: bool = False) -> None:
        self.shape = shape
        self._file: IO[bytes] | None = None
        slots, words, workers = shape.num_slots, shape.num_words, shape.num_workers
        layout: list[tuple[str, np.dtype, tuple[int, ...]]] = [
            ("rows", np.dtype(np.int32), (slots, words)),
            ("done", np.dtype(np.int64), (slots,)),
            ("flags", np.dtype(np.uint8), (slots,)),
            ("cancelled", np.dtype(np.uint8), (slots,)),
            ("num_adjustments", np.dtype(np.int32), (slots,)),
            ("adjusted_ids", np.dtype(np.int32), (slots, MAX_ADJUSTMENTS)),
            ("adjusted_by", np.dtype(np.float32), (slots, MAX_ADJUSTMENTS)),
            ("drafts_wanted", np.dtype(np.int64), (slots,)),
            ("looked", np.dtype(np.int64), (slots,)),
            ("num_forced", np.dtype(np.int32), (slots, 1 + MAX_CHOICES)),
            ("forced_ids", np.dtype(np.int32), (slots, 1 + MAX_CHOICES, MAX_FORCED)),
            ("errors", np.dtype(np.uint8), (slots, ERROR_BYTES)),
            ("acknowledged", np.dtype(np.int64), (workers,)),
            ("current", np.dtype(np.int64), (workers,)),
            ("cached", np.dtype(np.int64), (workers, 2)),
        ]
        offsets, total = [], 0
        for _, dtype, dims in layout:
            offsets.append(total)
            total += -(-int(np.prod(dims)) * dtype.itemsize // 64) * 64
        memory = self._memory(total, shared)
        arrays = {
            name: np.frombuffer(memory, dtype, int(np.prod(dims)), offset).reshape(dims)
            for (name, dtype, dims), offset in zip(layout, offsets, strict=True)
        }
        self.rows = arrays["rows"]
        self.done = arrays["done"]
        """int64 [slots]: the number of the job that the row is for; 0 for none."""
        self.flags = arrays["flags"]
        self.cancelled = arrays["cancelled"]
        """uint8 [slots], written by the pool: jobs of this slot need not be done any more."""
        self.num_adjustments = arrays["num_adjustments"]
        self.adjusted_ids = arrays["adjusted_ids"]
        self.adjusted_by = arrays["adjusted_by"]
        self.drafts_wanted = arrays["drafts_wanted"]
        """int64 [slots], written by the pool: the job of this session whose drafts still matter; 0 for none."""
        self.looked = arrays["looked"]
        """int64 [slots]: the number of the job that forced tokens were looked for with."""
        self.num_forced = arrays["num_forced"]
        self.forced_ids = arrays["forced_ids"]
        self.errors = arrays["errors"]
        self.acknowledged = arrays["acknowledged"]
        """int64 [workers]: messages that a worker has finished."""
        self.current = arrays["current"]
        """int64 [workers]: 1 + the session that a worker is busy with; 0 for none. It outlives the worker."""
        self.cached = arrays["cached"]
        """int64 [workers, 2]: grammars that a worker keeps, and the bytes that they hold."""

    def _memory(self, num_bytes: int, shared: bool) -> mmap.mmap:
        """Pages that nobody touches cost nothing: neither slots of drafts nor those of sessions that never come."""
        if self.shape.path is not None:
            with open(self.shape.path, "r+b") as file:
                return mmap.mmap(file.fileno(), num_bytes)
        if not shared:
            return mmap.mmap(-1, num_bytes)
        self._file, path = _shared_file()
        self._file.truncate(num_bytes)
        self.shape = msgspec.structs.replace(self.shape, path=path)
        return mmap.mmap(self._file.fileno(), num_bytes)

    def close(self) -> None:
        """Gives the memory back once no view of it is left."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def set_error(self, slot: int, message: str) -> None:
        encoded = message.encode("utf-8", "replace")[:ERROR_BYTES]
        self.errors[slot] = 0
        self.errors[slot, : len(encoded)] = np.frombuffer(encoded, np.uint8)

    def error(self, slot: int) -> str:
        return self.errors[slot].tobytes().rstrip(b"\0").decode("utf-8", "replace")

    def adjustments(self, slot: int) -> tuple[np.ndarray, np.ndarray]:
        count = self.num_adjustments[slot]
        return self.adjusted_ids[slot, :count], self.adjusted_by[slot, :count]

    def set_forced(self, slot: int, number: int, ways: list[list[int]]) -> None:
        """The inverse of `forced`."""
        self.num_forced[slot] = 0
        for index, way in enumerate(ways):
            self.forced_ids[slot, index, : len(way)] = way
            self.num_forced[slot, index] = len(way)
        self.looked[slot] = number

    def forced(self, slot: int) -> list[list[int]]:
        """First what the grammar forces behind the tokens of the row, be it nothing; then, for each of a few tokens
        that may come, this token and what is forced behind it.
        """
        counts = self.num_forced[slot].tolist()
        return [self.forced_ids[slot, index, :count].tolist() for index, count in enumerate(counts)]


def _shared_file() -> tuple[IO[bytes], str]:
    """An empty file, and the path by which other processes find it until it is closed."""
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):  # a kernel that refuses it
            # Nameless memory: nothing is left behind, however this process ends.
            nameless = os.fdopen(os.memfd_create("manta-masks"), "r+b")
            path = f"/proc/{os.getpid()}/fd/{nameless.fileno()}"
            if os.path.exists(path):
                return nameless, path
            nameless.close()
    named = tempfile.NamedTemporaryFile(prefix="manta-masks-")  # noqa: SIM115
    return named, named.name
