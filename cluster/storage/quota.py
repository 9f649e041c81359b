"""Bounds what one client may store: files, batches and results together (`BatchLimits`).

An upload reserves room for its whole content before the first byte is written:

    reserved/OWNER/FILE_ID.NUM_BYTES        an empty object; removed when the upload is committed or discarded

Requests of one owner reserve one after another in each process. Two processes may reserve at the same moment; each then
sees both reservations, and both may be refused.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

from manta.cluster.errors import refuse
from manta.cluster.serve_limits import BatchLimits
from manta.cluster.storage.storage import Storage

RESERVATION = re.compile(r"(file-[0-9a-f]+)\.(\d+)")
"""Form of a reservation's name."""


class Stored(NamedTuple):
    """The amount that a storage holds for one client."""

    num_files: int
    num_bytes: int
    """Bytes of files, of room that uploads have reserved, and of the results of batches that have not ended."""


class Quota:
    """The bounds of every client of one storage. All methods may wait for the storage."""

    def __init__(self, storage: Storage, limits: BatchLimits) -> None:
        self._storage = storage
        self._limits = limits
        self._locks: dict[str, threading.Lock] = {}
        """Locks by owner. Owners are API keys, so there are few."""

    def stored(self, owner: str) -> Stored:
        """Returns what `owner` has stored now."""
        reserved = {match[1]: int(match[2]) for match in self._reservations(owner)}
        sizes = self._storage.sizes(f"files/{owner}")
        contents = {name: size for name, size in sizes.items() if name.removesuffix(".json") not in reserved}
        num_bytes = sum(contents.values()) + sum(reserved.values())
        for mark in self._open_marks(owner):
            batch_id = mark.removesuffix(f".{owner}")
            num_bytes += sum(self._storage.sizes(f"batches/{owner}/{batch_id}/parts").values())
        num_files = sum(not name.endswith(".json") for name in contents) + len(reserved)
        return Stored(num_files, num_bytes)

    def is_full(self, owner: str) -> bool:
        """Returns whether `owner` has stored more bytes than it may."""
        return self.stored(owner).num_bytes > self._limits.max_stored_bytes

    def reserve(self, owner: str, file_id: str, num_bytes: int) -> str:
        """Reserves room for a file of at most `num_bytes`, until the returned object is removed. May refuse."""
        with self._lock(owner):
            path = f"reserved/{owner}/{file_id}.{num_bytes}"
            self._storage.write(path, b"")
            try:
                self._check(self.stored(owner), num_bytes)
            except BaseException:
                self._storage.remove(path)
                raise
            return path

    @contextlib.contextmanager
    def new_batch(self, owner: str) -> Iterator[None]:
        """Lets the body of the `with` create a batch. Raises `ServingError` if `owner` may create none now."""
        with self._lock(owner):
            self._check_batch(owner)
            yield

    def _check_batch(self, owner: str) -> None:
        limits = self._limits
        num_open, num_kept = len(self._open_marks(owner)), len(self._storage.sizes(f"batches/{owner}"))
        if num_open >= limits.max_open_batches:
            remedy = "wait for some, or cancel them, or raise batches.max_open_batches"
            _refuse(num_open, "of your batches have not ended", limits.max_open_batches, remedy)
        if num_kept >= limits.max_batches:
            unit = "of your batches are kept, ended ones included,"
            remedy = f"each is removed {limits.keep_s:g} s after it was created (batches.keep_s)"
            _refuse(num_kept, unit, limits.max_batches, f"raise batches.max_batches, or wait: {remedy}")
        if (num_bytes := self.stored(owner).num_bytes) >= limits.max_stored_bytes:
            _refuse_bytes(num_bytes, limits, "and results have no room")

    def _lock(self, owner: str) -> threading.Lock:
        """Returns the lock that is held while an owner's room is checked and taken."""
        return self._locks.setdefault(owner, threading.Lock())

    def _check(self, stored: Stored, num_bytes: int) -> None:
        """Raises `ServingError` if `stored`, which includes a new file of `num_bytes`, exceeds a bound."""
        limits = self._limits
        if stored.num_files > limits.max_files:
            remedy = "delete some, or raise batches.max_files"
            _refuse(stored.num_files - 1, "files are kept for you", limits.max_files, remedy)
        if stored.num_bytes > limits.max_stored_bytes:
            asked = f"and this upload may have {num_bytes} more"
            _refuse_bytes(stored.num_bytes - num_bytes, limits, asked)

    def _open_marks(self, owner: str) -> list[str]:
        return [name for name in self._storage.sizes("open") if name.endswith(f".{owner}")]

    def _reservations(self, owner: str) -> list[re.Match[str]]:
        names = self._storage.sizes(f"reserved/{owner}")
        return list(filter(None, map(RESERVATION.fullmatch, names)))


def _refuse_bytes(num_bytes: int, limits: BatchLimits, asked: str) -> NoReturn:
    unit, remedy = (
        f"bytes of files and results are kept for you {asked}",
        "delete some, or raise batches.max_stored_bytes",
    )
    _refuse(num_bytes, unit, limits.max_stored_bytes, remedy)


def _refuse(value: int, unit: str, bound: int, remedy: str) -> NoReturn:
    refuse("quota", "", value, bound, remedy, unit=unit)
