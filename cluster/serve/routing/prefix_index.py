"""Which replicas hold which blocks of prompts: one index from a block's key to the set of replicas that hold it.

A replica is a small number here, its slot, and a set of replicas an int with one bit for each, so that finding who
holds the longest prefix costs one look-up and one `&` a block, with a thousand replicas as with one. `placement.py`
gives out the slots; imports neither torch nor ray.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence

KEY_BYTES = 8
"""A block's key is the beginning of its hash, as a little-endian number. Two blocks with one key, of 10^6 blocks about
once in 10^7 times, send a request to the wrong replica and do no other harm.
"""
STRIDE = 8
"""Blocks that `find` steps over where it can."""
MAX_BLOCKS = 2**21
"""Blocks that the index knows of, about 150 bytes each; beyond them it forgets every second one."""


def block_keys(hashes: Iterable[bytes]) -> list[int]:
    """Of block hashes (`cluster.engine.kv_blocks.hash_blocks`)."""
    return [int.from_bytes(block_hash[:KEY_BYTES], "little") for block_hash in hashes]


class PrefixIndex:
    """If it knows of too many blocks, it keeps those whose key is divisible by 2, then by 4 and so on, and looks for no
    other ones: prefixes are then told 2, 4 and more blocks apart, and none of them is lost.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._holders: dict[int, int] = {}
        """By key: a bit for each slot."""
        self._added: dict[int, array[int]] = {}
        """By slot: the keys that it was given, some of which it may have lost since."""
        self._num_held: dict[int, int] = {}
        """By slot: the keys that it has."""
        self._skipped = 0
        """Keys that have one of these bits are not kept."""

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def granularity(self) -> int:
        """Blocks between two that are kept, on average."""
        return self._skipped + 1

    def num_held(self, slot: int) -> int:
        return self._num_held.get(slot, 0)

    def add(self, slot: int, keys: Iterable[int]) -> None:
        """A replica has blocks that others may read."""
        holders, skipped, bit = self._holders, self._skipped, 1 << slot
        added, num_new = self._added.setdefault(slot, array("Q")), 0
        for key in keys:
            if key & skipped:
                continue
            before = holders.get(key)
            if before is None:
                holders[key] = bit
            elif not before & bit:
                holders[key] = before | bit
            else:
                continue
            added.append(key)
            num_new += 1
        self._num_held[slot] = self._num_held.get(slot, 0) + num_new
        if len(added) > 1024 + 2 * self._num_held[slot]:
            self._added[slot] = array("Q", {key for key in added if holders.get(key, 0) & bit})
        while len(self._holders) > self._max_blocks:
            self._forget_half()

    def discard(self, slot: int, keys: Iterable[int]) -> None:
        """A replica lost blocks."""
        holders, bit, num_lost = self._holders, 1 << slot, 0
        for key in keys:
            before = holders.get(key, 0)
            if before & bit:
                num_lost += 1
                if before == bit:
                    del holders[key]
                else:
                    holders[key] = before ^ bit
        if num_lost:
            self._num_held[slot] -= num_lost

    def remove(self, slot: int) -> None:
        """A replica lost all its blocks, or is gone."""
        self.discard(slot, self._added.pop(slot, ()))
        self._num_held.pop(slot, None)

    def _forget_half(self) -> None:
        self._skipped = 2 * self._skipped + 1
        self._holders = {key: bits for key, bits in self._holders.items() if not key & self._skipped}
        for slot in self._added:
            kept = {key for key in self._added[slot] if self._holders.get(key, 0) >> slot & 1}
            self._added[slot], self._num_held[slot] = array("Q", kept), len(kept)

    def find(self, keys: Sequence[int], among: int, expected: Mapping[int, int] | None = None) -> list[tuple[int, int]]:
        """Who of the replicas `among` holds how much of a prompt, as (leading blocks, bits of the replicas that hold so
        many and no more), the most first; replicas that hold none are left out. `expected` counts as held too.

        Where all hold the block `STRIDE` further on, those between are not looked at: a cache evicts the end of a chain
        before its beginning.
        """
        holders_of, expected = self._holders.get, expected or {}
        kept = [key for key in keys if not key & self._skipped] if self._skipped else keys
        found, holding, number, count = [], among, 0, len(kept)
        while number < count and holding:
            ahead = number + STRIDE
            if ahead < count and holders_of(kept[ahead], 0) & holding == holding:
                number = ahead + 1
                continue
            for key in kept[number : ahead + 1]:
                still = holders_of(key, 0) & holding
                if still != holding:
                    still |= expected.get(key, 0) & holding
                    if still != holding:
                        if number:
                            found.append((number, holding ^ still))
                        holding = still
                        if not still:
                            break
                number += 1
        if count and holding:
            found.append((count, holding))
        if self._skipped:
            places = [number for number, key in enumerate(keys) if not key & self._skipped]
            found = [(places[number - 1] + 1, bits) for number, bits in found]
        found.reverse()
        return found
