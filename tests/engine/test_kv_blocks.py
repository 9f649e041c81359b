"""The KV blocks against a plain model of them: hypothesis takes, shares, registers and frees at random.

The model is a multiset of holders and a list of cached blocks in the order of their last use; what the pool hands out,
keeps and evicts must agree with it.
"""

from __future__ import annotations

import os

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from manta.cluster.engine.kv_blocks import IntegrityError, KVBlocks
from manta.cluster.engine.sequence import Sequence
from manta.workers.sampling_params import SamplingParams

BLOCK_SIZE = 4
NUM_BLOCKS = 6
EXAMPLES = 2000 if os.environ.get("MANTA_PROVE") == "1" else 40


class PoolMachine(RuleBasedStateMachine):
    """Tables as sequences hold them, and an independent record of what each cached name should be found as."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = KVBlocks(NUM_BLOCKS, BLOCK_SIZE)
        self.tables: list[list[int]] = []
        self.names: dict[bytes, int] = {}
        self.idle: list[int] = []
        """Cached blocks that no sequence holds, least recently freed first."""
        self.num_names = 0

    def held(self) -> set[int]:
        return {block for table in self.tables for block in table}

    @rule(count=st.integers(1, 3))
    def allocate(self, count: int) -> None:
        free = NUM_BLOCKS - len(self.held())
        if count > free:
            return
        empty = free - len(self.idle)
        evicted, self.idle = self.idle[: max(0, count - empty)], self.idle[max(0, count - empty) :]
        self.names = {name: block for name, block in self.names.items() if block not in evicted}
        taken = self.blocks.allocate(count)
        assert len(set(taken)) == count
        assert self.held().isdisjoint(taken), "a block that somebody holds was handed out"
        assert set(evicted) <= set(taken)
        assert not set(taken) & set(self.idle), "a cached block was taken where an older or an empty one was free"
        self.tables.append(taken)

    @precondition(lambda self: self.tables)
    @rule(pick=st.integers(0, 9), offset=st.integers(0, 2))
    def register(self, pick: int, offset: int) -> None:
        table = self.tables[pick % len(self.tables)]
        block = table[offset % len(table)]
        if block not in self.names.values():
            name = b"%d" % self.num_names
            self.num_names += 1
            self.blocks.register(block, name)
            self.names[name] = block

    @precondition(lambda self: self.tables and self.names)
    @rule(pick=st.integers(0, 9), chosen=st.integers(0, 9))
    def register_a_name_that_is_taken(self, pick: int, chosen: int) -> None:
        block = self.tables[pick % len(self.tables)][-1]
        self.blocks.register(block, sorted(self.names)[chosen % len(self.names)])

    @precondition(lambda self: self.names)
    @rule(chosen=st.lists(st.integers(0, 9), min_size=1, max_size=3))
    def share(self, chosen: list[int]) -> None:
        names = list(dict.fromkeys(sorted(self.names)[index % len(self.names)] for index in chosen))
        found = self.blocks.find_prefix(names)
        assert found == [self.names[name] for name in names]
        assert self.blocks.num_evictable(found) == len(set(found) & set(self.idle))
        self.blocks.share(found)
        self.idle = [block for block in self.idle if block not in found]
        self.tables.append(found)

    @precondition(lambda self: self.tables)
    @rule(pick=st.integers(0, 9))
    def free(self, pick: int) -> None:
        table = self.tables.pop(pick % len(self.tables))
        self.blocks.free(table)
        self.idle += [block for block in reversed(table) if block not in self.held() and block in self.names.values()]

    @precondition(lambda self: self.names)
    @rule(chosen=st.integers(0, 9))
    def discard(self, chosen: int) -> None:
        block = self.names.pop(sorted(self.names)[chosen % len(self.names)])
        self.idle = [other for other in self.idle if other != block]
        self.blocks.discard([block])

    @precondition(lambda self: self.tables and not self.idle and len(self.held()) < NUM_BLOCKS)
    @rule(pick=st.integers(0, 9), num_tokens=st.integers(1, 12))
    def fork(self, pick: int, num_tokens: int) -> None:
        parent = self.tables[pick % len(self.tables)]
        num_tokens = min(num_tokens, len(parent) * BLOCK_SIZE)
        full = num_tokens // BLOCK_SIZE
        child, copies = self.blocks.fork(parent, num_tokens)
        assert len(child) * BLOCK_SIZE >= num_tokens
        assert child[:full] == parent[:full]
        assert copies == ([(parent[full], child[full])] if num_tokens % BLOCK_SIZE else [])
        assert self.held().isdisjoint(child[full:]), "a fork writes into a block of another sequence"
        self.tables.append(child)

    @rule()
    def clear_cache(self) -> None:
        self.blocks.clear_cache()
        self.names, self.idle = {}, []

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.blocks.check_integrity(self.tables)
        assert self.blocks.num_free == NUM_BLOCKS - len(self.held())
        for number in range(self.num_names):
            name = b"%d" % number
            assert self.blocks.find_prefix([name]) == ([self.names[name]] if name in self.names else [])


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)


def cached_chain(blocks: KVBlocks, names: list[bytes]) -> list[int]:
    table = blocks.allocate(len(names))
    for block, name in zip(table, names, strict=True):
        blocks.register(block, name)
    blocks.free(table)
    return table


def test_least_recently_used_prefixes_are_evicted_first() -> None:
    blocks = KVBlocks(3, BLOCK_SIZE)
    for name in (b"a", b"b", b"c"):
        cached_chain(blocks, [name])
    used = blocks.find_prefix([b"a"])
    blocks.share(used)
    blocks.free(used)
    blocks.allocate(1)
    assert [bool(blocks.find_prefix([name])) for name in (b"a", b"b", b"c")] == [True, False, True]


def test_a_chain_loses_its_tail_before_its_head() -> None:
    blocks = KVBlocks(3, BLOCK_SIZE)
    chain = cached_chain(blocks, [b"a", b"ab", b"abc"])
    blocks.allocate(1)
    assert blocks.find_prefix([b"a", b"ab", b"abc"]) == chain[:2]


def test_without_prefix_caching_nothing_is_found() -> None:
    blocks = KVBlocks(3, BLOCK_SIZE, enable_prefix_caching=False)
    cached_chain(blocks, [b"a"])
    assert blocks.find_prefix([b"a"]) == []
    blocks.check_integrity([])


def test_the_integrity_check_finds_leaks_and_double_counts() -> None:
    blocks = KVBlocks(3, BLOCK_SIZE)
    table = blocks.allocate(2)
    blocks.check_integrity([table])
    with pytest.raises(IntegrityError, match="1 references and 0 sequences"):
        blocks.check_integrity([table[:1]])
    with pytest.raises(IntegrityError, match="1 references and 2 sequences"):
        blocks.check_integrity([table, table])


def hashes(token_ids: list[int], count: int) -> list[bytes]:
    sequence = Sequence(0, "a", token_ids, SamplingParams(), 0)
    sequence.hash_blocks(count, BLOCK_SIZE)
    return sequence.block_hashes


def test_a_blocks_hash_covers_all_tokens_before_it() -> None:
    one = hashes([1, 2, 3, 4, 5, 6, 7, 8], 2)
    other_head = hashes([1, 2, 3, 9, 5, 6, 7, 8], 2)
    other_tail = hashes([1, 2, 3, 4, 5, 6, 7, 9], 2)
    assert one[1] != other_head[1]
    assert one[0] == other_tail[0]
    assert one[1] != other_tail[1]
    assert hashes([5, 6, 7, 8], 1)[0] not in one, "the same tokens elsewhere have other keys and values"


def test_incremental_hashes_equal_those_made_at_once() -> None:
    sequence = Sequence(0, "a", [1, 2, 3, 4, 5], SamplingParams(), 0)
    sequence.hash_blocks(1, BLOCK_SIZE)
    sequence.token_ids += [6, 7, 8]
    sequence.hash_blocks(2, BLOCK_SIZE)
    assert sequence.block_hashes == hashes([1, 2, 3, 4, 5, 6, 7, 8], 2)
