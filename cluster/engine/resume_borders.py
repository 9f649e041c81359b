"""The block borders at which a new sequence can go on, for a model with sliding windows or recurrent states.

A border counts if every group of layers has what the token after it reads: all blocks before it, those in its window,
or a snapshot of the recurrent states. So a replica may hold a border and lack earlier ones. `KVBlocks` tells which
blocks and snapshots enter and leave the prefix cache, and the router learns the borders
(`cluster/serve/routing/reports.py`).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

from manta.workers.kv_groups import KVGroup, first_needed

SNAPSHOT = KVGroup(window=2)
"""The snapshots of recurrent states as a group. One is needed at the border itself, like the last block of a window
that shows a token and the one before it.
"""


@dataclasses.dataclass(slots=True)
class _Row:
    """The blocks of all groups that hold the same tokens of a chain. The border is at their end."""

    parent: bytes | None
    """Hash of the row before it in the chain; None for the first."""
    number: int
    """Number in the chain, from 0."""
    counts: list[int]
    """Cached blocks of each kind of groups."""
    runs: list[int]
    """Consecutive rows up to this one of which each kind of groups has every block, as far as it matters."""
    is_border: bool = False


class ResumeBorders:
    """Keeps the rows of the prefix cache, and calls `on_change` with a hash and True when the border after its row
    begins to count, and with False when it ends. A change costs O(blocks of a window).
    """

    def __init__(self, groups: tuple[KVGroup, ...], block_size: int, on_change: Callable[[bytes, bool], None]) -> None:
        self._on_change = on_change
        self._block_size = block_size
        self._kinds = list(dict.fromkeys(group.window for group in groups))
        """The different windows; groups with the same one are a kind."""
        self._kind_of = [self._kinds.index(group.window) for group in groups]
        self._sizes = [self._kind_of.count(kind) for kind in range(len(self._kinds))]
        self._rows: dict[bytes, _Row] = {}
        self._children: dict[bytes, set[bytes]] = collections.defaultdict(set)

    def enter(self, block_hash: bytes, group: int, parent: bytes | None, number: int) -> None:
        """Notes that a group's block has entered the cache. `parent` is the hash of the row before it."""
        row = self._rows.get(block_hash)
        if row is None:
            row = self._rows[block_hash] = _Row(parent, number, [0] * len(self._kinds), [0] * len(self._kinds))
            if parent is not None:
                self._children[parent].add(block_hash)
        row.counts[self._kind_of[group]] += 1
        self._update(block_hash, self._kind_of[group])

    def leave(self, block_hash: bytes, group: int) -> None:
        """Notes that a group's block has left the cache."""
        row = self._rows[block_hash]
        row.counts[self._kind_of[group]] -= 1
        self._update(block_hash, self._kind_of[group])
        if not any(row.counts):
            del self._rows[block_hash]
            if row.parent is not None:
                siblings = self._children[row.parent]
                siblings.discard(block_hash)
                if not siblings:
                    del self._children[row.parent]

    def _update(self, block_hash: bytes, kind: int) -> None:
        """Recomputes the runs of a kind from a row on, and which borders count, as far as anything changes."""
        pending = [block_hash]
        while pending:
            block_hash = pending.pop()
            row = self._rows[block_hash]
            before, row.runs[kind] = row.runs[kind], self._run(row, kind)
            is_border = all(run >= self._needed(row.number, each) for each, run in enumerate(row.runs))
            if is_border != row.is_border:
                row.is_border = is_border
                self._on_change(block_hash, is_border)
            if row.runs[kind] != before and block_hash in self._children:
                pending += self._children[block_hash]

    def _run(self, row: _Row, kind: int) -> int:
        if row.counts[kind] < self._sizes[kind]:
            return 0
        parent = None if row.parent is None else self._rows.get(row.parent)
        run = 1 if parent is None else parent.runs[kind] + 1
        if self._kinds[kind] is None:  # a chain without its head is worth nothing
            return int(row.number == 0 or run > 1)
        return min(run, self._needed(row.number + 1, kind))  # the next row's run needs no more

    def _needed(self, number: int, kind: int) -> int:
        """Returns how many rows up to this one the token after it reads in a kind of groups. A kind that reads all has
        a run of 1 if it has all.
        """
        window = self._kinds[kind]
        if window is None:
            return 1
        return number + 1 - first_needed(window, (number + 1) * self._block_size, self._block_size)
