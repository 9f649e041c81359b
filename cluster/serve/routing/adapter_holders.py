"""The adapters that replicas hold: as they report, and as they will because a prompt with the adapter is on its way.

Adapters are known by keys of 64 bits. Replicas are slots of `placement.py`, and a set of them is a number with their
bits. Imports neither torch nor ray.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Collection, Iterable

from manta.cluster.serve.routing.prefix_index import KEY_BYTES, bit_of


def adapter_key(digest: str) -> int:
    """Returns the key of the adapter with a digest; not 0."""
    return int.from_bytes(_key_bytes(digest), "little") or 1


def packed_keys(digests: Iterable[str]) -> bytes:
    """Returns the keys of adapters, `KEY_BYTES` each."""
    return b"".join(adapter_key(each).to_bytes(KEY_BYTES, "little") for each in digests)


def _key_bytes(digest: str) -> bytes:
    return hashlib.blake2b(digest.encode(), digest_size=KEY_BYTES).digest()


class AdapterHolders:
    """The replicas that hold each adapter. Not thread-safe."""

    def __init__(self) -> None:
        self._holders: collections.Counter[int] = collections.Counter()
        """The bits of the replicas that have reported an adapter, by its key; none is 0."""
        self._held: dict[int, frozenset[int]] = {}
        """The adapters that each replica has reported, by its slot."""
        self._expected: dict[int, collections.Counter[int]] = {}
        """Prompts on their way, by the key of their adapter and by slot; none is 0."""

    def report(self, slot: int, keys: Collection[int]) -> None:
        """Takes the adapters that a replica holds now."""
        bit, before, now = bit_of(slot), self._held.get(slot, frozenset()), frozenset(keys)
        for key in before - now:
            self._holders[key] &= ~bit
            if not self._holders[key]:
                del self._holders[key]
        for key in now - before:
            self._holders[key] |= bit
        self._held[slot] = now

    def remove(self, slot: int) -> None:
        """Forgets what a replica has reported; harmless if it has reported nothing."""
        self.report(slot, ())
        del self._held[slot]

    def expect(self, slot: int, key: int) -> None:
        """Counts a replica among the holders, because a prompt with the adapter goes there."""
        self._expected.setdefault(key, collections.Counter())[slot] += 1

    def expect_no_more(self, slot: int, key: int) -> None:
        """Undoes one `expect`. By now the replica has reported the adapter, or does not hold it."""
        left = self._expected[key] - collections.Counter((slot,))  # subtraction drops slots without a prompt
        self._expected[key] = left
        if not left:
            del self._expected[key]

    def of(self, key: int, among: int) -> int:
        """Returns the bits of the replicas of a set that hold an adapter, or are expected to."""
        holders = self._holders.get(key, 0)
        for slot in self._expected.get(key, ()):
            holders |= bit_of(slot)
        return holders & among

    def __len__(self) -> int:
        """Returns the number of adapters that some replica holds or is expected to."""
        return len(self._holders.keys() | self._expected.keys())
