"""Builds the sampler's tables from a step's sample points, for the device to read. Plain numpy, on the host.

Edits of single tokens become a list (`sampler.edit`). Allowed tokens are combined with the constraint's mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from manta.structured.masks import LATE, MaskBatch, row_words
from manta.workers.jax_worker.sampler import IS_LATE, IS_MASKED, NUM_EDIT_ROWS, NUM_EDITS, Points
from manta.workers.sampling.noise import noise_keys
from manta.workers.sampling.sampling_state import SamplingState, SequenceState


def point_table(
    size: int, sequences: list[SequenceState], positions: Sequence[int], state: SamplingState
) -> np.ndarray:
    """Returns a table of `size` points, int32 [fields of `Points`, size]. The first ones are the given points, without
    masks.
    """
    count = len(sequences)
    table = np.zeros((len(Points._fields), size), dtype=np.int32)
    points = Points(*table)  # views
    parameters = state.table[[sequence.row for sequence in sequences]]
    keys = noise_keys(parameters["seed"], np.asarray(positions, dtype=np.int64)).view(np.int32)
    points.key_low[:count], points.key_high[:count] = keys[:, 0], keys[:, 1]
    points.top_k[:count] = parameters["top_k"]
    for name in ("inverse_temperature", "top_p", "log_min_p"):
        getattr(points, name)[:count] = parameters[name].view(np.int32)
    return table


def mask_rows(
    table: np.ndarray, sequences: list[SequenceState], masks: MaskBatch | None, vocab_size: int
) -> np.ndarray | None:
    """Marks masked and late points in `table`. Returns the masks, int32 [size, words] by point, or None if no point has
    one.
    """
    marks = Points(*table).mask
    rows: np.ndarray | None = None
    for index, sequence in enumerate(sequences):
        slot = -1 if masks is None else masks.slots[index]
        if slot == LATE:
            marks[index] = IS_LATE
            continue
        has_allowed = len(sequence.allowed_ids) > 0 and sequence.processors is None
        if slot < 0 and not has_allowed:
            continue
        if rows is None:
            rows = np.zeros((table.shape[1], row_words(vocab_size)), dtype=np.int32)
        marks[index] = IS_MASKED
        allowed = packed_tokens(sequence.allowed_ids, vocab_size) if has_allowed else None
        if masks is None or slot < 0:
            rows[index] = allowed
        else:
            rows[index] = masks.rows[slot] if allowed is None else masks.rows[slot] & allowed
    return rows


def packed_tokens(token_ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Returns a mask that allows these tokens, int32 [words]."""
    bits = np.zeros(row_words(vocab_size) * 32, dtype=np.uint8)
    bits[token_ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def edit_tables(
    sequences: list[SequenceState], positions: Sequence[int], masks: MaskBatch | None, num_points: int
) -> list[np.ndarray]:
    """Returns the edits of all points as tables for `sampler.edit`; `num_points` marks padding.

    Points with logits processors are edited before those run, so only the constraint's adjustments remain for them.
    """
    adjustments = {} if masks is None else masks.adjustments
    pieces = []
    for index, (sequence, position) in enumerate(zip(sequences, positions, strict=True)):
        if sequence.processors is None or index in adjustments:
            piece = _edits(sequence, position, adjustments.get(index))
            if piece is not None:
                piece[0] = index
                pieces.append(piece)
    if not pieces:
        return []
    flat = np.concatenate(pieces, axis=1)
    tables = []
    for first in range(0, flat.shape[1], NUM_EDITS):
        table = np.zeros((NUM_EDIT_ROWS, NUM_EDITS), dtype=np.int32)
        table[0] = num_points
        part = flat[:, first : first + NUM_EDITS]
        table[:, : part.shape[1]] = part
        tables.append(table)
    return tables


def _edits(
    sequence: SequenceState, position: int, adjustment: tuple[np.ndarray, np.ndarray] | None
) -> np.ndarray | None:
    """Returns one point's edits, int32 [NUM_EDIT_ROWS, n]; None if there are none."""
    params, num_prompt = sequence.params, sequence.num_prompt_tokens
    nothing = np.empty(0, dtype=np.int32)
    banned = bias_ids = counted = seen = nothing
    if sequence.processors is None:
        words = sequence.banned_by_words(position) if params.bad_words_token_ids else []
        stops = sequence.stop_ids if position - num_prompt < params.min_tokens else nothing
        banned = np.concatenate([np.array(words, dtype=np.int32), stops])
        bias_ids = sequence.bias_ids
        if params.repetition_penalty != 1.0:
            seen = sequence.tokens[:position]
        if params.presence_penalty or params.frequency_penalty:
            counted = sequence.tokens[num_prompt:position]
    adjusted = nothing if adjustment is None else adjustment[0]
    ids = np.unique(np.concatenate([banned, bias_ids, counted, seen, adjusted]))
    if not len(ids):
        return None
    table = np.zeros((NUM_EDIT_ROWS, len(ids)), dtype=np.int32)
    table[1] = ids
    bias, penalty, cost, added = (row.view(np.float32) for row in table[2:])
    penalty[:] = 1.0
    bias[np.searchsorted(ids, bias_ids)] = sequence.bias_values if len(bias_ids) else []
    bias[np.searchsorted(ids, banned)] = -np.inf
    penalty[np.searchsorted(ids, np.unique(seen))] = params.repetition_penalty
    output_ids, counts = np.unique(counted, return_counts=True)
    cost[np.searchsorted(ids, output_ids)] = counts.astype(np.float32) * np.float32(
        params.frequency_penalty
    ) + np.float32(params.presence_penalty)
    if adjustment is not None:
        np.add.at(added, np.searchsorted(ids, adjusted), adjustment[1])
    return table
