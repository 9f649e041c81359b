"""The flat batch of a step as one int32 array of static size: packed by the host, taken apart on the devices.

A step has one of a few sizes (`sizes_up_to`), so that all programs are compiled at start. One array is one transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

LEAST_SIZE = 8
"""The smallest number of tokens or sample points of a program: TPUs compute eight rows at a time."""


def padded(count: int) -> int:
    """Returns the next multiple of `LEAST_SIZE`."""
    return -(-count // LEAST_SIZE) * LEAST_SIZE


def sizes_up_to(limit: int, growth: int = 2) -> list[int]:
    """Returns the sizes of programs for up to `limit` rows: from 8, each `growth` times the one before, and `limit`
    itself, padded.
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
    """Blocks of the longest sequence: the width of block tables."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each field of `Batch`."""
        tokens, sequences = self.num_tokens, self.num_sequences
        return tokens, tokens, tokens, tokens, sequences + 1, sequences, 1, sequences * self.num_blocks


class Batch(NamedTuple):
    """`num_tokens` tokens of up to `num_sequences` sequences, int32 arrays. The sequences of the step come first."""

    token_ids: jax.Array
    """[num_tokens]"""
    sources: jax.Array
    """[num_tokens]: index of the token in what the step before drew, in place of `token_ids`; -1 for none."""
    positions: jax.Array
    """[num_tokens]: position in the sequence; -1 for padding."""
    sequences: jax.Array
    """[num_tokens]: index of the token's sequence."""
    query_start: jax.Array
    """[num_sequences + 1]: the first token of each sequence in the batch; the last entry is the number of tokens."""
    context_lens: jax.Array
    """[num_sequences]: tokens of each sequence after this step; 0 for padding."""
    num_sequences: jax.Array
    """[1]: sequences of the step."""
    block_tables: jax.Array
    """[num_sequences, num_blocks]"""

    @classmethod
    def unpack(cls, packed: jax.Array, shape: BatchShape) -> Batch:
        ends = np.cumsum(shape.sizes).tolist()
        fields = [packed[end - size : end] for size, end in zip(shape.sizes, ends, strict=True)]
        fields[-1] = fields[-1].reshape(shape.num_sequences, shape.num_blocks)
        return cls(*fields)


def pack(
    shape: BatchShape,
    token_ids: np.ndarray,
    starts: np.ndarray,
    lens: np.ndarray,
    block_tables: np.ndarray,
    sources: tuple[Sequence[int], Sequence[int]] = ((), ()),
) -> np.ndarray:
    """Packs `lens[i]` tokens of sequence `i` from position `starts[i]` on, int32 [sum of `shape.sizes`].

    `token_ids` is the flat batch, [sum of lens]; `block_tables` int32 [n, blocks]. `sources` are rows of the batch, and
    the index of the token that each reads of what the step before drew.
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
    tables.reshape(shape.num_sequences, shape.num_blocks)[:num_sequences, : block_tables.shape[1]] = block_tables
    return packed
