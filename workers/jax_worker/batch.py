"""The flat batch of a step as one int32 array of static size: the host packs it, the devices unpack it.

A step has one of a few sizes (`sizes_up_to`), so that all programs are compiled at start. A single array takes a single
transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

LEAST_SIZE = 8
"""Smallest number of tokens or sample points of a program, because TPUs compute eight rows at a time."""


def padded(count: int) -> int:
    """Returns the next multiple of `LEAST_SIZE`."""
    return -(-count // LEAST_SIZE) * LEAST_SIZE


def sizes_up_to(limit: int, growth: int = 2) -> list[int]:
    """Returns the sizes of programs for up to `limit` rows: `LEAST_SIZE`, then `growth` times the previous, and
    `limit`, padded.
    """
    sizes, size = [], LEAST_SIZE
    while size < limit:
        sizes.append(size)
        size *= growth
    return [*sizes, padded(limit)]


def size_for(count: int, sizes: Sequence[int]) -> int:
    """Returns the smallest of the ascending `sizes` that has room for `count` rows."""
    return next(size for size in sizes if size >= count)


class BatchShape(NamedTuple):
    """The static sizes of a batch."""

    num_tokens: int
    num_sequences: int
    num_blocks: int
    """Blocks of the longest sequence, which is the width of block tables."""
    num_groups: int = 1
    """Groups of layers, each with its block tables (`workers/kv_groups.py`)."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each field of `StepBatch`."""
        tokens, sequences = self.num_tokens, self.num_sequences
        tables = self.num_groups * sequences * self.num_blocks
        return tokens, tokens, tokens, tokens, sequences + 1, sequences, 1, tables


class StepBatch(NamedTuple):
    """The fields of a batch, int32 arrays: `num_tokens` tokens of up to `num_sequences` sequences, those of the step
    first.
    """

    token_ids: jax.Array
    """Token ids [num_tokens]."""
    sources: jax.Array
    """Index of each token in the previous step's drawn tokens, [num_tokens]; -1 takes `token_ids`."""
    positions: jax.Array
    """Position of each token in its sequence, [num_tokens]; -1 for padding."""
    sequences: jax.Array
    """Index of each token's sequence, [num_tokens]."""
    query_start: jax.Array
    """Index of each sequence's first token, [num_sequences + 1]; the last entry is the number of tokens."""
    context_lens: jax.Array
    """Tokens of each sequence after this step, [num_sequences]; 0 for padding."""
    num_sequences: jax.Array
    """Number of sequences of the step, [1]."""
    block_tables: jax.Array
    """Block tables [num_groups, num_sequences, num_blocks]; `of_group` leaves those of one group."""

    @classmethod
    def unpack(cls, packed: jax.Array, shape: BatchShape) -> StepBatch:
        ends = np.cumsum(shape.sizes).tolist()
        fields = [packed[end - size : end] for size, end in zip(shape.sizes, ends, strict=True)]
        fields[-1] = fields[-1].reshape(shape.num_groups, shape.num_sequences, shape.num_blocks)
        return cls(*fields)

    def of_group(self, group: int) -> StepBatch:
        """Returns the batch for the layers of one group, with block tables [num_sequences, num_blocks]."""
        return self._replace(block_tables=self.block_tables[group])


def pack(
    shape: BatchShape,
    token_ids: np.ndarray,
    starts: np.ndarray,
    lens: np.ndarray,
    block_tables: Sequence[np.ndarray],
    sources: tuple[Sequence[int], Sequence[int]] = ((), ()),
) -> np.ndarray:
    """Packs `lens[i]` tokens of each sequence `i` from position `starts[i]`. Returns int32 [sum of `shape.sizes`].

    `token_ids` is the flat batch, [sum of lens]; `block_tables` are int32 [n, blocks] of each group of layers.
    `sources` are the rows that take a token of the previous step's draw, and the index of that token for each.
    """
    packed = np.zeros(sum(shape.sizes), dtype=np.int32)
    ends = np.cumsum(shape.sizes).tolist()
    fields = [packed[end - size : end] for size, end in zip(shape.sizes, ends, strict=True)]
    tokens, drawn, positions, sequences, query_start, context_lens, count, tables = fields
    num_tokens, num_sequences = len(token_ids), len(lens)
    first = np.cumsum(lens) - lens
    tokens[:num_tokens] = token_ids
    drawn[:] = -1
    drawn[list(sources[0])] = sources[1]
    positions[:] = -1
    positions[:num_tokens] = np.arange(num_tokens) - np.repeat(first - starts, lens)
    sequences[:num_tokens] = np.repeat(np.arange(num_sequences), lens)
    query_start[:num_sequences] = first
    query_start[num_sequences:] = num_tokens
    context_lens[:num_sequences] = starts + lens
    count[0] = num_sequences
    by_group = tables.reshape(shape.num_groups, shape.num_sequences, shape.num_blocks)
    for own, table in zip(by_group, block_tables, strict=True):
        own[:num_sequences, : table.shape[1]] = table
    return packed
