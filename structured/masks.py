"""The memory of masks: one block that grammar workers write, the engine's pool watches and the sampler reads.

A session owns a *mask slot*, and one more for each draft that it has at a time. Its worker writes the slot's row, then
the number of the job that asked for the row. A reader that sees the number may read the row: no message and no copy is
needed. Workers in other processes map the same memory. A `MaskBatch` carries a step's masks on to the ranks.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Iterable
from typing import IO, NamedTuple

import msgspec
import numpy as np

MAX_ADJUSTMENTS = 256
"""Most logits that a session may adjust for one token, besides masking."""

ERROR_BYTES = 480
"""Most bytes of a failed session's error, in UTF-8; the rest is cut off."""

MAX_FORCED = 16
"""Most forced tokens that a worker reports after one token."""

MAX_CHOICES = 8
"""If at most this many tokens may come next, a worker also reports what is forced after each of them."""

FINISHED, FAILED, REFUSED, DEAD_END = 1, 2, 4, 8
"""Flags of a mask slot: only the end may follow; its session failed; the grammar refuses a draft before this row; the
text cannot be completed.
"""

NO_MASK, LATE = -1, -2
"""In `MaskBatch.slots`. NO_MASK: the sample point has no constraint. LATE: it is not drawn in this step, because its
mask is late or because the grammar refuses a draft before it.
"""


def row_words(vocab_size: int) -> int:
    """int32 words of a packed row."""
    return -(-vocab_size // 32)


class MaskBatch(NamedTuple):
    """The masks of one step. A sampler in this process reads the rows where the grammar workers wrote them; for another
    process pickle takes `packed()`.
    """

    step_id: int
    slots: list[int]
    """For each sample point its index in `rows`, or `NO_MASK`, or `LATE`; a sequence may have several points."""
    rows: np.ndarray
    """int32 [slots, words]: token `t` is bit `t % 32` of word `t // 32`, 1 allows."""
    adjustments: dict[int, tuple[np.ndarray, np.ndarray]]
    """Sample point to token ids int32 [n] and what is added to their logits, float32 [n]."""

    def packed(self) -> MaskBatch:
        """The same masks with only the rows that are used, each once: a copy, int32 [used rows, words]."""
        used = sorted({slot for slot in self.slots if slot >= 0})
        place = {slot: row for row, slot in enumerate(used)}
        return self._replace(slots=[place.get(slot, slot) for slot in self.slots], rows=self.rows[used])

    def __reduce__(self) -> tuple[type[MaskBatch], tuple[object, ...]]:
        return MaskBatch, tuple(self.packed())


class BufferShape(msgspec.Struct, frozen=True, array_like=True):
    """Sizes of a `MaskBuffer`, and the path by which another process maps it."""

    num_slots: int
    num_words: int
    num_workers: int
    path: str | None = None


class MaskBuffer:
    """Arrays over one block of memory, with an entry for each mask slot or each worker. Only one side writes each
    array: the pool or the workers.

    A worker writes `done` last. Each store is a Python call of its own, which keeps the order on every processor.
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
            ("forced_done", np.dtype(np.int64), (slots,)),
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
        """int32 [slots, words], packed as `MaskBatch.rows`."""
        self.done = arrays["done"]
        """int64 [slots]: number of the job that the row was filled for; 0 for none."""
        self.flags = arrays["flags"]
        """uint8 [slots]: `FINISHED`, `FAILED`, `REFUSED` or `DEAD_END`; 0 if the row holds a mask."""
        self.cancelled = arrays["cancelled"]
        """uint8 [slots], written by the pool: 1 if jobs of this slot need not be done any more."""
        self.num_adjustments = arrays["num_adjustments"]
        self.adjusted_ids = arrays["adjusted_ids"]
        self.adjusted_by = arrays["adjusted_by"]
        self.drafts_wanted = arrays["drafts_wanted"]
        """int64 [slots], written by the pool: number of the session's job whose drafts still matter; 0 for none."""
        self.forced_done = arrays["forced_done"]
        """int64 [slots]: number of the last job that looked for forced tokens; they are in `forced_ids`."""
        self.num_forced = arrays["num_forced"]
        self.forced_ids = arrays["forced_ids"]
        self.errors = arrays["errors"]
        self.acknowledged = arrays["acknowledged"]
        """int64 [workers]: number of the last message that a worker has finished."""
        self.current = arrays["current"]
        """int64 [workers]: 1 + the id of the session that a worker is busy with; 0 for none. It stays readable after
        the worker has died.
        """
        self.cached = arrays["cached"]
        """int64 [workers, 2]: number of grammars that a worker keeps, and their bytes."""

    def _memory(self, num_bytes: int, shared: bool) -> mmap.mmap:
        """Pages that are never touched take no memory, so unused slots of drafts and of sessions cost nothing."""
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
        """Closes the file; the system frees the memory once no array of it is left."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def set_error(self, slot: int, message: str) -> None:
        """Stores why the slot's session failed; of a long message the beginning."""
        encoded = message.encode("utf-8", "replace")[:ERROR_BYTES]
        self.errors[slot] = 0
        self.errors[slot, : len(encoded)] = np.frombuffer(encoded, np.uint8)

    def error(self, slot: int) -> str:
        """What `set_error` stored last."""
        return self.errors[slot].tobytes().rstrip(b"\0").decode("utf-8", "replace")

    def allows_one(self, slot: int) -> bool:
        """Whether the row leaves a single token."""
        return int(np.bitwise_count(self.rows[slot].view(np.uint32)).sum()) == 1

    def adjustments(self, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids int32 [n] and what is added to their logits, float32 [n]; views."""
        count = self.num_adjustments[slot]
        return self.adjusted_ids[slot, :count], self.adjusted_by[slot, :count]

    def set_forced(self, slot: int, number: int, continuations: list[list[int]]) -> None:
        """Stores what `forced(slot)` returns, for job `number`."""
        self.num_forced[slot] = 0
        for index, token_ids in enumerate(continuations):
            self.forced_ids[slot, index, : len(token_ids)] = token_ids
            self.num_forced[slot, index] = len(token_ids)
        self.forced_done[slot] = number

    def forced(self, slot: int) -> list[list[int]]:
        """The continuations of the text, as token ids: first the tokens that the grammar forces next, perhaps none.
        Then, for up to `MAX_CHOICES` tokens that may come next, that token and what is forced after it.
        """
        counts = self.num_forced[slot].tolist()
        return [self.forced_ids[slot, index, :count].tolist() for index, count in enumerate(counts)]


class MaskSlots:
    """Which slots of a `MaskBuffer` are free: the first `num_for_sessions` hold wanted rows, the others drafts'."""

    def __init__(self, num_for_sessions: int, num_for_drafts: int) -> None:
        self.num_slots = num_for_sessions + num_for_drafts
        self._num_for_sessions = num_for_sessions
        self._for_sessions = list(range(num_for_sessions - 1, -1, -1))
        self._for_drafts = list(range(self.num_slots - 1, num_for_sessions - 1, -1))

    @property
    def num_in_use(self) -> int:
        return self.num_slots - len(self._for_sessions) - len(self._for_drafts)

    @property
    def num_sessions_in_use(self) -> int:
        """Slots for wanted rows that are in use."""
        return self._num_for_sessions - len(self._for_sessions)

    def take(self) -> int | None:
        """A slot for a wanted row; None if none is free."""
        return self._for_sessions.pop() if self._for_sessions else None

    def take_for_drafts(self, count: int) -> list[int]:
        """Slots for drafts' rows: as many as are free, at most `count`."""
        return [self._for_drafts.pop() for _ in range(min(count, len(self._for_drafts)))]

    def free(self, slots: Iterable[int]) -> None:
        for slot in slots:
            (self._for_sessions if slot < self._num_for_sessions else self._for_drafts).append(slot)


def forced_after(gained: list[int], continuations: list[list[int]]) -> list[int]:
    """What is forced after the tokens `gained`, of what `MaskBuffer.forced` returned: the rest of the continuation that
    begins with them.
    """
    for continuation in continuations if gained else continuations[:1]:  # all but the first begin with a choice
        if continuation[: len(gained)] == gained and len(continuation) > len(gained):
            return continuation[len(gained) :]
    return []


def _shared_file() -> tuple[IO[bytes], str]:
    """An empty file, and the path by which other processes find it until it is closed."""
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):  # a kernel that refuses it
            # Memory without a name in the file system: no file stays, however this process ends.
            nameless = os.fdopen(os.memfd_create("manta-masks"), "r+b")
            path = f"/proc/{os.getpid()}/fd/{nameless.fileno()}"
            if os.path.exists(path):
                return nameless, path
            nameless.close()
    named = tempfile.NamedTemporaryFile(prefix="manta-masks-")  # noqa: SIM115
    return named, named.name
