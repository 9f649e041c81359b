"""Where `/v1/files` and `/v1/batches` keep things: a folder, or an object store by fsspec.

Only what every store can do is used: whole objects are written, read, listed and removed, and none is ever appended to.
Every method may wait for a network; callers on an event loop use a thread.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterable
from typing import BinaryIO, cast

import msgspec
from fsspec.core import url_to_fs

from cluster.config import ServeConfig


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

    def write(self, path: str, content: bytes) -> None:
        """Whole or not at all, whatever ends the process."""
        if not self.is_local:
            self._fs.pipe_file(self._absolute(path), content)
            return
        partial = pathlib.Path(self._made(f"{path}.partial"))
        partial.write_bytes(content)
        partial.replace(self._absolute(path))

    def read(self, path: str) -> bytes | None:
        """None if there is nothing."""
        try:
            return cast(bytes, self._fs.cat_file(self._absolute(path)))
        except FileNotFoundError:
            return None

    def read_all(self, folder: str, names: Iterable[str]) -> list[bytes]:
        """The objects of a folder that are there, all at once."""
        try:
            found = self._fs.cat([self._absolute(f"{folder}/{name}") for name in names], on_error="omit")
        except FileNotFoundError:  # there is none of them
            return []
        return list(found.values())

    def create(self, path: str) -> BinaryIO:
        """For what is large: pieces are written one after another. Others may see it before it is whole."""
        return cast(BinaryIO, self._fs.open(self._made(path), "wb"))

    def open(self, path: str) -> BinaryIO:
        """Raises `FileNotFoundError`."""
        return cast(BinaryIO, self._fs.open(self._absolute(path), "rb"))

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of each object of a folder by its name, in the names' order; folders have 0."""
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
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._absolute(path), recursive=True)

    def _absolute(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _made(self, path: str) -> str:
        """The absolute path, whose folder is there; on this machine nobody else may enter it."""
        absolute = self._absolute(path)
        if self.is_local:
            previous = os.umask(0o077)
            try:
                os.makedirs(os.path.dirname(absolute), exist_ok=True)
            finally:
                os.umask(previous)
        return absolute
