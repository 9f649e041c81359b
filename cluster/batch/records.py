"""Files and batches of `/v1/files` and `/v1/batches` as they are stored, in OpenAI's shapes.

Each object has one writer, so that ingresses and the runner need no lock: ingresses write files, batches as they were
asked for, and marks to cancel; the runner writes how a batch goes, and its results. What is a client's (`OWNER`) lies
in a folder of its own, and nobody else's ids are found there.

    files/OWNER/ID             content
    files/OWNER/ID.json        a `FileObject`; written last, and without it the file is not there
    batches/OWNER/ID/asked     a `Batch` as it was created
    batches/OWNER/ID/state     the same as the runner left it
    batches/OWNER/ID/parts/    results, until they become files
    open/ID.OWNER              it has not ended
    open/ID.OWNER.cancel       somebody wants it to end

Source: https://platform.openai.com/docs/api-reference/files and .../batch.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator
from typing import Any, BinaryIO, Literal, NamedTuple

import msgspec

from cluster.batch.lines import BatchError
from cluster.batch.storage import Storage
from cluster.config import BatchLimits

ENDED = ("completed", "failed", "expired", "cancelled")
_FILE_ID = re.compile(r"file-[0-9a-f]{30}(-output|-errors)?")
_BATCH_ID = re.compile(r"batch_[0-9a-f]{30}")
_CANCEL = ".cancel"
_EXPIRED_UPLOAD_S = 86_400.0
"""An upload that was not completed for so long never will be."""


class FileObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"


class RequestCounts(msgspec.Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchErrors(msgspec.Struct):
    data: list[BatchError]
    object: Literal["list"] = "list"


class Batch(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ] = "validating"
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: BatchErrors | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None


class OpenBatch(NamedTuple):
    """A batch that has not ended."""

    owner: str
    id: str
    is_cancelled: bool


class TooMuch(ValueError):
    """A client has as much as it may have; the message names the bound and the remedy."""


class Upload:
    """A file that is being written; it is there after `commit`."""

    def __init__(self, records: Records, owner: str, file_id: str, purpose: Literal["batch", "batch_output"]) -> None:
        self.id = file_id
        self.num_bytes = 0
        self._records = records
        self._path = f"files/{owner}/{file_id}"
        self._purpose = purpose
        self._file: BinaryIO = records.storage.create(self._path)

    def write(self, content: bytes) -> None:
        self._file.write(content)
        self.num_bytes += len(content)

    def commit(self, filename: str, keep_s: float | None = None) -> FileObject:
        """`keep_s` is how long it is kept, at most as long as `batches.keep_s`."""
        self._file.close()
        created = int(time.time())
        limit = self._records.limits.keep_s
        file = FileObject(
            id=self.id,
            bytes=self.num_bytes,
            created_at=created,
            expires_at=created + int(min(keep_s or limit, limit)),
            filename=filename,
            purpose=self._purpose,
        )
        self._records.storage.write(f"{self._path}.json", msgspec.json.encode(file))
        return file

    def discard(self) -> None:
        self._file.close()
        self._records.storage.remove(self._path)


class Records:
    """All that a storage holds. Everything may wait for a network."""

    def __init__(self, storage: Storage, limits: BatchLimits) -> None:
        self.storage = storage
        self.limits = limits

    # ---- files ---------------------------------------------------------------------------------------------------

    def begin_upload(self, owner: str) -> Upload:
        """Raises `TooMuch` if the client has as many files or bytes as it may have."""
        sizes = self.storage.sizes(f"files/{owner}")
        num_files, num_bytes = sum(not name.endswith(".json") for name in sizes), sum(sizes.values())
        for have, what, limit, option in (
            (num_files, "files", self.limits.max_files, "max_files"),
            (num_bytes, "bytes of files", self.limits.max_stored_bytes, "max_stored_bytes"),
        ):
            if have >= limit:
                raise TooMuch(
                    f"{have} {what} are kept for you and the limit is {limit} (batches.{option}); delete some"
                )
        return Upload(self, owner, f"file-{_new_id()}", "batch")

    def begin_output(self, owner: str, file_id: str) -> Upload:
        """Of a batch. What an earlier try wrote is written again."""
        return Upload(self, owner, file_id, "batch_output")

    def file(self, owner: str, file_id: str) -> FileObject | None:
        """None if there is no such file, or if it has expired."""
        if not _FILE_ID.fullmatch(file_id):
            return None
        found = self._load(f"files/{owner}/{file_id}.json", FileObject)
        return None if found is None or found.expires_at <= time.time() else found

    def files(self, owner: str) -> list[FileObject]:
        """The latest first."""
        folder, now = f"files/{owner}", time.time()
        names = [name for name in self.storage.sizes(folder) if name.endswith(".json")]
        decoded = (msgspec.json.decode(data, type=FileObject) for data in self.storage.read_all(folder, names))
        found = [file for file in decoded if file.expires_at > now]
        return sorted(found, key=lambda file: (file.created_at, file.id), reverse=True)

    def content(self, owner: str, file_id: str) -> BinaryIO:
        """Raises `FileNotFoundError`."""
        return self.storage.open(f"files/{owner}/{file_id}")

    def remove_file(self, owner: str, file_id: str) -> None:
        self.storage.remove(f"files/{owner}/{file_id}.json")
        self.storage.remove(f"files/{owner}/{file_id}")

    # ---- batches -------------------------------------------------------------------------------------------------

    def create_batch(self, owner: str, **fields: Any) -> Batch:
        """Raises `TooMuch` if as many of the client's have not ended as may be."""
        num_open = sum(name.endswith(f".{owner}") for name in self.storage.sizes("open"))
        if num_open >= self.limits.max_open_batches:
            raise TooMuch(
                f"{num_open} of your batches have not ended and the limit is {self.limits.max_open_batches} "
                "(batches.max_open_batches); wait for some, or cancel them"
            )
        batch = Batch(id=f"batch_{_new_id()}", created_at=int(time.time()), **fields)
        self.storage.write(f"{_folder(owner, batch.id)}/asked", msgspec.json.encode(batch))
        self.storage.write(f"open/{batch.id}.{owner}", b"")
        return batch

    def batch(self, owner: str, batch_id: str) -> Batch | None:
        """As its client sees it. None if there is no such batch."""
        batch = self.state(owner, batch_id)
        if batch is not None and batch.status not in ENDED:
            asked = self.storage.read(f"open/{batch_id}.{owner}{_CANCEL}")
            if asked is not None:
                batch.status, batch.cancelling_at = "cancelling", int(asked)
        return batch

    def state(self, owner: str, batch_id: str) -> Batch | None:
        """As its runner left it."""
        if not _BATCH_ID.fullmatch(batch_id):
            return None
        folder = _folder(owner, batch_id)
        found: Batch | None = self._load(f"{folder}/state", Batch) or self._load(f"{folder}/asked", Batch)
        return found

    def batch_ids(self, owner: str) -> list[str]:
        """The latest first."""
        return sorted(self.storage.sizes(f"batches/{owner}"), reverse=True)

    def cancel(self, owner: str, batch_id: str) -> None:
        self.storage.write(f"open/{batch_id}.{owner}{_CANCEL}", str(int(time.time())).encode())

    # ---- for the runner ------------------------------------------------------------------------------------------

    def open_batches(self) -> list[OpenBatch]:
        """Those that have not ended, the oldest first."""
        names = list(self.storage.sizes("open"))
        cancelled = {name.removesuffix(_CANCEL) for name in names if name.endswith(_CANCEL)}
        found = ((name, *name.split(".")) for name in names if name.count(".") == 1)
        return [OpenBatch(owner, batch_id, name in cancelled) for name, batch_id, owner in found]

    def save(self, owner: str, batch: Batch) -> None:
        self.storage.write(f"{_folder(owner, batch.id)}/state", msgspec.json.encode(batch))

    def close_batch(self, owner: str, batch_id: str) -> None:
        """It has ended, and its state says so: what it needed until then goes."""
        self.storage.remove(self.parts(owner, batch_id))
        self.storage.remove(f"open/{batch_id}.{owner}{_CANCEL}")
        self.storage.remove(f"open/{batch_id}.{owner}")

    def parts(self, owner: str, batch_id: str) -> str:
        """The folder of a batch's results."""
        return f"{_folder(owner, batch_id)}/parts"

    def remove_expired(self) -> None:
        """Files past their time, uploads that were never completed, and batches that ended long ago."""
        for owner in self.storage.sizes("files"):
            for name in self._expired_files(owner):
                self.remove_file(owner, name)
        still_open = {each.id for each in self.open_batches()}
        for owner in self.storage.sizes("batches"):
            for batch_id in self.batch_ids(owner):
                if _age_s(batch_id) > self.limits.keep_s and batch_id not in still_open:
                    self.storage.remove(_folder(owner, batch_id))

    def _expired_files(self, owner: str) -> Iterator[str]:
        for name, size in self.storage.sizes(f"files/{owner}").items():
            if name.endswith(".json") and size:
                found = self._load(f"files/{owner}/{name}", FileObject)
                if found is not None and found.expires_at <= time.time():
                    yield found.id
            elif _age_s(name) > _EXPIRED_UPLOAD_S and not self.storage.has(f"files/{owner}/{name}.json"):
                yield name

    def _load(self, path: str, kind: Any) -> Any:
        data = self.storage.read(path)
        return None if data is None else msgspec.json.decode(data, type=kind)


def _folder(owner: str, batch_id: str) -> str:
    return f"batches/{owner}/{batch_id}"


def _new_id() -> str:
    """30 hexadecimal digits; later ones are greater."""
    return f"{time.time_ns() // 1000:014x}{secrets.token_hex(8)}"


def _age_s(name: str) -> float:
    """Of a file or a batch, by its id."""
    digits = re.search(r"[0-9a-f]{30}", name)
    return 0.0 if digits is None else time.time() - int(digits[0][:14], 16) / 1e6
