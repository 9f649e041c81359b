"""Finds groups of sequences whose block tables begin alike, so that a step's attention reads their shared keys once.

Parallel samples share their prompt's blocks, and so do requests whose system prompt the prefix cache holds.
`AttentionMetadata.build` calls this once in each step; the kernels take the groups as plain arrays.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from manta.workers.kernels.query_tokens import QueryTokens

PREFIX_MULTIPLE = 64
"""A shared prefix is a multiple of this many keys, the kernels' `KEY_BLOCK`, so that a kernel cuts a sequence's keys
into the same blocks as it would without a group.
"""
MAX_QUERY_LEN = 8
"""Most query tokens of a member, the kernels' `SHORT_QUERY`. A longer query has enough rows to pay for packing the keys
itself.
"""
FIRST_BLOCKS = 256
"""Leading blocks by which all sequences of a step are compared at first; 4,096 tokens in blocks of 16."""
MEMBER_COST_KEYS = 116
"""Cost for a member of joining a group (its state is written and read once), as a number of keys that could be packed
in that time. With it 4 or 8 members over 128 keys, which would lose, do not become a group, while 16 over 128 and 2
over 512 do, and gain.
"""


@dataclasses.dataclass(slots=True)
class SharedPrefixes:
    """Group `g` is the sequences `members[group_start[g] : group_start[g + 1]]`, which share `prefix_lens[g]` keys.

    A sequence is in at most one group. Its query has at most `MAX_QUERY_LEN` tokens, all after the shared keys.
    """

    group_start: torch.Tensor
    """int32 [num_groups + 1]."""
    members: torch.Tensor
    """int32, ascending in each group."""
    prefix_lens: torch.Tensor
    """int32 [num_groups]: multiples of `PREFIX_MULTIPLE`."""

    @property
    def num_groups(self) -> int:
        return self.prefix_lens.shape[0]


def find_shared_prefixes(tokens: QueryTokens) -> SharedPrefixes | None:
    """Returns the groups that save most; None if no group pays.

    Every query token of `s` sees all keys before `starts[s]`. Some sequences may share more than others (several
    prompts that begin with the same system prompt), but each is in at most one group. The groups are chosen so that
    they save most in all: a group saves the keys that all members but one need not pack, less `MEMBER_COST_KEYS` for
    each member.
    """
    starts, query_lens, block_tables, block_size, *_ = tokens
    if len(starts) < 2:
        return None
    leading = block_tables[:, 0].tolist()
    if len(set(leading)) == len(leading):  # of most steps: nothing is shared
        return None
    rows = np.flatnonzero((query_lens <= MAX_QUERY_LEN) & (starts >= max(PREFIX_MULTIPLE, block_size)))
    if len(rows) < 2:
        return None
    order, equal = _neighbours(block_tables, rows, starts[rows] // block_size)
    shared = equal * block_size // PREFIX_MULTIPLE * PREFIX_MULTIPLE
    groups = _best_groups(shared.tolist())
    if not groups:
        return None
    members = [np.sort(order[group.members]) for group in groups]
    group_start = np.cumsum([0, *map(len, members)], dtype=np.int32)
    return SharedPrefixes(
        group_start=torch.from_numpy(group_start),
        members=torch.from_numpy(np.concatenate(members).astype(np.int32)),
        prefix_lens=torch.tensor([group.prefix_len for group in groups], dtype=torch.int32),
    )


def _neighbours(tables: np.ndarray, rows: np.ndarray, usable: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns `rows` in an order in which those that begin alike are neighbours, and the number of leading blocks that
    each has in common with the next one, int [len(rows) - 1]. Of row `rows[i]` of `tables` the first `usable[i]` blocks
    count.

    The first `FIRST_BLOCKS` columns are compared for all rows, and further ones only for rows that had no difference
    from a neighbour so far. So the cost does not follow the longest context of the step.
    """
    order, equal = np.arange(len(rows)), np.zeros(len(rows) - 1, dtype=np.int64)
    places, classes = order.copy(), np.zeros(len(rows), dtype=np.int64)
    first, width = 0, FIRST_BLOCKS
    while True:
        among = order[places]
        width = min(width, int(usable[among].max()) - first)
        keys = np.empty((len(among), 1 + width), dtype=np.int32)
        keys[:, 0] = classes.astype(">i4").view(np.int32)  # compared as bytes, in which the first is the highest
        keys[:, 1:] = tables[rows[among], first : first + width]
        keys[:, 1:][np.arange(first, first + width) >= usable[among][:, None]] = -1
        by_key = np.argsort(keys.view(f"V{keys.itemsize * keys.shape[1]}").ravel())
        keys, among = keys[by_key], among[by_key]
        order[places] = among
        differs = keys[1:] != keys[:-1]
        alike = first + np.where(differs.any(1), differs.argmax(1) - 1, width)
        alike = np.minimum(alike, np.minimum(usable[among][1:], usable[among][:-1]))
        is_pair = ~differs[:, 0]
        equal[places[:-1][is_pair]] = alike[is_pair]
        first += width
        goes_on = is_pair & (alike >= first)
        stays = np.zeros(len(among), dtype=bool)
        stays[:-1] |= goes_on
        stays[1:] |= goes_on
        if not stays.any() or int(usable[among[stays]].max()) <= first:
            return rows[order], equal
        classes = np.cumsum(np.concatenate(([True], ~goes_on)))[stays]
        places, width = places[stays], 4 * width


@dataclasses.dataclass(slots=True)
class _PrefixGroup:
    members: list[int]
    prefix_len: int


@dataclasses.dataclass(slots=True)
class _Level:
    """Rows that share at least `prefix_len` keys: those of the `inner` levels, which share more, and `rows`.

    `prices`, `saved`, `num_joining` and `is_group` have an entry for each level that encloses this one, from the root
    on. Entry `i` assumes that the `i`-th of them is the group around this level; entry 0, the root's, assumes no group.
    """

    prefix_len: int
    rows: list[int] = dataclasses.field(default_factory=list)
    inner: list[_Level] = dataclasses.field(default_factory=list)
    prices: list[int] = dataclasses.field(default_factory=list)
    """Saving of a group of the enclosing level for each member; 0 if it does not pay."""
    saved: list[int] = dataclasses.field(default_factory=list)
    """The most that rows of this level can save, in groups of it and its inner levels or in the enclosing group."""
    num_joining: list[int] = dataclasses.field(default_factory=list)
    """Rows of this level that then join the enclosing group."""
    is_group: list[bool] = dataclasses.field(default_factory=list)
    """Whether this level is then a group of its own."""

    @property
    def price(self) -> int:
        return max(0, self.prefix_len - MEMBER_COST_KEYS)


def _best_groups(shared: list[int]) -> list[_PrefixGroup]:
    """The disjoint groups of rows that save most; rows `i` and `i + 1` share `shared[i]` keys."""
    levels = [_levels(shared)]
    for level in levels:  # the list grows while it is read
        for inner in level.inner:
            inner.prices = [*level.prices, level.price]
            levels.append(inner)
    for level in reversed(levels):
        _weigh(level)
    groups: list[_PrefixGroup] = []
    choose: list[tuple[_Level, int, _PrefixGroup | None]] = [(inner, 0, None) for inner in levels[0].inner]
    while choose:
        level, around, group = choose.pop()
        if level.is_group[around]:
            around, group = len(level.prices), _PrefixGroup([], level.prefix_len)
            groups.append(group)
        if group is not None:
            group.members += level.rows
        choose += [(inner, around, group) for inner in level.inner]
    return groups


def _weigh(level: _Level) -> None:
    """Fills `saved`, `num_joining` and `is_group` of a level whose inner levels have theirs."""
    prices = [*level.prices, level.price]
    saved = [price * len(level.rows) for price in prices]
    num_joining = [len(level.rows) if price else 0 for price in prices]
    for inner in level.inner:
        for index, (more, number) in enumerate(zip(inner.saved, inner.num_joining, strict=True)):
            saved[index] += more
            num_joining[index] += number
    own = saved.pop() - level.prefix_len
    pays = num_joining.pop() > 1
    level.is_group = [pays and own > other for other in saved]
    level.saved = [max(own, other) if pays else other for other in saved]
    level.num_joining = [
        0 if is_group else number for is_group, number in zip(level.is_group, num_joining, strict=True)
    ]


def _levels(shared: list[int]) -> _Level:
    """The root of the tree of nested levels; it shares no keys."""
    open_levels = [_Level(0)]
    for row, prefix_len in enumerate([*shared, 0]):
        before = shared[row - 1] if row else 0
        if prefix_len > before:
            open_levels.append(_Level(prefix_len))
        open_levels[-1].rows.append(row)
        while open_levels[-1].prefix_len > prefix_len:
            level = open_levels.pop()
            if open_levels[-1].prefix_len < prefix_len:
                open_levels.append(_Level(prefix_len))
            open_levels[-1].inner.append(level)
    return open_levels[0]
