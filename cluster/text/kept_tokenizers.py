"""Tokenizers that a process keeps for models that come again, because reading a large one takes a second."""

from __future__ import annotations

import os
import pathlib
import threading

from manta.cluster.text.tokenizer import Tokenizer
from manta.cluster.text.tokenizer_files import OTHER_TEMPLATES, resolve_folder
from manta.structured.lru import ByteLRU

MAX_BYTES = 512 << 20
"""Memory of all kept tokenizers, as `TOKEN_BYTES` estimates it. Those that models use now may be among them."""
TOKEN_BYTES = 500
"""Memory of a tokenizer for each of its tokens. Measured: 25 to 70 MiB for Qwen2.5's 151,665."""

Stamps = tuple[tuple[str, int, int, int, int], ...]


class KeptTokenizers:
    """Reads tokenizers, and returns the same object for files that have not changed. Any thread may call it."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._lock = threading.Lock()
        self._kept: ByteLRU[pathlib.Path, tuple[Stamps, Tokenizer]] = ByteLRU(max_bytes)

    def read(self, folder: str | pathlib.Path) -> Tokenizer:
        """Returns the tokenizer in a folder. Raises as `Tokenizer` does."""
        path = resolve_folder(folder)
        stamps = _stamps(path)
        with self._lock:
            kept = self._kept.get(path)
        if kept is not None and kept[0] == stamps:
            return kept[1]
        tokenizer = Tokenizer(path)
        with self._lock:
            self._kept.put(path, (stamps, tokenizer), tokenizer.vocab_size * TOKEN_BYTES)
        return tokenizer


def _stamps(folder: pathlib.Path) -> Stamps:
    """Returns the identities, sizes and change times of a folder's files: whoever changes one changes its stamp."""
    found = []
    for path in (folder, folder / OTHER_TEMPLATES):
        if path.is_dir():
            with os.scandir(path) as entries:
                statuses = [(entry.path, entry.stat()) for entry in entries if entry.is_file()]
            found += [(name, each.st_dev, each.st_ino, each.st_size, each.st_ctime_ns) for name, each in statuses]
    return tuple(sorted(found))
