"""The prefix index: from the key of a block of a prompt to the set of replicas that hold the block.

A replica is a small number here, its slot. A set of replicas is an int with one bit per slot, so one look-up answers
for a thousand replicas at once. `placement.py` assigns the slots. Imports neither torch nor ray.
"""

from __future__ import annotations

import functools
import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

KEY_BYTES = 8
"""Bytes of a block's key, which are the beginning of its hash as a little-endian number. Among 10^6 blocks, the
probability that two share a key is below 10^-7; then a request may go to the wrong replica, and nothing else is harmed.
"""
NUM_SHARDS = 256
"""Number of dicts that make up the index, so that growing or dropping one takes a few milliseconds at most."""
MAX_BLOCKS = 2**21
"""Blocks that the index holds, at about 150 bytes each."""


def block_keys(hashes: Sequence[bytes]) -> tuple[int, ...]:
    """Returns the keys of block hashes (`manta.cluster.engine.kv_blocks.hash_blocks`), each of which is twice as long
    as a key.
    """
    return struct.unpack(f"<{2 * len(hashes)}Q", b"".join(hashes))[::2]


@functools.cache
def bit_of(slot: int) -> int:
    """Returns the set of one replica. The cache shares one int among the many blocks that only this replica holds."""
    return 1 << slot


def lowest_slot(bits: int) -> int:
    """Returns the lowest slot of a set that is not empty."""
    return (bits & -bits).bit_length() - 1


def slots_of(bits: int) -> Iterator[int]:
    """Yields the slots of the replicas in a set."""
    while bits:
        slot = bits.bit_length() - 1
        yield slot
        bits ^= bit_of(slot)


class PrefixIndex:
    """The index. The lowest bits of a block's key name its shard. When the index holds too many blocks, it drops a
    shard and ignores that shard's blocks from then on. With half of the shards left, a prefix length is known to within
    two blocks on average, and no prefix is lost.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._shards: list[dict[int, int]] = [{} for _ in range(NUM_SHARDS)]
        """Key to the set of replicas that hold or will hold the block, for each shard."""
        self._held: dict[int, set[int]] = {}
        """Keys that each slot holds, without those that it is expected to hold."""
        self._num_blocks = 0
        self._with_borders = 0
        """The replicas whose blocks are those after which a prompt can go on."""

    def __len__(self) -> int:
        return self._num_blocks

    def keeps(self, key: int) -> bool:
        """Returns whether the key's shard has not been dropped."""
        return key % NUM_SHARDS < len(self._shards)

    def num_held(self, slot: int) -> int:
        return len(self._held.get(slot, ()))

    # ---- who has what --------------------------------------------------------------------------------------------

    def add(self, slot: int, keys: Sequence[int]) -> None:
        """Records that a replica holds blocks."""
        self.expect(slot, keys)
        self._held.setdefault(slot, set()).update(filter(self.keeps, keys))

    def set_borders(self, slot: int, are_borders: bool) -> None:
        """Records whether a replica's blocks are only those after which a prompt can go on: it may then hold a block
        and none before it.
        """
        self._with_borders &= ~bit_of(slot)
        if are_borders:
            self._with_borders |= bit_of(slot)

    def discard(self, slot: int, keys: Sequence[int]) -> None:
        """Records that a replica lost blocks."""
        if slot in self._held:
            self._held[slot].difference_update(keys)
        self._clear(slot, keys)

    def remove(self, slot: int) -> None:
        """Records that a replica lost all its blocks, or is gone."""
        self._clear(slot, self._held.pop(slot, ()))

    def expect(self, slot: int, keys: Iterable[int]) -> None:
        """Records that a replica will hold blocks. They count as held, because a request that needs them there waits
        for them anyway.
        """
        shards, num_shards, bit = self._shards, len(self._shards), bit_of(slot)
        for key in keys:
            number = key % NUM_SHARDS
            if number < num_shards:
                shard = shards[number]
                before = shard.get(key)
                if before is None:
                    shard[key] = bit
                    self._num_blocks += 1
                elif not before & bit:
                    shard[key] = before | bit
        while self._num_blocks > self._max_blocks:
            self._drop_shard()

    def expect_no_more(self, slot: int, keys: Iterable[int]) -> None:
        """Ends the expectation of blocks, because the replica has reported them or will never hold them."""
        self._clear(slot, set(keys).difference(self._held.get(slot, ())))

    def _clear(self, slot: int, keys: Iterable[int]) -> None:
        shards, bit = self._shards, bit_of(slot)
        for key in filter(self.keeps, keys):
            shard = shards[key % NUM_SHARDS]
            before = shard.get(key, 0)
            if before == bit:
                del shard[key]
                self._num_blocks -= 1
            elif before & bit:
                shard[key] = before ^ bit

    def _drop_shard(self) -> None:
        dropped = self._shards.pop()
        self._num_blocks -= len(dropped)
        for key, bits in dropped.items():
            for slot in slots_of(bits):
                if slot in self._held:
                    self._held[slot].discard(key)

    # ---- who has most --------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[int], among: int) -> Iterator[tuple[int, int]]:
        """Yields (number of leading blocks, bits of the replicas `among` that hold exactly so many), longest first;
        replicas that hold none come last.

        A cache evicts the end of a chain before its beginning, so a replica that holds a block holds the blocks before
        it. Bisection therefore finds the last block that any of the replicas holds. Those that hold it are done, and
        the search goes on for the others among the blocks before it. Where blocks are borders, all are looked up, from
        the last on.
        """
        if among & self._with_borders:
            yield from self._find_borders(keys, among)
            return
        shards, rest = self._shards, among
        known: Sequence[int] = range(len(keys))
        """Places of the blocks that the index knows, in the order of the prompt."""
        if len(shards) < NUM_SHARDS:
            known = [place for place in known if self.keeps(keys[place])]

        def holders(place: int) -> int:
            key = keys[place]
            return shards[key % NUM_SHARDS].get(key, 0) & rest

        num_known = len(known)
        while rest:
            num_known = bisect_left(known, True, 0, num_known, key=lambda place: not holders(place))
            if not num_known:
                yield 0, rest
                return
            num_known -= 1
            last = known[num_known]
            found = holders(last)
            yield last + 1, found
            rest &= ~found

    def _find_borders(self, keys: Sequence[int], rest: int) -> Iterator[tuple[int, int]]:
        for place in range(len(keys) - 1, -1, -1):
            key = keys[place]
            found = self._shards[key % NUM_SHARDS].get(key, 0) & rest if self.keeps(key) else 0
            if found:
                yield place + 1, found
                rest &= ~found
                if not rest:
                    return
        yield 0, rest
