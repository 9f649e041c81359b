"""The flat batch of a step as one int32 array of static size: the host packs it, the devices unpack it.

A step has one of a few sizes (`sizes_up_to`), so that all programs are compiled at start. A single array takes a single
transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from manta.workers.step import SCRATCH_STATE, ZERO_STATE, StateUse

LEAST_SIZE = 8
"""Smallest number of tokens or sample points of a program, because TPUs compute eight rows at a time."""
SHORT_TOKENS = 8
"""Most tokens of a sequence whose recurrent states advance together with those of other sequences, one token of each
at a time. Those of longer sequences advance in chunks, one sequence after the other.
"""
CHUNK_TOKENS = 64
"""Most tokens of a chunk, as in the kernels of Yang et al. (2024)."""


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
    has_states: bool = False
    """Whether layers have recurrent states, whose slots are then part of the batch."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each field of `StepBatch`, then of each of `StateBatch`."""
        tokens, sequences = self.num_tokens, self.num_sequences
        tables = self.num_groups * sequences * self.num_blocks
        of_states = (sequences, tokens, tokens, 1, 4 * tokens, 1) if self.has_states else ()
        return tokens, tokens, tokens, tokens, sequences + 1, sequences, 1, tables, *of_states


class StateBatch(NamedTuple):
    """The slots of recurrent states of a batch, int32 arrays. A sequence's tokens are cut into segments at the
    positions whose states are kept. Each segment starts from the state that the one before it has written.
    """

    reads: jax.Array
    """The slot with the state before each sequence's first token, [num_sequences]."""
    ends: jax.Array
    """Index of each segment's last token, [num_tokens]; `num_tokens` for padding."""
    slots: jax.Array
    """The slot that gets the state after each segment, [num_tokens]; `SCRATCH_STATE` for padding."""
    num_segments: jax.Array
    """Number of segments of the step, [1]."""
    chunks: jax.Array
    """The chunks of sequences with more than `SHORT_TOKENS` tokens, [4, num_tokens]: the first token, the number of
    tokens, the slot with the state before them, and the one that gets the state after them.
    """
    num_chunks: jax.Array
    """Number of chunks of the step, [1]."""


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
    states: StateBatch | None = None
    """The slots of recurrent states; None for a model without."""

    @classmethod
    def unpack(cls, packed: jax.Array, shape: BatchShape) -> StepBatch:
        *fields, tables = _fields(packed, shape)[:8]
        states = _state_fields(packed, shape) if shape.has_states else None
        by_group = tables.reshape(shape.num_groups, shape.num_sequences, shape.num_blocks)
        return cls._make([*fields, by_group, states])

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
    states: Sequence[StateUse] = (),
) -> np.ndarray:
    """Packs `lens[i]` tokens of each sequence `i` from position `starts[i]`. Returns int32 [sum of `shape.sizes`].

    `token_ids` is the flat batch, [sum of lens]; `block_tables` are int32 [n, blocks] of each group of layers.
    `sources` are the rows that take a token of the previous step's draw, and the index of that token for each. `states`
    are the slots of each sequence, if the shape has them.
    """
    packed = np.zeros(sum(shape.sizes), dtype=np.int32)
    tokens, drawn, positions, sequences, query_start, context_lens, count, tables = _fields(packed, shape)[:8]
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
    if shape.has_states:
        _fill_states(_state_fields(packed, shape), starts.tolist(), lens.tolist(), states)
    return packed


def _fields(packed: Any, shape: BatchShape) -> list[Any]:
    """Returns the fields of a batch, flat parts of `packed`."""
    ends = np.cumsum(shape.sizes).tolist()
    return [packed[end - size : end] for size, end in zip(shape.sizes, ends, strict=True)]


def _state_fields(packed: Any, shape: BatchShape) -> StateBatch:
    fields = StateBatch(*_fields(packed, shape)[8:])
    return fields._replace(chunks=fields.chunks.reshape(4, -1))


def _fill_states(batch: Any, starts: list[int], lens: list[int], uses: Sequence[StateUse]) -> None:
    """Writes the fields of `batch`, a `StateBatch` of views, for sequences that compute `lens[i]` tokens from position
    `starts[i]`.
    """
    batch.reads[:], batch.slots[:], batch.ends[:] = ZERO_STATE, SCRATCH_STATE, len(batch.ends)
    num_segments = num_chunks = first_row = 0
    for index, (start, num_tokens, use) in enumerate(zip(starts, lens, uses, strict=True)):
        batch.reads[index] = read = use.read
        row = first_row
        for position, slot in use.writes:
            end = first_row + position - start
            batch.ends[num_segments], batch.slots[num_segments] = end - 1, slot
            num_segments += 1
            chunks = range(row, end, CHUNK_TOKENS) if num_tokens > SHORT_TOKENS else ()
            for chunk in chunks:
                batch.chunks[:, num_chunks] = chunk, min(CHUNK_TOKENS, end - chunk), read, slot
                num_chunks += 1
                read = slot  # a later chunk goes on from there
            row = end
        first_row += num_tokens
    batch.num_segments[0], batch.num_chunks[0] = num_segments, num_chunks
