"""The KV cache's blocks: how many sequences hold each, and which contain a prefix that another sequence may read.

Reference-counted pages in the manner of PagedAttention (Kwon et al., 2023) with a hash-chained prefix cache and LRU
eviction. This module knows block ids and hashes, no tensors; the scheduler is its only caller. The router computes the
same hashes for the prompts that it places (`hash_blocks`), because they are equal in every process.
"""

from __future__ import annotations

import collections
import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence

HASH_BYTES = 16
"""With 128 bits of BLAKE2b a collision, which would give one prompt the keys of another, does not happen by chance."""


def hash_blocks(
    token_ids: Sequence[int], count: int, block_size: int, known: Iterable[bytes] = (), root: bytes = b""
) -> list[bytes]:
    """Returns the hashes of the first `count` full blocks, `HASH_BYTES` each; the first of them are `known`.

    Each hash covers its block, its parent's hash and so all tokens before it. The first block's parent is `root`: two
    prompts with different roots have no block in common. Nobody who does not know the root can search for a collision.
    """
    hashes = list(known)
    parent = hashes[-1] if hashes else root
    first = len(hashes) * block_size
    tokens = array("i", token_ids[first : count * block_size]).tobytes()
    size = block_size * array("i").itemsize
    for start in range(0, len(tokens), size):
        parent = hashlib.blake2b(parent + tokens[start : start + size], digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes[:count]


class IntegrityError(AssertionError):
    """A block leaked, is counted wrongly or is in two places: a bug in Manta, never the caller's."""


class KVBlocks:
    """`num_blocks` blocks of `block_size` tokens. Every operation is O(blocks it touches)."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._references = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        self._empty = list(range(num_blocks - 1, -1, -1))
        """Free blocks that hold nothing worth reading."""
        self._evictable: collections.OrderedDict[int, None] = collections.OrderedDict()
        """Free blocks that hold a cached prefix, least recently used first."""
        self.on_change: Callable[[bytes, bool], None] | None = None
        """Told of each hash when it can be found (True), and when it no longer can (False)."""

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        """Blocks that hold a prefix, in use or free."""
        return len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks, evicting the least recently used prefixes if need be. There must be that many free."""
        blocks = []
        for _ in range(count):
            if self._empty:
                block = self._empty.pop()
            else:
                block, _ = self._evictable.popitem(last=False)
                self._forget(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Gives back one reference each. Later blocks are evicted before earlier ones: a chain is useless without its
        head.
        """
        for block in reversed(list(blocks)):
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._hashes[block] is None:
                    self._empty.append(block)
                else:
                    self._evictable[block] = None

    def find_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest cached chain; they are not taken yet (see `share`)."""
        blocks = []
        if self.enable_prefix_caching:
            for block_hash in hashes:
                block = self._cached.get(block_hash)
                if block is None:
                    break
                blocks.append(block)
        return blocks

    def num_evictable(self, blocks: Iterable[int]) -> int:
        """How many of these count as free now and would not once they are shared."""
        return sum(block in self._evictable for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Takes one more reference to cached blocks."""
        for block in blocks:
            if self._references[block] == 0:
                del self._evictable[block]
            self._references[block] += 1

    def fork(self, block_table: list[int], num_tokens: int) -> tuple[list[int], list[tuple[int, int]]]:
        """A second table over the first `num_tokens` tokens: full blocks are shared, the partial one is copied.

        Returns the table and the (source, destination) copies for `StepInput.block_copies`, at most one. It takes one
        free block if `num_tokens` ends inside a block.
        """
        full, rest = divmod(num_tokens, self.block_size)
        table = block_table[:full]
        self.share(table)
        if not rest:
            return table, []
        (copy,) = self.allocate(1)
        return [*table, copy], [(block_table[full], copy)]

    def register(self, block: int, block_hash: bytes) -> None:
        """Offers a block, full once the step at hand has run, to the prefix cache.

        The same step may read it already: every layer writes all keys and values of a step before its attention reads
        any. If another block holds the same prefix, that one stays in the cache.
        """
        if self.enable_prefix_caching and block_hash not in self._cached:
            self._cached[block_hash] = block
            self._hashes[block] = block_hash
            if self.on_change is not None:
                self.on_change(block_hash, True)

    def discard(self, blocks: Iterable[int]) -> None:
        """Takes blocks out of the prefix cache, so that no new sequence reads them."""
        for block in blocks:
            if self._hashes[block] is not None:
                self._forget(block)
                if block in self._evictable:
                    del self._evictable[block]
                    self._empty.append(block)

    def clear_cache(self) -> None:
        """Forgets every cached prefix."""
        self.discard(list(self._cached.values()))

    def _forget(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._cached[block_hash]
            self._hashes[block] = None
            if self.on_change is not None:
                self.on_change(block_hash, False)

    def check_integrity(self, block_tables: Iterable[list[int]]) -> None:
        """Raises `IntegrityError` unless every block is free or counted once for each table that holds it."""
        expected = [0] * self.num_blocks
        for table in block_tables:
            for block in table:
                expected[block] += 1
        if expected != self._references:
            wrong = next(block for block in range(self.num_blocks) if expected[block] != self._references[block])
            raise IntegrityError(
                f"block {wrong} has {self._references[wrong]} references and {expected[wrong]} sequences hold it"
            )
        free = [*self._empty, *self._evictable]
        if sorted(free) != [block for block in range(self.num_blocks) if expected[block] == 0]:
            raise IntegrityError(f"{len(free)} blocks are listed as free and {expected.count(0)} are held by nobody")
        for block_hash, block in self._cached.items():
            if self._hashes[block] != block_hash:
                raise IntegrityError(f"block {block} is cached under a hash that is not its own")
        if any(self._hashes[block] is None for block in self._evictable):
            raise IntegrityError("a block without a prefix waits for eviction")
        if any(self._hashes[block] is not None for block in self._empty):
            raise IntegrityError("an empty block is in the prefix cache")
