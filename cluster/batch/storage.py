"""Where `/v1/files` and `/v1/batches` keep things: a folder, or an object store by fsspec.

`Storage` uses only what every store can do: objects are written as a whole, read, listed and removed, and none is ever
appended to. Every method may wait for a network; callers on an event loop use a thread.

What a crash or a second writer can do to an object depends on the store:

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

from cluster.batch import local_files
from cluster.config import ServeConfig

MAX_CLAIMS = 5
"""Tries to claim an object that others create and remove meanwhile."""


def with_storage(config: ServeConfig) -> ServeConfig:
    """`config` with an absolute `batch_storage`, since replicas run in folders of their own.

    Raises `ValueError` for one that cannot be used.
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
    """Writes an object, reads it and removes it. Raises `ValueError` where that fails."""
    storage, name = Storage(url), f"trial-{secrets.token_hex(8)}"
    try:
        storage.write(name, b"manta")
        found = storage.read(name)
        storage.remove(name)
    except Exception as error:  # stores name their failures differently
        raise ValueError(
            f"batch_storage {url} cannot be written to ({type(error).__name__}: {error}); name a folder or an object "
            "store that this user may write to"
        ) from error
    if found != b"manta":
        raise ValueError(f"batch_storage {url} does not give back what was written; name another folder or store")


class Storage:
    """What is below `url`: a folder, or a URL such as `s3://bucket/folder`. Paths are relative to it.

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
        """Whether `claim` is known to have one winner. Object stores may have it, but fsspec does not say which."""

    def write(self, path: str, content: bytes) -> None:
        """Creates or replaces an object."""
        if self.is_local:
            local_files.write(self._root, self._absolute(path), content)
        else:
            self._fs.pipe_file(self._absolute(path), content)

    def claim(self, path: str, content: bytes) -> bytes:
        """Creates an object unless there is one, and returns the content of the one that is there then.

        A caller that gets its own `content` back has won; contents of different claimants must therefore differ.
        """
        for _ in range(MAX_CLAIMS):
            try:
                self.create_exclusively(path, content)
                return content
            except Exception as error:  # stores name a refusal differently, and a lost answer may hide a success
                found = self.read(path)
                if found is not None:
                    return found
                if not isinstance(error, FileExistsError):
                    raise
        raise OSError(f"{path} was created and removed by others {MAX_CLAIMS} times")

    def create_exclusively(self, path: str, content: bytes) -> None:
        """Creates an object; raises what the store raises if there is one."""
        if self.is_local:
            local_files.create_exclusively(self._root, self._absolute(path), content)
        else:
            self._fs.pipe_file(self._absolute(path), content, mode="create")

    def read(self, path: str) -> bytes | None:
        """None if there is nothing."""
        try:
            return cast(bytes, self._fs.cat_file(self._absolute(path)))
        except FileNotFoundError:
            return None

    def read_all(self, folder: str, names: Iterable[str]) -> dict[str, bytes | Exception]:
        """The objects of a folder that are there, by name, read concurrently where the store can; an exception stands
        for one that cannot be read.
        """
        paths = {self._absolute(f"{folder}/{name}"): name for name in names}
        if not paths:
            return {}
        found = self._fs.cat(list(paths), on_error="return")
        return {paths[path]: each for path, each in found.items() if not isinstance(each, FileNotFoundError)}

    def create(self, path: str) -> BinaryIO:
        """A new object for large content: pieces are written one after another, and it is durable once closed. Others
        may see it before it is whole.
        """
        if self.is_local:
            return cast(BinaryIO, local_files.DurableFile(self._absolute(path)))
        return cast(BinaryIO, self._fs.open(self._absolute(path), "wb"))

    def open(self, path: str) -> BinaryIO:
        """Raises `FileNotFoundError`."""
        return cast(BinaryIO, self._fs.open(self._absolute(path), "rb"))

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of each object of a folder by its name, in the names' order; folders have 0."""
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
        """An object, or a folder with all that is in it; harmless if there is none."""
        if self.is_local:
            local_files.remove(self._absolute(path))
            return
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._absolute(path), recursive=True)

    def remove_stale_partials(self) -> None:
        """Removes what interrupted writes left behind; object stores keep nothing of them."""
        if self.is_local:
            local_files.remove_stale_partials(self._root)

    def _absolute(self, path: str) -> str:
        return f"{self._root}/{path}"
