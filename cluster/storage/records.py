"""Batches of `/v1/batches` as they are stored, in the shapes that clients see; their files are in `file_records.py`.

Ingresses and runners share no lock. Ingresses write files, batches as they were created, and marks to cancel. The
runner that holds a batch's lease writes the batch's progress. A client's (`OWNER`'s) objects are in a folder of its
own, where ids of other clients are not found.

    files/OWNER/ID                  content
    files/OWNER/ID.json             a `FileObject`; written last, and without it the file does not exist
    open/ID.OWNER                   the `Batch` as it was created; exists until the batch has ended
    open/ID.OWNER.cancel            claimed: the time at which a client cancelled it
    batches/OWNER/ID/asked          a copy of the `Batch` as it was created
    batches/OWNER/ID/state          the `Batch` in progress; rewritten, and only its counts may go back
    batches/OWNER/ID/finalizing     claimed: the way it ends (`Finalizing`)
    batches/OWNER/ID/result         claimed: the `Batch` as it ended and its files (`BatchOutcome`)
    batches/OWNER/ID/ended          claimed: the `Batch` as it ended, after its files were published
    batches/OWNER/ID/parts/         results, until they become files
    batches/OWNER/ID/lease/         the leases of its runners (`lease.py`)
    reserved/OWNER/ID.BYTES         room that an upload has reserved (`quota.py`)

A claimed object is created once and never rewritten, so a runner that comes back late cannot undo what another one has
finished. A batch's status is that of the last of these objects that exists. An object may be torn by a
power failure, or by a store that writes in pieces. One that cannot be decoded counts as the one before it, and affects
no other batch or file.
"""

from __future__ import annotations

import re
import secrets
import time
from typing import Any, BinaryIO, Literal, NamedTuple, get_args

import msgspec

from manta.cluster.protocol.batches_api import Batch, BatchError, BatchErrors, FileObject
from manta.cluster.serve_limits import BatchLimits
from manta.cluster.storage.file_records import FileRecords, age_s, claim, decoded, new_id
from manta.cluster.storage.quota import Quota
from manta.cluster.storage.storage import Storage

Ending = Literal["completed", "failed", "expired", "cancelled"]
ENDED: tuple[str, ...] = get_args(Ending)
CANCEL = ".cancel"
"""Suffix of a mark to cancel."""
BATCH_ID = re.compile(r"batch_[0-9a-f]{30}")
"""Form of a batch's id. Ids sort by the time when they were made."""
_OPEN_MARK = re.compile(r"(batch_[0-9a-f]{30})\.([^.]+)")
CANCEL_MARK = re.compile(_OPEN_MARK.pattern + re.escape(CANCEL))
"""Form of the name of a mark to cancel."""


class Finalizing(msgspec.Struct):
    """The decision how a batch ends; after a restart the runner continues with it."""

    ending: Ending
    at: int


class BatchOutcome(msgspec.Struct):
    """A batch that has ended, with everything that publishing needs, so that any runner can publish it."""

    batch: Batch
    files: list[FileObject]


class BatchProgress(NamedTuple):
    """The state of a batch in the storage."""

    batch: Batch
    """The batch, with the status that follows from its objects; marks to cancel are ignored."""
    ending: Ending | None
    """The way it ends, once that is decided."""
    outcome: BatchOutcome | None


class OpenBatch(NamedTuple):
    """A batch that has not ended."""

    owner: str
    id: str
    is_cancelled: bool


class InputMissing(Exception):
    """The input file of a batch does not exist; nothing else raises this."""


class Records:
    """The batches of a storage, and its `files`. Every method may wait for a network."""

    def __init__(self, storage: Storage, limits: BatchLimits) -> None:
        self.storage = storage
        self.limits = limits
        self.quota = Quota(storage, limits)
        self.files = FileRecords(storage, limits, self.quota)

    # ---- batches, for clients ------------------------------------------------------------------------------------

    def create_batch(self, owner: str, **fields: Any) -> Batch:
        """Creates a batch. Raises `ServingError` if the client may create none now."""
        batch = Batch(id=f"batch_{new_id()}", created_at=int(time.time()), **fields)
        with self.quota.new_batch(owner):
            self.open_batch(owner, batch)
            try:
                self.keep_asked(owner, batch)
            except Exception:
                self.close_batch(owner, batch.id)
                raise
        return batch

    def batch(self, owner: str, batch_id: str) -> Batch | None:
        """Returns a batch as its client sees it; None if it does not exist."""
        if not BATCH_ID.fullmatch(batch_id):
            return None
        asked = self.storage.read(f"open/{batch_id}.{owner}{CANCEL}")  # first: it goes at the batch's end
        progress = self.progress(owner, batch_id)
        if progress is None:
            return None
        batch = progress.batch
        if asked is not None and batch.status not in ENDED:
            batch.status, batch.cancelling_at = "cancelling", _seconds(asked)
        return batch

    def batch_ids(self, owner: str) -> list[str]:
        """Returns the ids of an owner's batches, latest first."""
        return sorted(filter(BATCH_ID.fullmatch, self.storage.sizes(f"batches/{owner}")), reverse=True)

    def cancel(self, owner: str, batch_id: str) -> None:
        """Marks a batch to be cancelled. Only the first of several calls counts."""
        mark = f"open/{batch_id}.{owner}"
        self.storage.claim(f"{mark}{CANCEL}", str(int(time.time())).encode())
        if not self.storage.has(mark):  # it has ended meanwhile
            self.storage.remove(f"{mark}{CANCEL}")

    # ---- batches, for runners ------------------------------------------------------------------------------------

    def open_batches(self) -> list[OpenBatch]:
        """Returns the batches that have not ended, oldest first. An out-of-date listing may contain ended ones, and
        miss some.
        """
        names = self.storage.sizes("open")
        marks = filter(None, map(_OPEN_MARK.fullmatch, names))
        return [OpenBatch(mark[2], mark[1], f"{mark[0]}{CANCEL}" in names) for mark in marks]

    def progress(self, owner: str, batch_id: str) -> BatchProgress | None:
        """Returns the state of a batch; None if it does not exist. Raises what the storage raises; objects that cannot
        be decoded raise nothing.
        """
        names = ("asked", "state", "finalizing", "result", "ended")
        found = self.storage.read_all(_folder(owner, batch_id), names)
        for content in found.values():
            if isinstance(content, Exception):
                raise content
        outcome = decoded(found.get("result"), BatchOutcome)
        finalizing = decoded(found.get("finalizing"), Finalizing)
        ending = None if finalizing is None else finalizing.ending
        ended = None
        if "ended" in found:
            ended = decoded(found["ended"], Batch) or (None if outcome is None else outcome.batch)
        if ended is not None:
            return BatchProgress(ended, ending, outcome)
        batch = decoded(found.get("state"), Batch) or decoded(found.get("asked"), Batch)
        if batch is None:
            mark = self.storage.read(f"open/{batch_id}.{owner}")
            batch = decoded(mark, Batch)
            if batch is None and not found and not mark:
                return None
            batch = batch or unreadable_batch(batch_id)
        if "finalizing" in found:
            batch.status = "finalizing"
            batch.finalizing_at = None if finalizing is None else finalizing.at
        elif "state" in found and batch.status == "validating":
            batch.status = "in_progress"
        return BatchProgress(batch, ending, outcome)

    def input(self, owner: str, file_id: str) -> BinaryIO:
        """Opens a batch's input file. Raises `InputMissing`."""
        try:
            return self.files.content(owner, file_id)
        except FileNotFoundError as error:
            raise InputMissing(f"file {file_id} is not there") from error

    def open_batch(self, owner: str, batch: Batch) -> None:
        """Makes a batch exist, so that runners find it."""
        claim(self.storage, f"open/{batch.id}.{owner}", batch)

    def keep_asked(self, owner: str, batch: Batch) -> None:
        """Stores a copy of the batch as it was created, which outlives its end and lists the batch; harmless if it is
        stored.
        """
        claim(self.storage, f"{_folder(owner, batch.id)}/asked", batch)

    def save(self, owner: str, batch: Batch) -> None:
        """Stores the state of a batch in progress."""
        self.storage.write(f"{_folder(owner, batch.id)}/state", msgspec.json.encode(batch))

    def decide(self, owner: str, batch_id: str, ending: Ending) -> Finalizing:
        """Decides how a batch ends; returns the decision that was made first."""
        return claim(self.storage, f"{_folder(owner, batch_id)}/finalizing", Finalizing(ending, int(time.time())))

    def settle(self, owner: str, outcome: BatchOutcome) -> BatchOutcome:
        """Decides the outcome of a batch; returns the outcome that was decided first, and removes this one's files if
        it is another.
        """
        settled = claim(self.storage, f"{_folder(owner, outcome.batch.id)}/result", outcome)
        self._remove_others(owner, outcome, settled.batch)
        return settled

    def end(self, owner: str, outcome: BatchOutcome) -> None:
        """Publishes the outcome of a batch: its files, then its end. After an interruption it may be called again."""
        folder = _folder(owner, outcome.batch.id)
        if not self.storage.has(f"{folder}/ended"):  # after that the owner may have deleted the files
            for file in outcome.files:
                self.files.publish(owner, file)
        ended = claim(self.storage, f"{folder}/ended", outcome.batch)
        self._remove_others(owner, outcome, ended)
        self.close_batch(owner, outcome.batch.id)

    def _remove_others(self, owner: str, outcome: BatchOutcome, batch: Batch) -> None:
        """Removes the files of `outcome` that do not belong to the batch as it ended."""
        for file in outcome.files:
            if file.id not in (batch.output_file_id, batch.error_file_id):
                self.files.remove(owner, file.id)

    def close_batch(self, owner: str, batch_id: str) -> None:
        """Removes the objects that only an open batch needs."""
        self.storage.remove(self.parts(owner, batch_id))
        self.storage.remove(f"open/{batch_id}.{owner}{CANCEL}")
        self.storage.remove(f"open/{batch_id}.{owner}")

    def parts(self, owner: str, batch_id: str) -> str:
        """Returns the folder of a batch's results."""
        return f"{_folder(owner, batch_id)}/parts"

    def leases(self, owner: str, batch_id: str) -> str:
        """Returns the folder of a batch's leases."""
        return f"{_folder(owner, batch_id)}/lease"

    def remove_batch(self, owner: str, batch_id: str) -> None:
        self.storage.remove(_folder(owner, batch_id))


def unreadable_batch(batch_id: str) -> Batch:
    """Returns a failed batch in place of one that cannot be decoded."""
    created_at = int(time.time() - age_s(batch_id))
    message = "what the server had stored of this batch cannot be read; create the batch again"
    return Batch(
        id=batch_id,
        endpoint="",
        input_file_id="",
        completion_window="",
        created_at=created_at,
        expires_at=created_at,
        errors=BatchErrors([BatchError("unreadable_batch", message)]),
    )


def new_attempt() -> str:
    """Returns a name for one attempt to write a batch's files."""
    return secrets.token_hex(4)


def _folder(owner: str, batch_id: str) -> str:
    return f"batches/{owner}/{batch_id}"


def _seconds(mark: bytes) -> int | None:
    """Returns the time in a mark to cancel; None if it cannot be decoded."""
    return int(mark) if mark.isdigit() else None
