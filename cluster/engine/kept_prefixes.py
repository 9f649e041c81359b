"""The prefixes that outlive an engine: which blocks the ranks keep in files, and which they have.

A prefix is kept when a second request begins with it, because a prompt that is sent once is not worth its copy. Blocks
are copied between two steps, a few at a time, and at once while the engine has nothing to do. The ranks own the bytes
(`workers/prefix_store.py`); this module knows hashes and places. `KVCacheManager` tells it what requests begin with and
loads what it finds here. `Engine` has it keep blocks.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from manta.cluster.engine.executors.executor import Executor
from manta.cluster.engine.kv_blocks import KVBlocks
from manta.workers.model_info import ModelInfo
from manta.workers.prefix_store import BlockPart, PrefixFiles
from manta.workers.step import NO_BLOCK

STEP_BYTES = 1 << 20
"""Bytes that are copied after a step, which the next one waits for. At least one part is."""
RESTORED_BYTES = 256 << 20
"""Most bytes that are read for one sequence, because no step begins meanwhile. The rest of a longer prefix is computed.
"""
QUEUE_WAIT_S = 0.005
"""Seconds that an idle engine waits if a rank has too many parts to write."""
REFRESH_S = 300.0
"""Seconds after which a prefix that is still used counts as used again in the store."""
MOST_NOTED = 4096
"""Prefixes that are remembered as kept, and blocks that wait to be kept are at most 16 times as many."""


class _Pending(NamedTuple):
    """A part that waits to be kept."""

    step_id: int
    """The step that was planned when it was noted. A block is final once this step has succeeded."""
    block_hash: bytes
    group: int


class _Unsettled(NamedTuple):
    """Blocks that were copied behind a step whose result is not known yet."""

    step_id: int
    hashes: list[bytes]


class KeptPrefixes:
    """Knows the ranks' prefix stores. `blocks` are those in memory, and `files` those of all `num_ranks` ranks."""

    def __init__(
        self, blocks: KVBlocks, executor: Executor, files: PrefixFiles, num_ranks: int, part_bytes: int
    ) -> None:
        self._blocks = blocks
        self._executor = executor
        self._files = files
        self._ranks = range(num_ranks)
        self._most_parts = max(1, STEP_BYTES // max(1, part_bytes))
        """Parts that are copied after a step."""
        self._num_groups = len(blocks.groups)
        self.most_restored = max(1, RESTORED_BYTES // max(1, part_bytes * self._num_groups))
        """Blocks of a sequence that are restored at most."""
        self._pending: collections.deque[_Pending] = collections.deque()
        self._unsettled: list[_Unsettled] = []
        self._noted: collections.OrderedDict[bytes, float] = collections.OrderedDict()
        """Hashes of the last blocks of prefixes that were noted, and when, the latest last."""

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    # ---- what is there -------------------------------------------------------------------------------------------

    def has(self, block_hash: bytes, group: int) -> bool:
        """Returns whether every rank has a file of the part; only reading shows whether its content counts."""
        return all(self._files.has(rank, block_hash, group) for rank in self._ranks)

    def restore(self, parts: Sequence[BlockPart]) -> list[bool]:
        """Fills blocks and slots, behind the steps under way. Returns for each part whether that succeeded."""
        return self._executor.restore_blocks(parts)

    # ---- what is kept --------------------------------------------------------------------------------------------

    def note_use(self, step_id: int, hashes: Sequence[bytes], tables: Iterable[Sequence[int]]) -> None:
        """Notes that a step starts a sequence on the blocks of `tables` with these hashes, and on the snapshot after
        them if there is one.
        """
        last, now = hashes[-1], time.monotonic()
        if now - self._noted.get(last, -REFRESH_S) < REFRESH_S or len(self._pending) >= 16 * MOST_NOTED:
            return
        self._noted[last] = now
        self._noted.move_to_end(last)
        if len(self._noted) > MOST_NOTED:
            self._noted.popitem(last=False)
        for group, table in enumerate(tables):
            found = zip(hashes, table, strict=True)
            self._pending += [_Pending(step_id, block_hash, group) for block_hash, block in found if block != NO_BLOCK]
        if self._blocks.states is not None:
            self._pending.append(_Pending(step_id, last, self._num_groups))

    def keep_next(self, settled_step: int, planned_step: int) -> bool:
        """Has the ranks keep the next parts; returns whether they took any. All steps up to `settled_step` have
        succeeded, and the last planned one is `planned_step`. Call it after a step.
        """
        parts: list[BlockPart] = []
        while self._pending and len(parts) < self._most_parts and self._pending[0].step_id <= settled_step:
            pending = self._pending.popleft()
            place = self._blocks.find_part(pending.block_hash, pending.group)
            if place is not None:
                parts.append(BlockPart(pending.block_hash, pending.group, place))
        self._unsettled = [each for each in self._unsettled if each.step_id > settled_step]
        if not parts:
            return True
        taken = self._executor.keep_blocks(parts)
        left = [part for part, is_taken in zip(parts, taken, strict=True) if not is_taken]
        self._pending.extendleft(_Pending(settled_step, part.block_hash, part.group) for part in reversed(left))
        if planned_step > settled_step:
            self._unsettled.append(_Unsettled(planned_step, [part.block_hash for part in parts]))
        return any(taken)

    def keep_all(self, is_wanted: Callable[[], bool]) -> None:
        """Has the ranks keep all that waits, until the engine `is_wanted`. Call it while no step is under way."""
        while self._pending and not is_wanted():
            last = self._pending[-1].step_id
            if not self.keep_next(last, last):
                time.sleep(QUEUE_WAIT_S)

    def drop(self, hashes: Sequence[bytes]) -> None:
        """Removes blocks from the stores of all ranks."""
        dropped = frozenset(hashes)
        self._pending = collections.deque(each for each in self._pending if each.block_hash not in dropped)
        for block_hash in hashes:
            self._noted.pop(block_hash, None)
        self._executor.drop_kept(hashes)

    def forget_failed_steps(self) -> None:
        """Forgets what waits, and removes what was copied behind a step that has failed. Call it when the ranks serve
        again.
        """
        self._pending.clear()
        failed = [block_hash for each in self._unsettled for block_hash in each.hashes]
        self._unsettled = []
        if failed:
            self.drop(failed)


def open_kept_prefixes(
    blocks: KVBlocks, executor: Executor, model: ModelInfo, keep_s: float, num_ranks: int
) -> KeptPrefixes | None:
    """Returns the prefixes that the ranks of a model keep; None if they keep none. Ranks on other machines keep files
    that this process does not see, so they find nothing.
    """
    if model.prefix_store is None:
        return None
    part_bytes = (model.kv_cache_bytes - model.num_state_slots * model.state_bytes) // model.num_blocks
    return KeptPrefixes(blocks, executor, PrefixFiles(model.prefix_store, keep_s), num_ranks, part_bytes)
