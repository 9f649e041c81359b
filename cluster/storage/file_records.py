"""Files of `/v1/files` as they are stored: the inputs of batches and their results.

    files/OWNER/ID                  content
    files/OWNER/ID.json             a `FileObject`; written last, and without it the file does not exist

A client's (`OWNER`'s) files are in a folder of its own, where ids of other clients are not found. `records.py` says
where everything else of a storage is, and which objects are claimed.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
import time
from typing import BinaryIO, Literal, TypeVar

import msgspec

from manta.cluster.protocol.batches_api import FileObject
from manta.cluster.serve_limits import BatchLimits
from manta.cluster.storage.quota import Quota
from manta.cluster.storage.storage import Storage
from manta.structured.visible_logs import logger_of

logger = logger_of(__name__)

FILE_ID = re.compile(r"file-[0-9a-f]{30}(-[0-9a-f]{8})?(-output|-errors)?")
"""Form of a file's id. An input's id is a time and a random number; an output's holds the ids of its batch and of the
attempt that wrote it.
"""

Object = TypeVar("Object")


class Upload:
    """A file that is being written, and exists after `commit`. `commit` and `discard` may be called in two threads."""

    def __init__(
        self,
        records: FileRecords,
        owner: str,
        file_id: str,
        purpose: Literal["batch", "batch_output"],
        reservation: str | None = None,
    ) -> None:
        self.id = file_id
        self.num_bytes = 0
        self._records = records
        self._owner = owner
        self._path = f"files/{owner}/{file_id}"
        self._purpose = purpose
        self._ending = threading.Lock()
        self._is_discarded = False
        self._reservation = reservation
        """The object that reserves room for the file; None for results, which are counted where they are produced."""
        self._file: BinaryIO = records.storage.create(self._path)

    def write(self, content: bytes) -> None:
        self._file.write(content)
        self.num_bytes += len(content)

    def finish(self, filename: str, keep_s: float | None = None) -> FileObject:
        """Completes the content; `Records.publish` makes it a file. The file is kept for `keep_s` seconds, at most
        `batches.keep_s`.
        """
        self._file.close()
        if not self._records.storage.has(self._path):
            raise OSError(f"{self.id} was removed before it was complete")
        created = int(time.time())
        limit = self._records.limits.keep_s
        return FileObject(
            id=self.id,
            bytes=self.num_bytes,
            created_at=created,
            expires_at=created + int(min(keep_s or limit, limit)),
            filename=filename,
            purpose=self._purpose,
        )

    def commit(self, filename: str, keep_s: float | None = None) -> FileObject:
        """Calls `finish` and publishes the file. Raises `ValueError` if the upload was discarded."""
        with self._ending:
            if self._is_discarded:
                raise ValueError(f"{self.id} was discarded")
            file = self.finish(filename, keep_s)
            self._records.publish(self._owner, file)
            self._release()
            return file

    def discard(self) -> None:
        """Removes the file, even one that `commit` published before it failed."""
        with self._ending:
            self._is_discarded = True
            with contextlib.suppress(OSError):  # unwritten content is not needed
                self._file.close()
            self._records.remove(self._owner, self.id)
            self._release()

    def _release(self) -> None:
        if self._reservation is not None:
            with contextlib.suppress(Exception):  # the runner removes one that stays behind
                self._records.storage.remove(self._reservation)


class FileRecords:
    """The files of a storage. Every method may wait for a network."""

    def __init__(self, storage: Storage, limits: BatchLimits, quota: Quota) -> None:
        self.storage = storage
        self.limits = limits
        self._quota = quota

    def begin_upload(self, owner: str, max_bytes: int) -> Upload:
        """Begins a file of at most `max_bytes`. Raises `ServingError` if the client has no room for it."""
        file_id = f"file-{new_id()}"
        reservation = self._quota.reserve(owner, file_id, max_bytes)
        try:
            return Upload(self, owner, file_id, "batch", reservation)
        except BaseException:
            self.storage.remove(reservation)
            raise

    def begin_output(self, owner: str, batch_id: str, attempt: str, kind: Literal["output", "errors"]) -> Upload:
        """Begins a file of a batch's results. `attempt` is the writer's `new_attempt`, so that no two writers write the
        same file.
        """
        return Upload(self, owner, f"file-{batch_id.removeprefix('batch_')}-{attempt}-{kind}", "batch_output")

    def publish(self, owner: str, file: FileObject) -> None:
        """Makes written content a file of its owner; harmless if it already is."""
        claim(self.storage, f"files/{owner}/{file.id}.json", file)

    def find(self, owner: str, file_id: str) -> FileObject | None:
        """Returns a file; None if it does not exist or has expired."""
        found = self.stored(owner, file_id) if FILE_ID.fullmatch(file_id) else None
        return None if found is None or found.expires_at <= time.time() else found

    def stored(self, owner: str, file_id: str) -> FileObject | None:
        """Returns a file, even if it has expired; None if it does not exist."""
        return decoded(self.storage.read(f"files/{owner}/{file_id}.json"), FileObject)

    def all_of(self, owner: str) -> list[FileObject]:
        """Returns an owner's readable files, latest first."""
        folder, now = f"files/{owner}", time.time()
        names = [name for name in self.storage.sizes(folder) if name.endswith(".json")]
        stored = (decoded(content, FileObject) for content in self.storage.read_all(folder, names).values())
        found = [file for file in stored if file is not None and file.expires_at > now]
        return sorted(found, key=lambda file: (file.created_at, file.id), reverse=True)

    def content(self, owner: str, file_id: str) -> BinaryIO:
        """Opens a file's content. Raises `FileNotFoundError`."""
        return self.storage.open(f"files/{owner}/{file_id}")

    def remove(self, owner: str, file_id: str) -> None:
        self.storage.remove(f"files/{owner}/{file_id}.json")
        self.storage.remove(f"files/{owner}/{file_id}")


def age_s(name: str) -> float:
    """Returns the seconds since a file or batch got its id; 0 for a name that holds no id."""
    digits = re.search(r"[0-9a-f]{30}", name)
    return 0.0 if digits is None else time.time() - int(digits[0][:14], 16) / 1e6


def new_id() -> str:
    """Returns 30 hexadecimal digits; later ids are greater."""
    return f"{time.time_ns() // 1000:014x}{secrets.token_hex(8)}"


def claim(storage: Storage, path: str, value: Object) -> Object:
    """Stores `value` unless the object exists, and returns the stored one. Replaces one that cannot be decoded."""
    content = msgspec.json.encode(value)
    found = decoded(storage.claim(path, content), type(value))
    if found is not None:
        return found
    logger.warning("%s cannot be decoded and is replaced", path)
    storage.write(path, content)
    return value


def decoded(content: bytes | Exception | None, kind: type[Object]) -> Object | None:
    """Returns the decoded object; None if it does not exist or cannot be decoded."""
    if content is None or isinstance(content, Exception):
        return None
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
