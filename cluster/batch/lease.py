"""The lease on one batch, which says which runner works on it.

`EPOCH` objects in the batch's lease folder are the leases, numbered from 1; the one with the greatest number counts. A
runner takes a batch by claiming the next epoch after the last lease has expired. It renews the lease by rewriting its
own object, so no object has two writers. A holder has lost its lease as soon as the next epoch exists, and checks for
it before every save. This fences off a runner that was thought dead and comes back.

This guarantees:

- Where `Storage.claim` has one winner (a folder, S3, GCS, Azure), each epoch has exactly one holder.
- Elsewhere two overlapping claims may both seem to win. Each claimant waits `SETTLE_S` and reads the lease back, so two
  holders remain only if a write takes longer than that; the next check ends one of them.
- No store lets a save depend on the lease atomically. A runner that stops between a check and a save for longer than
  the lease lasts still saves. Therefore no save can undo the work of a successor (`records.py`). Parts have names of
  their own, the outcome of a batch is claimed and never rewritten, and only counts may go back.

Expiry compares the clocks of two machines. A clock that is wrong, or is set, by more than a lease costs repeated work
and no results. It delays nobody for longer than a lease (`Holder`).
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time

import msgspec

from manta.cluster.storage.storage import Storage

LEASE_S = 15.0
"""Seconds from a renewal until others may take the batch. A batch stands still for that long after its runner was
killed.
"""
RENEW_S = 5.0
"""Seconds between two renewals, so that two may fail before the lease ends."""
FORGET_S = 4 * LEASE_S
"""Seconds after its last look for which a runner remembers the lease of another one."""
SETTLE_S = 1.0
"""Seconds after which a claim is read back where claims may overlap; longer than a small write takes."""


class LeaseLost(Exception):
    """Another runner has the batch, or may have it."""


class _Held(msgspec.Struct):
    holder: str
    expires_at: float
    """Unix time in seconds; 0 if the holder gave the lease back."""


_decoder = msgspec.json.Decoder(_Held)


class Holder:
    """A runner: the name by which leases know it, and the leases of others as it has seen them.

    A lease that stays as it is for `LEASE_S` on a clock that is never set has no holder, even if it names a later time:
    the clock of its holder, or of this machine, was wrong or has been set since. Any thread may use it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[_Held, float, float]] = {}
        """Each lease by its path, with the times of the first and of the last look at it as it is."""

    def left_s(self, path: str, held: _Held) -> float:
        """Returns the seconds until the lease of another runner at `path` ends."""
        now = time.monotonic()
        with self._lock:
            self._seen = {each: seen for each, seen in self._seen.items() if now - seen[2] < FORGET_S}
            known, first, _ = self._seen.get(path, (held, now, now))
            if known != held:
                first = now
            self._seen[path] = held, first, now
        return min(held.expires_at - time.time(), first + LEASE_S - now)


def new_holder() -> Holder:
    """Returns a runner with a name that no other has. It begins with host and process id, for people who read the
    storage.
    """
    return Holder(f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(8)}")


class Lease:
    """A lease that the runner named `holder` has. All methods may be called in any thread."""

    def __init__(self, storage: Storage, folder: str, holder: str, epoch: int, expires_at: float) -> None:
        self._storage = storage
        self._folder = folder
        self._holder = holder
        self.epoch = epoch
        self._expires_at = expires_at
        self._is_released = False

    def check(self) -> None:
        """Raises `LeaseLost` unless the lease holds now. Call it before every save."""
        if self._is_released:
            raise LeaseLost(f"lease {self._folder}/{self.epoch} was given back")
        if self._storage.has(_path(self._folder, self.epoch + 1)):
            raise LeaseLost(f"lease {self._folder}/{self.epoch} was taken over")
        if self._expires_at <= time.time():
            self._write()

    def renew(self) -> None:
        """Renews the lease. Raises `LeaseLost`."""
        self.check()
        self._write()

    def release(self) -> None:
        """Lets another runner take the batch at once."""
        self._is_released = True
        self._storage.write(_path(self._folder, self.epoch), msgspec.json.encode(_Held(self._holder, 0.0)))

    def _write(self) -> None:
        expires_at = time.time() + LEASE_S
        self._storage.write(_path(self._folder, self.epoch), msgspec.json.encode(_Held(self._holder, expires_at)))
        self._expires_at = expires_at


def acquire(storage: Storage, folder: str, holder: Holder) -> Lease | float:
    """Returns the lease, or the seconds until the present lease ends. `LEASE_S` bounds them."""
    epoch = max((int(name) for name in storage.sizes(folder) if name.isdecimal()), default=0)
    while storage.has(_path(folder, epoch + 1)):  # the listing was out of date
        epoch += 1
    held = _decoded(storage.read(_path(folder, epoch)))
    if held is not None and held.holder == holder.name:
        lease = Lease(storage, folder, holder.name, epoch, held.expires_at)
        lease.renew()
        return lease
    left_s = 0.0 if held is None else holder.left_s(_path(folder, epoch), held)
    if left_s > 0.0:
        return left_s
    mine = _Held(holder.name, time.time() + LEASE_S)
    found = _decoded(storage.claim(_path(folder, epoch + 1), msgspec.json.encode(mine)))
    if not storage.has_atomic_claims:
        time.sleep(SETTLE_S)
        found = _decoded(storage.read(_path(folder, epoch + 1)))
    if found is None or found.holder != holder.name:
        return LEASE_S
    return Lease(storage, folder, holder.name, epoch + 1, mine.expires_at)


def _path(folder: str, epoch: int) -> str:
    return f"{folder}/{epoch:08}"


def _decoded(content: bytes | None) -> _Held | None:
    """Returns the lease; None if there is none, or a torn one. The holder of a torn lease stops at its next check, and
    nothing is lost.
    """
    try:
        return None if content is None else _decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
