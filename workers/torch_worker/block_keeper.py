"""Moves parts of prefixes between a rank's memory and its prefix store.

The step's thread only copies a part, which takes as long as reading it once. A thread of low priority computes its
checksum and writes it. Made by the worker; called between steps.
"""

from __future__ import annotations

import atexit
import functools
import pathlib
import queue
import threading
import weakref
from collections.abc import Callable, Sequence

import torch

from manta.structured.low_priority import lower_priority
from manta.structured.visible_logs import logger_of
from manta.workers.cache_folder import UntrustedCache
from manta.workers.checkpoints.values_digest import CheckpointChanged, CheckpointValues
from manta.workers.kernels.layer_caches import LayerStates
from manta.workers.model_options import ModelOptions
from manta.workers.prefix_store import BlockPart, PrefixStore, StorePlace, store_key

logger = logger_of(__name__)

MOST_QUEUED_BYTES = 64 << 20
"""Bytes of copies that wait for the thread, to which the last one adds."""
CLOSE_S = 5.0
"""Longest time in seconds for which a process that ends writes what waits."""
LISTING_S = 3600.0
"""Seconds without a write after which the thread removes what is too old."""


def values_for_store(options: ModelOptions, folder: pathlib.Path) -> CheckpointValues | None:
    """Returns the checkpoint's files as they are before the weights are loaded; None without a prefix store."""
    return CheckpointValues(folder) if options.prefix_store_bytes else None


def open_keeper(
    options: ModelOptions,
    rank: int,
    values: CheckpointValues,
    content: str,
    kv_cache: torch.Tensor,
    states: LayerStates,
    num_groups: int,
) -> BlockKeeper | None:
    """Opens a rank's prefix store, and returns what moves parts of prefixes there. `content` says what its blocks'
    bytes depend on beside the checkpoint's values. None, with a warning, if there can be no store now.
    """
    try:
        key = store_key(f"{values.digest()} {content}")
        store = PrefixStore(key, rank, options.prefix_store_bytes, options.prefix_store_keep_s)
        store.make_room()
    except (OSError, UntrustedCache, CheckpointChanged) as error:
        logger.warning("prefixes are not kept: %s", error)
        return None
    return BlockKeeper(store, kv_cache, states, num_groups)


class BlockKeeper:
    """Keeps and restores parts of prefixes. `kv_cache` is [layers_per_block, num_cached, num_blocks, ...], and `states`
    are those of each layer, [num_slots, *shape]; both on the CPU. A place of group `num_groups` is a slot.
    """

    def __init__(self, store: PrefixStore, kv_cache: torch.Tensor, states: LayerStates, num_groups: int) -> None:
        self._store = store
        self._kv_cache = kv_cache
        self._states = [tensor for tensors in states for tensor in tensors]
        self._num_groups = num_groups
        self.hidden_states: torch.Tensor | None = None
        """Hidden states that a draft head reads (`ModelRunner.make_room_for_hidden`), zeros in restored blocks."""
        self._writer = _Writer(store)
        weakref.finalize(self, self._writer.put, None)

    @torch.inference_mode()
    def keep(self, parts: Sequence[BlockPart]) -> list[bool]:
        """Copies parts and has them written; those that the store has count as used. Returns for each part whether that
        is done: not if too many wait to be written.
        """
        return [self._keep(part) for part in parts]

    def _keep(self, part: BlockPart) -> bool:
        if self._store.refresh(part.block_hash, part.group):
            return True
        if self._writer.is_full:
            return False
        content = torch.cat([_bytes_of(each) for each in self._tensors(part)])
        self._writer.write(part, content.numpy().data)
        return True

    @torch.inference_mode()
    def restore(self, parts: Sequence[BlockPart]) -> list[bool]:
        """Fills blocks and slots with what the store has. Returns for each part whether that succeeded."""
        return [self._restore(part) for part in parts]

    def drop(self, hashes: Sequence[bytes]) -> None:
        """Removes blocks from the store, and those that wait to be written."""
        self._writer.put(functools.partial(self._store.drop, list(hashes), self._num_groups + 1))

    @property
    def place(self) -> StorePlace:
        return self._store.place

    def _restore(self, part: BlockPart) -> bool:
        tensors = self._tensors(part)
        sizes = [tensor.nbytes for tensor in tensors]
        content = self._store.read(part.block_hash, part.group, sum(sizes))
        if content is None:
            return False
        if self.hidden_states is not None and part.group == 0:
            self.hidden_states[:, :, part.place] = 0
        for tensor, piece in zip(tensors, torch.frombuffer(content, dtype=torch.uint8).split(sizes), strict=True):
            tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))
        return True

    def _tensors(self, part: BlockPart) -> list[torch.Tensor]:
        """Returns views of the memory that holds a part."""
        if part.group == self._num_groups:
            return [tensor[part.place] for tensor in self._states]
        return [self._kv_cache[:, :, part.place]]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


class _Writer:
    """The thread that writes, which holds no memory of the rank. None in its queue ends it."""

    def __init__(self, store: PrefixStore) -> None:
        self._store = store
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._queued_bytes = 0
        self._has_failed = False
        """Whether the last write failed, so that the log says it once."""
        self.put = self._jobs.put
        self._thread = threading.Thread(target=self._run, name="manta-prefixes", daemon=True)
        self._thread.start()
        atexit.register(self._finish)

    @property
    def is_full(self) -> bool:
        return self._queued_bytes >= MOST_QUEUED_BYTES

    def _finish(self) -> None:
        """Writes what waits. Called when the process ends."""
        self.put(None)
        self._thread.join(CLOSE_S)

    def write(self, part: BlockPart, content: memoryview) -> None:
        """Has a part written."""
        with self._lock:
            self._queued_bytes += content.nbytes

        def write() -> None:
            with self._lock:
                self._queued_bytes -= content.nbytes
            self._store.write(part.block_hash, part.group, content)

        self.put(write)

    def _run(self) -> None:
        lower_priority()
        while True:
            try:
                job = self._jobs.get(timeout=LISTING_S)
            except queue.Empty:
                job = self._store.make_room
            if job is None:
                atexit.unregister(self._finish)
                return
            try:
                job()
                self._has_failed = False
            except OSError as error:
                if not self._has_failed:
                    logger.warning("a prefix is not kept: %s", error)
                self._has_failed = True
