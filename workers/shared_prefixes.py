"""Finds the sequences of a step whose block tables begin alike, where attention should read those keys once.

Parallel samples share their prompt's blocks, and so do requests whose system prompt the prefix cache holds.
`AttentionMetadata.build` calls this once a step; the kernels take the groups as plain arrays.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

PREFIX_MULTIPLE = 64
"""Keys: the kernels' block, so that a sequence's own keys begin where one of its blocks would (`KEY_BLOCK`)."""
MAX_QUERY_LEN = 8
"""Tokens of a member's query; longer ones have rows enough to repay the packing of a key (`SHORT_QUERY`)."""
MEMBER_COST_KEYS = 116
"""What joining a group costs a member (its state is written and read once), in keys that it might have packed. So that
4 or 8 over 128 keys, which lose, are no group; 16 over 128 and 2 over 512 gain (`manta bench prefix-attention`).
"""


@dataclasses.dataclass(slots=True)
class SharedPrefixes:
    """Group `g` is the sequences `members[group_start[g] : group_start[g + 1]]`, which share `prefix_lens[g]` keys.

    A sequence is in one group at most and has a query of `MAX_QUERY_LEN` tokens at most, all behind the shared keys.
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


def find_shared_prefixes(
    starts: np.ndarray, query_lens: np.ndarray, block_tables: np.ndarray, block_size: int
) -> SharedPrefixes | None:
    """The groups that save most; arguments as those of `AttentionMetadata.build`. None where no group pays.

    Keys before `starts[s]` are seen by every query token of `s`. Where some sequences share more than others (a system
    prompt under several prompts), each is in one group at most, so that the sum of what groups save is greatest: the
    keys that all members but one need not pack, less `MEMBER_COST_KEYS` for each member.
    """
    rows = np.flatnonzero((query_lens <= MAX_QUERY_LEN) & (starts >= max(PREFIX_MULTIPLE, block_size)))
    if len(rows) < 2:
        return None
    leading = np.sort(block_tables[rows, 0])
    if not (leading[1:] == leading[:-1]).any():
        return None
    usable = starts[rows] // block_size  # blocks
    tables = block_tables[rows, : usable.max()].copy()
    tables[np.arange(tables.shape[1]) >= usable[:, None]] = -1
    order = np.argsort(tables.view(f"V{tables.itemsize * tables.shape[1]}").ravel())
    tables, usable = tables[order], usable[order]
    differs = tables[1:] != tables[:-1]
    equal = np.where(differs.any(1), differs.argmax(1), tables.shape[1])
    shared = np.minimum(equal, np.minimum(usable[1:], usable[:-1])) * block_size // PREFIX_MULTIPLE * PREFIX_MULTIPLE
    groups = _best_groups(shared.tolist())
    if not groups:
        return None
    members = [np.sort(rows[order[group.members]]) for group in groups]
    group_start = np.cumsum([0, *map(len, members)], dtype=np.int32)
    return SharedPrefixes(
        group_start=torch.from_numpy(group_start),
        members=torch.from_numpy(np.concatenate(members).astype(np.int32)),
        prefix_lens=torch.tensor([group.prefix_len for group in groups], dtype=torch.int32),
    )


@dataclasses.dataclass(slots=True)
class _Group:
    members: list[int]
    prefix_len: int


@dataclasses.dataclass(slots=True)
class _Level:
    """Rows that share at least `prefix_len` keys: `inner` levels that share more, and the others.

    A list below has an entry for each level around this one, from the root on, as if that were the group around it; the
    root stands for none.
    """

    prefix_len: int
    rows: list[int] = dataclasses.field(default_factory=list)
    inner: list[_Level] = dataclasses.field(default_factory=list)
    prices: list[int] = dataclasses.field(default_factory=list)
    """What a group there saves for each member; 0 where it does not pay."""
    saved: list[int] = dataclasses.field(default_factory=list)
    """The most that groups can save in this level, with what its rows that join the group around it save there."""
    num_joining: list[int] = dataclasses.field(default_factory=list)
    is_group: list[bool] = dataclasses.field(default_factory=list)
    """Whether the level has a group of its own then."""

    @property
    def price(self) -> int:
        return max(0, self.prefix_len - MEMBER_COST_KEYS)


def _best_groups(shared: list[int]) -> list[_Group]:
    """The disjoint groups of rows that save most; rows `i` and `i + 1` of all share `shared[i]` keys."""
    levels = [_levels(shared)]
    for level in levels:  # grows on the way
        for inner in level.inner:
            inner.prices = [*level.prices, level.price]
            levels.append(inner)
    for level in reversed(levels):
        _weigh(level)
    groups: list[_Group] = []
    choose: list[tuple[_Level, int, _Group | None]] = [(inner, 0, None) for inner in levels[0].inner]
    while choose:
        level, around, group = choose.pop()
        if level.is_group[around]:
            around, group = len(level.prices), _Group([], level.prefix_len)
            groups.append(group)
        if group is not None:
            group.members += level.rows
        choose += [(inner, around, group) for inner in level.inner]
    return groups


def _weigh(level: _Level) -> None:
    """Fills the lists of a level, those of its inner ones being there."""
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
    """The tree of nesting, whose root shares nothing."""
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
