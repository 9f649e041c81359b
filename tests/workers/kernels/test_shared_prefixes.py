"""Groups of sequences that share leading blocks: what is found is right, and no other choice of groups saves more."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from manta.workers.kernels import shared_prefixes
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.query_tokens import QueryTokens
from manta.workers.kernels.shared_prefixes import (
    MAX_QUERY_LEN,
    PREFIX_MULTIPLE,
    SharedPrefixes,
    find_shared_prefixes,
)

pytestmark = pytest.mark.usefixtures("cheap_groups")


def groups_of(found: SharedPrefixes | None) -> list[tuple[list[int], int]]:
    """(members, shared keys) of every group."""
    if found is None:
        return []
    bounds = itertools.pairwise(found.group_start.tolist())
    members = [found.members[first:end].tolist() for first, end in bounds]
    return list(zip(members, found.prefix_lens.tolist(), strict=True))


def saving(num_members: int, prefix_len: int) -> int:
    """Keys that a group need not pack, less what it costs its members."""
    return (num_members - 1) * prefix_len - num_members * shared_prefixes.MEMBER_COST_KEYS


def shared_keys(members: tuple[int, ...], starts: np.ndarray, tables: np.ndarray, block_size: int) -> int:
    """Keys that all members see before their queries, block by block."""
    blocks = 0
    limit = min(int(starts[member]) // block_size for member in members)
    while blocks < limit and len({int(tables[member, blocks]) for member in members}) == 1:
        blocks += 1
    return blocks * block_size // PREFIX_MULTIPLE * PREFIX_MULTIPLE


def partitions(items: list[int]) -> Iterator[list[tuple[int, ...]]]:
    """Every way to put the items into sets."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for size in range(len(rest) + 1):
        for others in itertools.combinations(rest, size):
            for more in partitions([item for item in rest if item not in others]):
                yield [(first, *others), *more]


@st.composite
def batches(draw: st.DrawFn, max_sequences: int) -> QueryTokens:
    """Sequences that begin as one of the earlier ones do for some blocks; stale ids fill the tables' ends."""
    block_size = draw(st.sampled_from([8, 16, 48, 128]))
    num_sequences = draw(st.integers(0, max_sequences))
    most = 400 // block_size + 1
    tables = np.arange(num_sequences * (most + 2), dtype=np.int32).reshape(num_sequences, most + 2)
    starts = np.array([draw(st.integers(0, 400)) for _ in range(num_sequences)], dtype=np.int64)
    for row in range(1, num_sequences):
        parent = draw(st.integers(0, row - 1))
        tables[row, : draw(st.sampled_from([0, 1, most // 2, most, most + 2]))] = -1
        tables[row] = np.where(tables[row] == -1, tables[parent], tables[row])
    query_lens = np.array([draw(st.sampled_from([1, 1, 1, 3, 8, 9])) for _ in range(num_sequences)], dtype=np.int64)
    return QueryTokens(starts, query_lens, tables, block_size)


@given(batch=batches(60))
def test_members_see_and_share_their_whole_group(batch):
    starts, query_lens, tables, block_size, *_ = batch
    groups = groups_of(find_shared_prefixes(batch))
    taken = [member for members, _ in groups for member in members]
    assert len(taken) == len(set(taken))
    for members, prefix_len in groups:
        assert len(members) > 1
        assert members == sorted(members)
        assert query_lens[members].max() <= MAX_QUERY_LEN
        assert prefix_len > 0
        assert prefix_len % PREFIX_MULTIPLE == 0
        assert prefix_len <= shared_keys(tuple(members), starts, tables, block_size)


@given(batch=batches(6))
def test_no_other_choice_of_groups_saves_more(batch):
    starts, query_lens, tables, block_size, *_ = batch

    def saved(members: tuple[int, ...]) -> int:
        return max(0, saving(len(members), shared_keys(members, starts, tables, block_size)))

    eligible = np.flatnonzero(query_lens <= MAX_QUERY_LEN).tolist()
    best = max(sum(map(saved, sets)) for sets in partitions(eligible))
    assert (
        sum(saving(len(members), prefix_len) for members, prefix_len in groups_of(find_shared_prefixes(batch))) == best
    )


def find(
    starts: list[int], tables: list[list[int]], query_lens: list[int] | None = None
) -> list[tuple[list[int], int]]:
    lens = np.array(query_lens or [1] * len(starts))
    return groups_of(find_shared_prefixes(QueryTokens(np.array(starts), lens, np.array(tables, dtype=np.int32), 64)))


def test_members_need_not_be_neighbours():
    tables = [[1, 2, 3], [7, 8, 9], [1, 2, 4], [5, 8, 6], [1, 2, 10]]
    assert find([150] * 5, tables) == [([0, 2, 4], 128)]


def test_a_group_ends_before_its_members_queries():
    assert find([640, 639], [[*range(10), 30], [*range(10), 31]]) == [([0, 1], 576)]


def test_the_most_saving_level_is_taken():
    system = [1, 2, 3, 4]
    few_deep = [[*system, *range(10, 20), 30 + i] for i in range(2)]
    others = [[*system, *range(100 * i, 100 * i + 11)] for i in range(1, 5)]
    assert find([900] * 3, few_deep + others[:1]) == [([0, 1], 896)]
    assert sorted(find([900] * 6, few_deep + others)) == [([0, 1], 896), ([2, 3, 4, 5], 256)]
    assert find([350, 350, *[900] * 4], few_deep + others) == [(list(range(6)), 256)]
    two_pairs = few_deep + [[*system, *range(40, 50), 60 + i] for i in range(2)]
    assert sorted(find([900] * 4, two_pairs)) == [([0, 1], 896), ([2, 3], 896)]


def test_growing_prefixes_nest_as_deep_as_sequences():
    """Each sequence goes on where the one before ends; the best groups of such a chain are runs of neighbours."""
    num_sequences = 1100
    width = num_sequences + 1
    tables = [[*range(1, row + 2), *[width + row] * (width - row - 1)] for row in range(num_sequences)]
    groups = find([64 * (row + 1) for row in range(num_sequences)], tables)
    best = [0]
    for end in range(1, num_sequences + 1):
        of_runs = (best[first] + max(0, saving(end - first, 64 * (first + 1))) for first in range(end))
        best.append(max(of_runs))
    assert sum(saving(len(members), prefix_len) for members, prefix_len in groups) == best[-1]


def test_nothing_is_grouped_where_little_is_shared():
    assert find([600, 600], [[1, 2], [3, 4]]) == []
    assert find([63, 63], [[1], [1]]) == []
    assert find([600, 600], [[1, 2] + [0] * 8, [1, 2] + [0] * 8], [1, 9]) == []
    assert find([], []) == []


def test_metadata_carries_the_groups_unless_told_otherwise():
    tokens = QueryTokens(np.array([128, 128]), np.array([1, 1]), np.array([[4, 5, 6], [4, 5, 7]]), 64)
    assert groups_of(AttentionMetadata.build(tokens).shared_prefixes) == [([0, 1], 128)]
    assert AttentionMetadata.build(tokens._replace(may_share=False)).shared_prefixes is None
