"""Copies of adapters in the cache of a node, by the digests of their values.

Whoever trains an adapter replaces the files in its folder while engines use the old values. A copy keeps these until
nothing needs them any more, so that an engine which starts later finds them. It is a folder as PEFT saves it, or with a
GGUF file. A copy counts only if its values have its digest, however it was torn.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
import time

from manta.workers.adapters.adapter_files import read_adapter
from manta.workers.adapters.gguf_adapter import SUFFIX
from manta.workers.adapters.low_rank_adapter import read_bounded
from manta.workers.adapters.peft_config import CONFIG, WEIGHTS
from manta.workers.cache_folder import cache_entry, write_private
from manta.workers.checkpoints.stored_files import COPY_AGAIN, MOST_JSON_BYTES, read_text
from manta.workers.models.model_config import ModelError

_FILE = f"adapter{SUFFIX}"
LEFT_S = 7 * 86_400.0
"""Age in seconds from which on the copies of a server that has gone are removed."""
_FORM = re.compile(r"[0-9a-f]{32}")
"""Form of a digest, and of the name of a server's folder."""


class AdapterCopies:
    """The copies of one server, which engines of a node share. `name` is the server's: 32 hexadecimal digits. Copies of
    servers that have not used theirs for `LEFT_S` are removed.

    Raises `OSError` and `UntrustedCache` if there is no cache.
    """

    def __init__(self, name: str, max_bytes: int) -> None:
        assert _FORM.fullmatch(name)
        self._root = cache_entry("adapters")
        self._folder = self._root / name
        self._max_bytes = max_bytes
        self.use()
        self._remove_left()

    def use(self) -> None:
        """Notes that the server lives. Call it at least once in `LEFT_S`."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        os.utime(self._folder)

    def find(self, digest: str) -> pathlib.Path | None:
        """Returns the folder or the GGUF file of a copy; None if there is none. Its values are still to be compared
        with the digest.
        """
        folder = self._folder / digest
        if (folder / WEIGHTS).is_file():
            return folder
        return folder / _FILE if (folder / _FILE).is_file() else None

    def keep(self, source: pathlib.Path, digest: str) -> None:
        """Copies an adapter whose values have this digest, unless there is a copy, which then counts as made now: other
        engines do not know yet that it is needed. Raises `ModelError` if the files have other values by now, and
        `OSError` if there is no room.
        """
        with contextlib.suppress(FileNotFoundError):
            os.utime(self._folder / digest)
        if self.has(digest):
            return
        if source.suffix == SUFFIX:
            content = {_FILE: read_bounded(source, self._max_bytes)}
        else:
            config = bytearray(read_text(source, CONFIG, MOST_JSON_BYTES).encode())
            content = {CONFIG: config, WEIGHTS: read_bounded(source / WEIGHTS, self._max_bytes)}
        self.use()
        folder = self._folder / digest
        folder.mkdir(mode=0o700, exist_ok=True)
        for name, data in content.items():
            write_private(folder / name, memoryview(data))
        if not self.has(digest):
            self.drop(digest)
            raise ModelError(f"{source} changed while it was read; {COPY_AGAIN}")

    def has(self, digest: str) -> bool:
        """Returns whether there is a whole copy with these values."""
        folder = self.find(digest)
        if folder is None:
            return False
        try:
            return read_adapter(str(folder), self._max_bytes).digest == digest
        except ModelError:
            return False

    def drop(self, digest: str) -> None:
        """Removes a copy; harmless if there is none."""
        shutil.rmtree(self._folder / digest, ignore_errors=True)

    def digests(self, older_than_s: float) -> list[str]:
        """Returns the digests of the copies that were made longer ago than so many seconds."""
        return [each.name for each in _folders(self._folder, older_than_s)]

    def _remove_left(self) -> None:
        for folder in _folders(self._root, LEFT_S):
            shutil.rmtree(folder, ignore_errors=True)  # another engine may remove it too


def _folders(parent: pathlib.Path, older_than_s: float) -> list[pathlib.Path]:
    """Returns the folders of ours in `parent` that have not changed for so many seconds."""
    found = []
    for folder in parent.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if _FORM.fullmatch(folder.name) and time.time() - folder.stat().st_mtime > older_than_s:
                found.append(folder)
    return found
