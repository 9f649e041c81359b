"""The storage of `/v1/files`, `/v1/batches` and `/v1/responses`: a folder, or an object store through fsspec.

`Storage` uses only operations that every store has: it writes objects as a whole, reads, lists and removes them, and
never appends. Every method may wait for a network; callers on an event loop use a thread.

A crash or a second writer affects an object as the store determines:

| | folder | S3, GCS, Azure | other fsspec stores |
| --- | --- | --- | --- |
| `write` is seen whole or not at all | yes, and it survives a power failure | yes | as the store does it |
| `claim` has one winner | yes (hard link) | yes (conditional put) | unless two claims overlap |

Readers therefore expect that any object may be torn, and the lease (`cluster/batch/lease.py`) keeps claims apart.
"""

from __future__ import annotations

import contextlib
import pathlib
import secrets
from collections.abc import Iterable
from typing import BinaryIO, cast

import msgspec
from fsspec.core import url_to_fs

from manta.cluster.config import ServeConfig
from manta.cluster.storage import local_files

MAX_CLAIMS = 5
"""Tries to claim an object that others create and remove meanwhile."""


def with_storage(config: ServeConfig) -> ServeConfig:
    """Returns `config` with an absolute `batch_storage`, because replicas run in folders of their own.

    Raises `ValueError` if the storage cannot be used.
    """
    url = config.batch_storage
    if url is None:
        return config
    if Storage(url).is_of_one_process:
        raise ValueError(f"batch_storage {url} is of one process, and several use it; name a folder or an object store")
    if "://" not in url:
        url = str(pathlib.Path(url).expanduser().resolve())
    return msgspec.structs.replace(config, batch_storage=url)


def check_storage(url: str) -> None:
    """Writes, reads and removes an object. Raises `ValueError` if that fails."""
    storage, name = Storage(url), f"trial-{secrets.token_hex(8)}"
    try:
        storage.write(name, b"manta")
        found = storage.read(name)
        storage.remove(name)
    except Exception as error:  # stores raise different types
        raise ValueError(
            f"batch_storage {url} cannot be written to ({type(error).__name__}: {error}); name a folder or an object "
            "store that this user may write to"
        ) from error
    if found != b"manta":
        raise ValueError(f"batch_storage {url} does not give back what was written; name another folder or store")


class Storage:
    """The objects below `url`: a folder, or a URL such as `s3://bucket/folder`. Paths are relative to it.

    Raises `ValueError` if the URL's protocol is unknown or its package is not installed.
    """

    def __init__(self, url: str) -> None:
        try:
            self._fs, root = url_to_fs(str(pathlib.Path(url).expanduser()) if "://" not in url else url)
        except (ValueError, ImportError) as error:
            raise ValueError(f"batch_storage {url}: {error}") from error
        self._fs.use_listings_cache = False
        self._root = root.rstrip("/")
        self.is_local = "file" in self._fs.protocol
        self.is_of_one_process = "memory" in self._fs.protocol
        self.has_atomic_claims = self.is_local or self.is_of_one_process
        """Whether `claim` is known to have one winner. Some object stores guarantee it too, but fsspec does not say
        which.
        """

    def write(self, path: str, content: bytes) -> None:
        """Creates or replaces an object."""
        if self.is_local:
            local_files.write(self._root, self._absolute(path), content)
        else:
            self._fs.pipe_file(self._absolute(path), content)

    def claim(self, path: str, content: bytes) -> bytes:
        """Creates an object unless it exists, and returns the content of the existing one.

        A caller that gets its own `content` back has won, so contents of different claimants must differ.
        """
        for _ in range(MAX_CLAIMS):
            try:
                self.create_exclusively(path, content)
                return content
            except Exception as error:  # a refusal has many types, and a lost answer may hide a success
                found = self.read(path)
                if found is not None:
                    return found
                if not isinstance(error, FileExistsError):
                    raise
        raise OSError(f"{path} was created and removed by others {MAX_CLAIMS} times")

    def create_exclusively(self, path: str, content: bytes) -> None:
        """Creates an object; raises what the store raises if it exists."""
        if self.is_local:
            local_files.create_exclusively(self._root, self._absolute(path), content)
        else:
            self._fs.pipe_file(self._absolute(path), content, mode="create")

    def read(self, path: str) -> bytes | None:
        """Returns the content of an object; None if it does not exist."""
        try:
            return cast(bytes, self._fs.cat_file(self._absolute(path)))
        except FileNotFoundError:
            return None

    def read_all(self, folder: str, names: Iterable[str]) -> dict[str, bytes | Exception]:
        """Returns the existing objects of a folder by name, or the exception for an object that cannot be read. Reads
        them concurrently where the store can.
        """
        paths = {self._absolute(f"{folder}/{name}"): name for name in names}
        if not paths:
            return {}
        found = self._fs.cat(list(paths), on_error="return")
        return {paths[path]: each for path, each in found.items() if not isinstance(each, FileNotFoundError)}

    def create(self, path: str) -> BinaryIO:
        """Returns a new object for large content. It is written in pieces, and durable once closed. Others may see it
        before it is complete.
        """
        if self.is_local:
            return cast(BinaryIO, local_files.DurableFile(self._absolute(path)))
        return cast(BinaryIO, self._fs.open(self._absolute(path), "wb"))

    def open(self, path: str) -> BinaryIO:
        """Opens an object for reading. Raises `FileNotFoundError`."""
        return cast(BinaryIO, self._fs.open(self._absolute(path), "rb"))

    def sizes(self, folder: str) -> dict[str, int]:
        """Returns the size in bytes of each object of a folder, in the order of names; 0 for folders."""
        if self.is_local:
            return dict(sorted(local_files.sizes(self._absolute(folder)).items()))
        try:
            self._fs.invalidate_cache(self._absolute(folder))
            found = self._fs.ls(self._absolute(folder), detail=True)
        except FileNotFoundError:
            return {}
        return dict(sorted((each["name"].rpartition("/")[2], each["size"] or 0) for each in found))

    def has(self, path: str) -> bool:
        return bool(self._fs.exists(self._absolute(path)))

    def remove(self, path: str) -> None:
        """Removes an object, or a folder with its contents; harmless if it does not exist."""
        if self.is_local:
            local_files.remove(self._absolute(path))
            return
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._absolute(path), recursive=True)

    def remove_stale_partials(self) -> None:
        """Removes the leftovers of interrupted writes; object stores have none."""
        if self.is_local:
            local_files.remove_stale_partials(self._root)

    def _absolute(self, path: str) -> str:
        return f"{self._root}/{path}"
