"""Shared memory for masks: grammar workers write it, the engine's pool watches it, and the sampler reads it.

A session owns one *mask slot*, and one more for each of its drafts. Its worker writes the slot's row and then the
number of the job. A reader that finds the job's number may read the row, so a mask needs no message and no copy.
Workers in other processes map the same memory. `MaskBatch` carries one step's masks to the ranks.
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
"""Maximum number of logits that a session adjusts for one token."""

ERROR_BYTES = 480
"""Maximum length of a session's error, in bytes of UTF-8; longer text is cut."""

MAX_FORCED = 16
"""Maximum number of forced tokens that a worker reports after one token."""

MAX_CHOICES = 8
"""A worker looks for forced tokens behind each allowed token if at most this many are allowed."""

FINISHED, FAILED, REFUSED, DEAD_END = 1, 2, 4, 8
"""Flags of a mask slot:

- FINISHED: only the end may follow.
- FAILED: the session failed.
- REFUSED: the grammar refuses a draft before this row.
- DEAD_END: no continuation satisfies the constraint.
"""

NO_MASK, LATE = -1, -2
"""Values in `MaskBatch.slots` that stand for no row:

- NO_MASK: the sample point has no constraint.
- LATE: the sample point sits this step out, because its mask is late or the grammar refuses a draft before it.
"""


EVERY_SESSION = -1
"""Value in `MaskBuffer.current`: the worker may be writing for any of its sessions."""


def row_words(vocab_size: int) -> int:
    """Number of int32 words in a packed row."""
    return -(-vocab_size // 32)


def allowed_of(row: np.ndarray, token_ids: Iterable[int]) -> list[int]:
    """The tokens among `token_ids` that a packed row of int32 allows."""
    words = row.view(np.uint32)
    return [token_id for token_id in token_ids if int(words[token_id // 32]) >> token_id % 32 & 1]


def allows_a_token(row: np.ndarray) -> bool:
    """Whether a packed row of int32 allows a token."""
    return bool(np.bitwise_or.reduce(row))  # several times faster than `any`, which makes booleans first


class MaskBatch(NamedTuple):
    """The masks of one step. A sampler in this process reads the shared rows; pickling for another process copies them
    (`packed`).
    """

    step_id: int
    slots: list[int]
    """Index in `rows` for each sample point, or `NO_MASK` or `LATE`. A sequence may have several sample points."""
    rows: np.ndarray
    """int32 [slots, words]: bit `t % 32` of word `t // 32` is 1 if token `t` is allowed."""
    adjustments: dict[int, tuple[np.ndarray, np.ndarray]]
    """Additions to logits, by sample point: token ids int32 [n], and the values to add, float32 [n]."""

    def packed(self) -> MaskBatch:
        """A copy that holds only the rows in use, each once: int32 [used rows, words]."""
        used, slots = self.used_rows()
        return self._replace(slots=slots, rows=self.rows[used])

    def used_rows(self) -> tuple[list[int], list[int]]:
        """Returns the rows in use, each once and ascending, and `slots` with places among these instead of rows."""
        used = sorted({slot for slot in self.slots if slot >= 0})
        place = {slot: row for row, slot in enumerate(used)}
        return used, [place.get(slot, slot) for slot in self.slots]

    def __reduce__(self) -> tuple[type[MaskBatch], tuple[object, ...]]:
        return MaskBatch, tuple(self.packed())


class BufferShape(msgspec.Struct, frozen=True, array_like=True):
    """Sizes of a `MaskBuffer`, and the path by which other processes map it."""

    num_slots: int
    num_words: int
    num_workers: int
    path: str | None = None


class MaskBuffer:
    """Arrays over one block of memory, with one entry for each mask slot or worker. Either the pool or the workers
    write an array, never both.

    A worker writes `done` last. Each store is a separate Python call, which keeps the order on every processor.
    """

    def __init__(self, shape: BufferShape, shared: bool = False) -> None:
        self.shape = shape
        self._file: IO[bytes] | None = None
        slots, words, workers = shape.num_slots, shape.num_words, shape.num_workers
        layout: list[tuple[str, np.dtype, tuple[int, ...]]] = [
            ("rows", np.dtype(np.int32), (slots, words)),
            ("done", np.dtype(np.int64), (slots,)),
            ("flags", np.dtype(np.uint8), (slots,)),
            ("is_free", np.dtype(np.uint8), (slots,)),
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
        """int32 [slots, words], packed like `MaskBatch.rows`."""
        self.done = arrays["done"]
        """int64 [slots]: number of the job that filled the row; 0 for none."""
        self.flags = arrays["flags"]
        """uint8 [slots]: `FINISHED`, `FAILED`, `REFUSED` or `DEAD_END`; 0 if the row holds a mask."""
        self.is_free = arrays["is_free"]
        """uint8 [slots]: 1 if the row and all later ones allow every token; set for sessions without a grammar."""
        self.cancelled = arrays["cancelled"]
        """uint8 [slots], written by the pool: 1 if the slot's jobs are obsolete."""
        self.num_adjustments = arrays["num_adjustments"]
        self.adjusted_ids = arrays["adjusted_ids"]
        self.adjusted_by = arrays["adjusted_by"]
        self.drafts_wanted = arrays["drafts_wanted"]
        """int64 [slots], written by the pool: number of the job whose drafts are still wanted; 0 for none."""
        self.forced_done = arrays["forced_done"]
        """int64 [slots]: number of the last job that stored `forced_ids`."""
        self.num_forced = arrays["num_forced"]
        self.forced_ids = arrays["forced_ids"]
        self.errors = arrays["errors"]
        self.acknowledged = arrays["acknowledged"]
        """int64 [workers]: number of the last message that the worker has finished."""
        self.current = arrays["current"]
        """int64 [workers]: 1 + id of the session that the worker is busy with; 0 for none; `EVERY_SESSION` while it
        writes the rows of several. It stays readable after the worker's death.
        """
        self.cached = arrays["cached"]
        """int64 [workers, 2]: number of cached grammars, and their bytes."""

    def _memory(self, num_bytes: int, shared: bool) -> mmap.mmap:
        """The system allocates a page at its first use, so unused slots cost nothing."""
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
        """Closes the file. The system frees the memory once its last array is gone."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def set_error(self, slot: int, message: str) -> None:
        """Stores why the slot's session failed, cut to `ERROR_BYTES`."""
        encoded = message.encode("utf-8", "replace")[:ERROR_BYTES]
        self.errors[slot] = 0
        self.errors[slot, : len(encoded)] = np.frombuffer(encoded, np.uint8)

    def error(self, slot: int) -> str:
        """The message that `set_error` stored."""
        return self.errors[slot].tobytes().rstrip(b"\0").decode("utf-8", "replace")

    def allows_one(self, slot: int) -> bool:
        """Whether the row leaves a single token."""
        return int(np.bitwise_count(self.rows[slot].view(np.uint32)).sum()) == 1

    def allows_any(self, slot: int, token_ids: Iterable[int]) -> bool:
        """Whether the row leaves one of the tokens."""
        return bool(allowed_of(self.rows[slot], token_ids))

    def adjustments(self, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """Views of the token ids, int32 [n], and of the values to add to their logits, float32 [n]."""
        count = self.num_adjustments[slot]
        return self.adjusted_ids[slot, :count], self.adjusted_by[slot, :count]

    def set_forced(self, slot: int, number: int, continuations: list[list[int]]) -> None:
        """Stores the result of `forced(slot)` for job `number`."""
        self.num_forced[slot] = 0
        for index, token_ids in enumerate(continuations):
            self.forced_ids[slot, index, : len(token_ids)] = token_ids
            self.num_forced[slot, index] = len(token_ids)
        self.forced_done[slot] = number

    def forced(self, slot: int) -> list[list[int]]:
        """Continuations of the text, as token ids. The first one holds the tokens that the grammar forces next, perhaps
        none. Each other one begins with one of up to `MAX_CHOICES` allowed tokens, followed by what it forces.
        """
        counts = self.num_forced[slot].tolist()
        return [self.forced_ids[slot, index, :count].tolist() for index, count in enumerate(counts)]


class MaskSlots:
    """Free slots of a `MaskBuffer`: the first `num_for_sessions` are for wanted rows, the others for drafts."""

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
        """Number of slots for wanted rows that are in use."""
        return self._num_for_sessions - len(self._for_sessions)

    def take(self) -> int | None:
        """Returns a slot for a wanted row, or None."""
        return self._for_sessions.pop() if self._for_sessions else None

    def take_for_drafts(self, count: int) -> list[int]:
        """Returns up to `count` slots for drafts."""
        return [self._for_drafts.pop() for _ in range(min(count, len(self._for_drafts)))]

    def free(self, slots: Iterable[int]) -> None:
        for slot in slots:
            (self._for_sessions if slot < self._num_for_sessions else self._for_drafts).append(slot)


def forced_after(gained: list[int], continuations: list[list[int]]) -> list[int]:
    """The tokens that are forced after `gained`: the rest of the continuation that begins with `gained`."""
    for continuation in continuations if gained else continuations[:1]:  # the first one is forced now
        if continuation[: len(gained)] == gained and len(continuation) > len(gained):
            return continuation[len(gained) :]
    return []


def _shared_file() -> tuple[IO[bytes], str]:
    """Returns an empty file and the path by which other processes open it, until it is closed."""
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):  # the kernel may refuse it
            # Anonymous memory: no file is left behind, however this process ends.
            nameless = os.fdopen(os.memfd_create("manta-masks"), "r+b")
            path = f"/proc/{os.getpid()}/fd/{nameless.fileno()}"
            if os.path.exists(path):
                return nameless, path
            nameless.close()
    named = tempfile.NamedTemporaryFile(prefix="manta-masks-")  # noqa: SIM115
    return named, named.name
