"""Blocks of the prefix cache in files, so that an engine that starts finds what an earlier one has computed.

Each file holds a part of a prefix: the keys and values of one block in one group of layers on one rank, or a snapshot
of the recurrent states. Its name has the key of all that its bytes depend on, and the hash of the block's chain. So
engines of one node share what is equal. A file counts only with its checksum, which covers its name.

Each rank writes its own parts (`workers/torch_worker/block_keeper.py`). The driver asks which there are and never reads
one (`cluster/engine/kept_prefixes.py`). All bounds are those of the folder, whoever writes. Imports no framework.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import re
import time
from collections.abc import Sequence

import msgspec

from manta.structured.visible_logs import logger_of
from manta.workers.cache_folder import cache_entry, is_own, read_private, write_private
from manta.workers.kept_files import in_pages, remove, remove_oldest
from manta.workers.model_options import ModelOptions
from manta.workers.models.model_config import ModelError

logger = logger_of(__name__)

CHECKSUM_BYTES = 32
MOST_FILES = 1 << 16
"""Files of the store, so that listing them stays short. With small models it is full before its bytes are."""
_SLACK = 16
"""The part of the bound in bytes, as a divisor, that a process writes between two listings."""
_NAME = re.compile(r"[0-9a-f]{32}-\d+-[0-9a-f]{32}-\d+")


def check_prefix_store(options: ModelOptions, device: str) -> None:
    """Raises `ModelError` if a prefix store is configured and the device `cpu`, `cuda` or `tpu` can have none."""
    if options.prefix_store_bytes and device != "cpu":
        raise ModelError(
            f"prefix_store_bytes {options.prefix_store_bytes} is for CPUs, and the device is {device}; set it to 0, or "
            "set device to cpu"
        )


def store_key(content: str) -> str:
    """Returns the key of a text with all that the bytes of blocks depend on, apart from the rank."""
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


class StorePlace(msgspec.Struct, frozen=True):
    """The place of an engine's store, as a rank tells it to the driver."""

    folder: str
    key: str


class BlockPart(msgspec.Struct, frozen=True, array_like=True):
    """A part of a prefix, and its place in the memory of a rank."""

    block_hash: bytes
    group: int
    """Number of the group of layers; the number after the last one stands for the recurrent states."""
    place: int
    """Block or slot."""


class PrefixFiles:
    """The files of one key, as every process of the node sees them. A file that was not used for `keep_s` seconds does
    not count.
    """

    def __init__(self, place: StorePlace, keep_s: float) -> None:
        self._start = f"{place.folder}/{place.key}"
        self._keep_s = keep_s

    def path(self, rank: int, block_hash: bytes, group: int) -> str:
        return f"{self._start}-{rank}-{block_hash.hex()}-{group}"

    def has(self, rank: int, block_hash: bytes, group: int) -> bool:
        """Returns whether there is a file; only reading it shows whether its content counts."""
        try:
            status = os.stat(self.path(rank, block_hash, group), follow_symlinks=False)
        except OSError:
            return False
        return self.counts(status)

    def counts(self, status: os.stat_result) -> bool:
        return is_own(status) and time.time() - status.st_mtime < self._keep_s


class PrefixStore:
    """The parts of one rank. Not thread-safe but for `has`. All processes together have at most `max_bytes` in
    files, beyond which those that were used longest ago are removed; a process may exceed it by a sixteenth.

    Raises `UntrustedCache` or `OSError` if there is no folder for it.
    """

    def __init__(self, key: str, rank: int, max_bytes: int, keep_s: float) -> None:
        self._folder = cache_entry("prefixes")
        self.place = StorePlace(str(self._folder), key)
        self._files = PrefixFiles(self.place, keep_s)
        self._rank = rank
        self._max_bytes = max_bytes
        self._keep_s = keep_s
        self._unlisted = 0
        """Bytes written since the folder was last listed."""

    def refresh(self, block_hash: bytes, group: int) -> bool:
        """Returns whether there is a file that counts, and makes it the one that was used last."""
        if not self._files.has(self._rank, block_hash, group):
            return False
        with contextlib.suppress(OSError):  # somebody removes it
            os.utime(self._files.path(self._rank, block_hash, group), follow_symlinks=False)
        return True

    def read(self, block_hash: bytes, group: int, num_bytes: int) -> memoryview | None:
        """Returns the bytes of a part, which are `num_bytes`. None if there are none, or if they are not what was
        written, so that their file is removed.
        """
        path = pathlib.Path(self._files.path(self._rank, block_hash, group))
        found = read_private(path)
        if found is None:
            return None
        content, status = memoryview(found[0]), found[1]
        if not self._files.counts(status):
            return None
        part = content[CHECKSUM_BYTES:]
        if len(part) != num_bytes or content[:CHECKSUM_BYTES] != _checksum(path.name, part):
            logger.warning("%s is damaged and is removed", path)
            remove(path)
            return None
        self.refresh(block_hash, group)
        return part

    def write(self, block_hash: bytes, group: int, part: memoryview) -> None:
        """Adds a part. Raises `OSError` if the file cannot be written."""
        path = pathlib.Path(self._files.path(self._rank, block_hash, group))
        if (size := _cost(len(part))) > self._max_bytes:
            return
        write_private(path, _checksum(path.name, part), part)
        self._unlisted += size
        if self._unlisted * _SLACK > self._max_bytes:
            self.make_room()

    def drop(self, hashes: Sequence[bytes], num_groups: int) -> None:
        """Removes all parts of the blocks with these hashes. `num_groups` counts the recurrent states, too."""
        for block_hash in hashes:
            for group in range(num_groups):
                remove(self._files.path(self._rank, block_hash, group))

    def make_room(self) -> None:
        """Removes files of any key: those that are too old, then those that were used longest ago, until the store is
        a sixteenth below its bounds.
        """
        self._unlisted = 0
        most = self._max_bytes * (_SLACK - 1) // _SLACK
        remove_oldest(self._folder, _NAME, most, MOST_FILES, self._keep_s)


def _cost(num_bytes: int) -> int:
    """Returns the bytes that a file takes, in whole pages."""
    return in_pages(num_bytes + CHECKSUM_BYTES)


def _checksum(name: str, part: memoryview) -> bytes:
    """Returns the checksum of a part under a name, so that a file under another name does not count."""
    digest = hashlib.blake2b(name.encode(), digest_size=CHECKSUM_BYTES)
    digest.update(part)
    return digest.digest()
