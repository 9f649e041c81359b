"""The blocks of the KV cache: reference counts, and the prefix cache that lets sequences share blocks.

Blocks are reference-counted as in PagedAttention (Kwon et al., 2023). The prefix cache is hash-chained, with LRU
eviction. This module knows block ids and hashes but no tensors. `KVCacheManager` and the scheduler are its callers. The
router computes the same hashes for the prompts that it places (`hash_blocks`), because they are equal in every process.
"""

from __future__ import annotations

import collections
import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from manta.cluster.engine.resume_borders import SNAPSHOT, ResumeBorders
from manta.workers.kv_groups import ONE_GROUP, KVGroup
from manta.workers.step import NO_BLOCK

HASH_BYTES = 16
"""Length of a BLAKE2b block hash in bytes. A collision would give one prompt the keys of another; with 128 bits none
happens by chance.
"""


def hash_blocks(
    token_ids: Sequence[int], count: int, block_size: int, known: Iterable[bytes] = (), root: bytes = b""
) -> list[bytes]:
    """Returns the hashes of the first `count` full blocks, `HASH_BYTES` each. `known` are the first of them, if
    computed before.

    A hash covers its block and its parent's hash, and so all tokens before it. The parent of the first block is `root`,
    so prompts with different roots share no block. A client that does not know the root cannot search for collisions.
    """
    hashes = list(known)
    extend_hashes(hashes, token_ids, count, block_size, root)
    return hashes[:count]


def extend_hashes(
    hashes: list[bytes], token_ids: Sequence[int], count: int, block_size: int, root: bytes = b""
) -> None:
    """Appends to the hashes of a prompt's leading blocks those up to the first `count`; see `hash_blocks`. Reads only
    the tokens of blocks that are new.
    """
    parent = hashes[-1] if hashes else root
    first = len(hashes) * block_size
    tokens = array("i", token_ids[first : count * block_size]).tobytes()
    size = block_size * array("i").itemsize
    for start in range(0, len(tokens), size):
        parent = hashlib.blake2b(parent + tokens[start : start + size], digest_size=HASH_BYTES).digest()
        hashes.append(parent)


class IntegrityError(AssertionError):
    """The engine's bookkeeping is inconsistent: a bug in Manta, never the caller's fault."""


class TokenChain(Protocol):
    """A sequence as the prefix cache knows it."""

    token_ids: list[int]
    block_hashes: list[bytes]
    """Hashes of leading full blocks."""
    adapter: str
    """Key of the adapter that computes it (`AdapterKey.text`); empty for the model alone."""
    cache_salt: str
    """The client's salt, which is part of its first hash; empty without one."""


class CacheListener(Protocol):
    """Hears of every change of a prefix cache, in each group of layers."""

    def store(self, chain: TokenChain, number: int, group: int) -> None:
        """Hears that the group's block with a number of a chain has entered the cache."""

    def remove(self, block_hash: bytes, group: int) -> None:
        """Hears that a block has left the cache."""

    def clear(self) -> None:
        """Hears that the whole cache has been forgotten."""


class KVBlocks:
    """`num_blocks` blocks of `block_size` tokens, from which the groups of layers take theirs. A group finds its own
    blocks only. Every operation is O(blocks it touches).

    Slots of recurrent states are counted, cached and evicted as blocks are, so an instance with one group stands for
    their pool.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        groups: tuple[KVGroup, ...] = ONE_GROUP,
        states: KVBlocks | None = None,
    ) -> None:
        """`states` is the pool of slots of recurrent states; None for a model without. Its cached ones are snapshots:
        the state after the block with the same hash.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.groups = groups
        self.states = states
        self._references = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._group_of = [0] * num_blocks
        """The group of each cached block."""
        self._cached: list[dict[bytes, int]] = [{} for _ in groups]
        self._empty = list(range(num_blocks - 1, -1, -1))
        """Free blocks that hold no cached prefix."""
        self._evictable: collections.OrderedDict[int, None] = collections.OrderedDict()
        """Free blocks that hold a cached prefix, least recently used first."""
        self._evicted_first: set[int] = set()
        """Cached blocks that count as least recently used once they are free."""
        self._on_change: Callable[[bytes, bool], None] | None = None
        self._borders: ResumeBorders | None = None
        self._listener: CacheListener | None = None
        self._first_group = 0
        """Number of the first group for the listener."""
        self.num_stored = 0
        """Blocks that have entered the prefix cache, over the life of this instance."""

    def tell(self, listener: CacheListener, first_group: int = 0) -> None:
        """Tells a listener of every change from now on. Groups count from `first_group`, and snapshots of recurrent
        states are the group after the last one. Call it while the cache is empty.
        """
        self._listener, self._first_group = listener, first_group
        if self.states is not None:
            self.states.tell(listener, len(self.groups))

    def report_to(self, on_change: Callable[[bytes, bool], None]) -> None:
        """Calls `on_change` from now on with each hash and True when its block enters the prefix cache, and with False
        when it leaves. If `resumes_at_borders`, the calls are about borders at which every group can go on
        (`resume_borders.py`). Call it while the cache is empty.
        """
        if not self.resumes_at_borders:
            self._on_change = on_change
            return
        groups = self.groups if self.states is None else (*self.groups, SNAPSHOT)
        self._borders = ResumeBorders(groups, self.block_size, on_change)
        if self.states is not None:
            self.states.report_to(self._note_snapshot)

    def _note_snapshot(self, block_hash: bytes, is_there: bool) -> None:
        """Hears of snapshots that leave; `register_snapshot` tells of those that enter."""
        if not is_there and self._borders is not None:
            self._borders.leave(block_hash, len(self.groups))

    @property
    def resumes_at_borders(self) -> bool:
        """Whether a prefix can be read at some of its borders only: a group needs only the last blocks before a
        border, or there are recurrent states.
        """
        return self.states is not None or any(group.window is not None for group in self.groups)

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        """Number of blocks in the prefix cache, in use or free."""
        return sum(map(len, self._cached))

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks, and evicts the least recently used prefixes if needed. At least `count` blocks must be
        free.
        """
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
        """Returns one reference to each block. Later blocks are evicted first, because a chain cannot be found without
        its head.
        """
        for block in reversed(list(blocks)):
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._hashes[block] is None:
                    self._empty.append(block)
                else:
                    self._evictable[block] = None
                    if block in self._evicted_first:
                        self._evictable.move_to_end(block, last=False)

    def evict_first(self, block: int) -> None:
        """Makes a cached block the first to be evicted once it is free, unless a sequence shares it before."""
        self._evicted_first.add(block)
        if block in self._evictable:
            self._evictable.move_to_end(block, last=False)

    def find_prefix(self, hashes: Iterable[bytes], group: int = 0) -> list[int]:
        """Returns the blocks of the group's longest cached chain, without taking references (see `share`)."""
        blocks = []
        cached = self._cached[group]
        for block_hash in hashes:
            block = cached.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def find(self, block_hash: bytes, group: int = 0) -> int | None:
        """Returns the group's cached block, without taking a reference; None if there is none."""
        return self._cached[group].get(block_hash)

    def pool(self, group: int) -> tuple[KVBlocks, int]:
        """Returns the blocks of a group, and its number there. The number after the last group stands for snapshots of
        recurrent states, whose pool has one group.
        """
        if group < len(self.groups):
            return self, group
        assert self.states is not None
        return self.states, 0

    def find_part(self, block_hash: bytes, group: int) -> int | None:
        """Returns the group's cached block, or slot, as `find` does; see `pool`."""
        pool, number = self.pool(group)
        return pool.find(block_hash, number)

    def num_evictable(self, blocks: Iterable[int]) -> int:
        """Returns how many of `blocks` are free, and would not be free once they are shared."""
        return sum(block in self._evictable for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Takes one reference to each of the cached blocks."""
        for block in blocks:
            if self._references[block] == 0:
                del self._evictable[block]
                self._evicted_first.discard(block)
            self._references[block] += 1

    def fork(self, block_table: list[int], num_tokens: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Makes a second block table over the first `num_tokens` tokens: it shares full blocks and copies a partly
        filled one.

        Returns the table and the (source, destination) copies for `StepInput.block_copies`, at most one. A copy takes
        one free block, which the caller must ensure.
        """
        full, rest = divmod(num_tokens, self.block_size)
        table = block_table[:full]
        self.share([block for block in table if block != NO_BLOCK])
        if not rest:
            return table, []
        (copy,) = self.allocate(1)
        return [*table, copy], [(block_table[full], copy)]

    def register_row(self, blocks: Iterable[int], chain: TokenChain, number: int) -> None:
        """Adds the groups' blocks with number `number` of a chain to the prefix cache. The chain has the hashes up to
        there.
        """
        for group, block in enumerate(blocks):
            self.register_block(block, chain, number, group)

    def register_block(self, block: int, chain: TokenChain, number: int, group: int) -> None:
        """Adds one group's block, or a snapshot, to the prefix cache; see `register_row` and `pool`. A snapshot is the
        state after the block with this number.
        """
        pool, group_there = self.pool(group)
        if not pool.register(block, chain.block_hashes[number], group_there):
            return
        if self._borders is not None:
            parent = chain.block_hashes[number - 1] if number else None
            self._borders.enter(chain.block_hashes[number], group, parent, number)
        if self._listener is not None:
            self._listener.store(chain, number, group)

    def register_snapshot(self, slot: int, chain: TokenChain, number: int) -> None:
        """Adds a slot to the snapshots: the state after the block with number `number` of a chain."""
        self.register_block(slot, chain, number, len(self.groups))

    def register(self, block: int, block_hash: bytes, group: int = 0) -> bool:
        """Adds a block, which the planned step fills, to the group's prefix cache. Returns whether it did so.

        The same step may read the block already, because every layer writes all keys and values of a step before its
        attention reads any. If another block holds the same prefix, that block stays in the cache instead.
        """
        if not self.enable_prefix_caching or block_hash in self._cached[group]:
            return False
        self._cached[group][block_hash] = block
        self._hashes[block] = block_hash
        self._group_of[block] = group
        self.num_stored += 1
        if self._on_change is not None and group == 0:
            self._on_change(block_hash, True)
        return True

    def discard(self, blocks: Iterable[int]) -> None:
        """Removes blocks from the prefix cache, so that no new sequence reads them."""
        for block in blocks:
            if self._hashes[block] is not None:
                self._forget(block)
                if block in self._evictable:
                    del self._evictable[block]
                    self._empty.append(block)

    def clear_cache(self) -> None:
        """Forgets every cached prefix."""
        self.discard([block for cached in self._cached for block in cached.values()])
        if self.states is not None:
            self.states.clear_cache()
        if self._listener is not None:
            self._listener.clear()

    def _forget(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            group = self._group_of[block]
            del self._cached[group][block_hash]
            self._hashes[block] = None
            self._evicted_first.discard(block)
            if self._on_change is not None and group == 0:
                self._on_change(block_hash, False)
            if self._borders is not None:
                self._borders.leave(block_hash, group)
            if self._listener is not None:
                self._listener.remove(block_hash, self._first_group + group)

    def check_integrity(self, holders: Iterable[Iterable[int]]) -> None:
        """Raises `IntegrityError` unless every block is free or counted once for each holder. `holders` are the blocks
        that each sequence holds.
        """
        expected = [0] * self.num_blocks
        for blocks in holders:
            for block in blocks:
                expected[block] += 1
        if expected != self._references:
            wrong = next(block for block in range(self.num_blocks) if expected[block] != self._references[block])
            raise IntegrityError(
                f"block {wrong} has {self._references[wrong]} references and {expected[wrong]} sequences hold it"
            )
        free = [*self._empty, *self._evictable]
        if sorted(free) != [block for block in range(self.num_blocks) if expected[block] == 0]:
            raise IntegrityError(f"{len(free)} blocks are listed as free and {expected.count(0)} are held by nobody")
        for group, cached in enumerate(self._cached):
            for block_hash, block in cached.items():
                if (self._hashes[block], self._group_of[block]) != (block_hash, group):
                    raise IntegrityError(f"block {block} is cached under a hash that is not its own")
        if any(self._hashes[block] is None for block in self._evictable):
            raise IntegrityError("a block without a prefix waits for eviction")
        if any(self._hashes[block] is not None for block in self._empty):
            raise IntegrityError("an empty block is in the prefix cache")
