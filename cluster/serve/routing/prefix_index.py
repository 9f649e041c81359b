"""Which replicas hold which blocks of prompts: one index from a block's key to the set of replicas that hold it.

A replica is a small number here, its slot, and a set of replicas an int with one bit for each, so that one look-up
tells of a thousand replicas as of one. `placement.py` gives out the slots; imports neither torch nor ray.
"""

from __future__ import annotations

import functools
import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

KEY_BYTES = 8
"""A block's key is the beginning of its hash, as a little-endian number. Two blocks with one key, of 10^6 blocks about
once in 10^7 times, send a request to the wrong replica and do no other harm.
"""
NUM_SHARDS = 256
"""Dicts that the index is made of: to make one larger, or to drop one, takes a few milliseconds at most."""
MAX_BLOCKS = 2**21
"""Blocks that the index knows of, about 150 bytes each."""


def block_keys(hashes: Sequence[bytes]) -> tuple[int, ...]:
    """Of block hashes (`cluster.engine.kv_blocks.hash_blocks`), which have twice the length of a key."""
    return struct.unpack(f"<{2 * len(hashes)}Q", b"".join(hashes))[::2]


@functools.cache
def bit_of(slot: int) -> int:
    """The set of one replica. One object for all blocks that this replica alone holds, and most are such."""
    return 1 << slot


def slots_of(bits: int) -> Iterator[int]:
    """The replicas of a set."""
    while bits:
        slot = bits.bit_length() - 1
        yield slot
        bits ^= bit_of(slot)


class PrefixIndex:
    """A block's shard is named by the lowest bits of its key. If the index knows of too many blocks it drops a shard
    and looks at no block of it any more: with half of the shards left, the length of a prefix is told to two blocks, on
    average, and no prefix is lost.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._shards: list[dict[int, int]] = [{} for _ in range(NUM_SHARDS)]
        """By key: a bit for each slot."""
        self._held: dict[int, set[int]] = {}
        """By slot: the keys that it has, without those that it is expected to have."""
        self._num_blocks = 0

    def __len__(self) -> int:
        return self._num_blocks

    def keeps(self, key: int) -> bool:
        """Whether its shard is left."""
        return key % NUM_SHARDS < len(self._shards)

    def num_held(self, slot: int) -> int:
        return len(self._held.get(slot, ()))

    # ---- who has what --------------------------------------------------------------------------------------------

    def add(self, slot: int, keys: Sequence[int]) -> None:
        """A replica has blocks that others may read."""
        self.expect(slot, keys)
        self._held.setdefault(slot, set()).update(filter(self.keeps, keys))

    def discard(self, slot: int, keys: Sequence[int]) -> None:
        """A replica lost blocks."""
        if slot in self._held:
            self._held[slot].difference_update(keys)
        self._clear(slot, keys)

    def remove(self, slot: int) -> None:
        """A replica lost all its blocks, or is gone."""
        self._clear(slot, self._held.pop(slot, ()))

    def expect(self, slot: int, keys: Iterable[int]) -> None:
        """A replica will have blocks. It counts as having them: who asks for them there waits for them anyway."""
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
        """What became of expected blocks was reported, or they will never be."""
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
        """Who of the replicas `among` has how much of a prompt, as (leading blocks, bits of the replicas that have so
        many and no more), the most first, those that have none last.

        Each length is found by bisection: a cache evicts the end of a chain before its beginning, so who has a block
        has those before it.
        """
        shards = self._shards
        places: Sequence[int] = range(len(keys))
        if len(shards) < NUM_SHARDS:
            places = [place for place in places if self.keeps(keys[place])]

        def is_beyond(place: int) -> bool:
            key = keys[place]
            return not shards[key % NUM_SHARDS].get(key, 0) & among

        count = len(places)
        while among and (count := bisect_left(places, True, 0, count, key=is_beyond)):
            last = keys[places[count - 1]]
            bits = shards[last % NUM_SHARDS][last] & among
            yield places[count - 1] + 1, bits
            among ^= bits
            count -= 1
        if among:
            yield 0, among
