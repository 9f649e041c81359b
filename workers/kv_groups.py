"""Groups of layers in the KV cache: which layers share a block, and how many blocks a sequence needs.

Layers that see the same positions form a group, and a sequence has one block table for each group. A layer with a
sliding window reads only the last positions, so its group gives back blocks that no layer will read again. All groups
take their blocks from one pool: a block holds the keys and values of `block_size` tokens in as many layers as any other
block, so no group lacks blocks while another has some to spare. A kind of layers that fills several such blocks forms
several groups. (vLLM's hybrid cache manager has the same equal blocks.)

Plain arithmetic, for the driver and the workers. Imports no framework.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

MOST_GROUPS = 8
"""Most groups of a model with at most so many different windows. Each group costs a block table a sequence."""


class KVGroup(msgspec.Struct, frozen=True):
    """A group as the driver knows it."""

    window: int | None = None
    """Positions that a token sees in the group's layers, its own included; None for all."""


ONE_GROUP = (KVGroup(),)
"""The groups of a model whose layers all see every position."""


NO_KEYS = (KVGroup(window=1),)
"""The groups of a model without attention: one without layers, whose blocks have no bytes. Its window is the token
itself, so a sequence holds only the blocks that its next step computes.
"""


class LayerPlace(NamedTuple):
    """The place of a layer's keys and values."""

    group: int
    number: int
    """Number among the layers of a block, from 0."""


class LayerGroups(NamedTuple):
    """The groups of a model, those that see all positions first."""

    groups: tuple[KVGroup, ...]
    layers: tuple[LayerPlace | None, ...]
    """The place of each layer; None for a layer without attention."""
    layers_per_block: int
    """Layers whose keys and values are in one block, which the last block of a kind of layers may not fill."""


def group_layers(
    windows: Sequence[int | None], attends: Sequence[bool] | None = None, sources: Sequence[int] = ()
) -> LayerGroups:
    """Groups layers by their windows (`ModelConfig.sliding_windows`), so that the least of the blocks is left empty.

    `attends` says which layers have attention; None means all. A model without any has `NO_KEYS`. `sources` are
    `ModelConfig.kv_sources`: a layer has the place of the one whose keys and values it reads.
    """
    sources = sources or range(len(windows))
    kinds: dict[int | None, list[int]] = {}
    for layer in sorted(set(sources)):
        if attends is None or attends[layer]:
            kinds.setdefault(windows[layer], []).append(layer)
    if not kinds:
        return LayerGroups(NO_KEYS, (None,) * len(windows), 0)
    ordered = sorted(kinds.items(), key=lambda kind: (kind[0] is not None, kind[0] or 0))
    sizes = [len(layers) for layers in kinds.values()]
    most_groups = max(MOST_GROUPS, len(kinds))

    def cost(layers_per_block: int) -> tuple[int, int]:
        num_groups = sum(-(-size // layers_per_block) for size in sizes)
        return num_groups * layers_per_block, num_groups

    fitting = [size for size in range(1, max(sizes) + 1) if cost(size)[1] <= most_groups]
    layers_per_block = min(fitting, key=cost)
    groups: list[KVGroup] = []
    places: dict[int, LayerPlace] = {}
    for window, layers in ordered:
        for number, layer in enumerate(layers):
            places[layer] = LayerPlace(len(groups) + number // layers_per_block, number % layers_per_block)
        groups += [KVGroup(window)] * -(-len(layers) // layers_per_block)
    return LayerGroups(tuple(groups), tuple(map(places.get, sources)), layers_per_block)


def one_group(attends: Sequence[bool]) -> LayerGroups:
    """Returns the groups of a model that keeps every position of all its layers with attention. `attends` says which
    layers have it.
    """
    if not any(attends):
        return LayerGroups(NO_KEYS, (None,) * len(attends), 0)
    numbers = itertools.count()
    places = tuple(LayerPlace(0, next(numbers)) if each else None for each in attends)
    return LayerGroups(ONE_GROUP, places, sum(attends))


class BlockNeeds(NamedTuple):
    """The number of blocks that sequences need.

    `most_new_tokens` is the largest distance from a sequence's last accepted token to the end of a step: its chunk of a
    prompt, or drafts and tokens under way.
    """

    groups: tuple[KVGroup, ...]
    block_size: int
    most_new_tokens: int

    def of_sequence(self, num_tokens: int) -> int:
        """Returns the most blocks that a sequence of `num_tokens` tokens holds at a time, in all groups together."""
        return sum(self.of_group(group, num_tokens) for group in self.groups)

    def of_group(self, group: KVGroup, num_tokens: int) -> int:
        """Returns the most blocks that a sequence of `num_tokens` tokens holds at a time in one group."""
        num_blocks = -(-num_tokens // self.block_size)
        if group.window is None:
            return num_blocks
        num_live = group.window - 1 + self.most_new_tokens  # they may begin and end inside a block
        return min(num_blocks, (num_live + self.block_size - 2) // self.block_size + 1)

    def longest(self, num_blocks: int, most_tokens: int) -> int:
        """Returns the longest sequence that `num_blocks` blocks hold, in tokens: whole blocks, at most the block that
        `most_tokens` tokens end in.
        """
        lengths = range(self.block_size, most_tokens + self.block_size, self.block_size)
        return bisect_right(lengths, num_blocks, key=self.of_sequence) * self.block_size


def most_states(num_steps_ahead: int, has_drafts: bool) -> int:
    """Returns the most slots of recurrent states that one sequence holds at a time: the one that it goes on from, those
    at three block borders of its prompt, and those that the next step writes, and each of `num_steps_ahead` steps under
    way.

    A step writes the state at its end, and before the last known token, which a late mask makes uncomputed. With drafts
    it writes the one before them too.
    """
    return 1 + 3 + (1 + num_steps_ahead) * (2 + has_drafts)


def first_needed(window: int, position: int, block_size: int) -> int:
    """Returns the first block that tokens from `position` on read in a group with that window."""
    return max(0, position - window + 1) // block_size
