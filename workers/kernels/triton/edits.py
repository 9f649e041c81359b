"""Edits logits before the mask, for all rows that have edits at once: allowed tokens, bad words, `min_tokens`, biases,
penalties, and a constraint's adjustments.

`torch_sampler.edit` defines the result, row by row. Here the host gathers all edits into one transfer, and at most five
kernels write float32 copies of the edited rows, 4 bytes for each token. The edits are not part of the pass that draws,
because filters read each row a dozen times or more. Each time that pass reads 4 bytes for each token of an edited copy
instead of logits, counts and biases. Rows without edits cost nothing.

The copies are a function of the tokens that the host knows when it draws. Each row's tokens are counted again in the
memory of its copy, before logits replace the counts. No counts stay on the device, so drafts, preemption and forks need
no code here.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from manta.structured.masks import MaskBatch
from manta.workers.kernels.triton.launch import padded_size, place_together
from manta.workers.sampling.sampling_state import SequenceState

CHUNK = 1024
"""Tokens of the vocabulary that a program copies, 8 for each thread; an H100's multiprocessor then holds 36 warps."""
_BLOCK = 1024
"""Number of a sequence's tokens, or of entries, of one program."""

_NUM_COLUMNS = tl.constexpr(8)
_POINT, _FIRST, _END, _NUM_PROMPT = (tl.constexpr(column) for column in range(4))
_ONLY_ALLOWED, _REPETITION, _PRESENCE, _FREQUENCY = (tl.constexpr(column) for column in range(4, 8))
"""Columns of the table of edited rows, int32; the last three hold the bits of a float32. `_FIRST` and `_END` bound the
row's tokens, of which the first `_NUM_PROMPT` are the prompt's.
"""
_IN_PROMPT, _COUNT = tl.constexpr(1 << 30), tl.constexpr((1 << 30) - 1)
"""Bit of a count that marks a token of the prompt, and mask of the bits that count its occurrences in the output."""

Entries = list[tuple[int, np.ndarray, np.ndarray]]
"""(sample point, token ids int32 [n], values float32 [n]) for each edited point."""


class Edits(NamedTuple):
    """The edits of a step. Every array is int32."""

    points: np.ndarray
    """Sample point of each edited row, [R]; rows with penalties come first."""
    num_counted: int
    """Number of rows with penalties."""
    longest: int
    """Most tokens of a row in `tokens`."""
    table: np.ndarray
    """Table of edited rows, [R, 8]."""
    tokens: np.ndarray
    """Tokens that rows with penalties count: the output's, and the prompt's if there is a repetition penalty."""
    replaced: np.ndarray
    """(row, token, bits of a float32), [n, 3], added to the model's logits before the penalties. If a row has allowed
    tokens, these are its only entries, and all other tokens are masked.
    """
    added: np.ndarray
    """(row, token, bits of a float32), [n, 3], added after the penalties; -inf masks the token."""


def edits_of(
    rows: np.ndarray, sequences: list[SequenceState], positions: np.ndarray, masks: MaskBatch | None
) -> Edits | None:
    """Returns the edits of sample points, or None if there are none. `rows` are the points' rows of
    `SamplingState.table`.
    """
    num_output = positions - rows["num_prompt_tokens"]
    has_penalties = rows["repetition_penalty"] != 1
    has_penalties |= (rows["presence_penalty"] != 0) | (rows["frequency_penalty"] != 0)
    is_replaced = (rows["num_biases"] > 0) | (rows["num_allowed_ids"] > 0)
    may_ban = (rows["num_bad_words"] > 0) | (num_output < rows["min_tokens"])
    adjusted = {} if masks is None else masks.adjustments
    if not (adjusted or has_penalties.any() or is_replaced.any() or may_ban.any()):
        return None
    replaced = [(point, *_replacements(sequences[point])) for point in np.flatnonzero(is_replaced).tolist()]
    added = [(point, ids, values) for point, (ids, values) in adjusted.items()]
    for point in np.flatnonzero(may_ban).tolist():
        banned = sequences[point].banned_by_words(int(positions[point]))
        if num_output[point] < rows["min_tokens"][point]:
            banned += sequences[point].stop_ids.tolist()
        if banned:
            added.append((point, np.array(banned, dtype=np.int32), np.full(len(banned), -np.inf, dtype=np.float32)))
    counted = np.flatnonzero(has_penalties)
    others = {point for point, _, _ in itertools.chain(replaced, added)}.difference(counted.tolist())
    points = np.concatenate([counted, sorted(others)]).astype(np.int32)
    if not len(points):
        return None
    first = np.where(rows["repetition_penalty"] != 1, 0, rows["num_prompt_tokens"])
    tokens = [sequences[point].tokens[first[point] : positions[point]] for point in counted.tolist()]
    row_of = {point: row for row, point in enumerate(points.tolist())}
    return Edits(
        points,
        len(counted),
        max(map(len, tokens), default=0),
        _table(points, rows[points], tokens),
        np.concatenate([*tokens, np.empty(0, dtype=np.int32)]),
        _flat(replaced, row_of),
        _flat(added, row_of),
    )


def _replacements(sequence: SequenceState) -> tuple[np.ndarray, np.ndarray]:
    """Returns token ids and what is added to their logits: the allowed tokens if there are any, else
    those with a bias.
    """
    if not len(sequence.allowed_ids):
        return sequence.bias_ids, sequence.bias_values
    bias = sequence.params.logit_bias
    values = [bias.get(token_id, 0.0) for token_id in sequence.params.allowed_token_ids or ()]
    return sequence.allowed_ids, np.array(values, dtype=np.float32)


def _table(points: np.ndarray, rows: np.ndarray, tokens: list[np.ndarray]) -> np.ndarray:
    table = np.zeros((len(points), _NUM_COLUMNS.value), dtype=np.int32)
    ends = np.cumsum([len(each) for each in tokens])
    table[:, _POINT.value] = points
    table[1 : len(tokens), _FIRST.value] = ends[:-1]
    table[: len(tokens), _END.value] = ends
    table[:, _NUM_PROMPT.value] = np.where(rows["repetition_penalty"] != 1, rows["num_prompt_tokens"], 0)
    table[:, _ONLY_ALLOWED.value] = rows["num_allowed_ids"] > 0
    for column, name in ((_REPETITION, "repetition"), (_PRESENCE, "presence"), (_FREQUENCY, "frequency")):
        table[:, column.value] = rows[f"{name}_penalty"].view(np.int32)
    return table


def _flat(entries: Entries, row_of: dict[int, int]) -> np.ndarray:
    """Returns the entries as (row, token, bits of a float32), int32 [n, 3]."""
    if not entries:
        return np.empty((0, 3), dtype=np.int32)
    flat = [np.repeat([row_of[point] for point, _, _ in entries], [len(ids) for _, ids, _ in entries])]
    flat.append(np.concatenate([ids for _, ids, _ in entries]))
    flat.append(np.concatenate([values for _, _, values in entries]).view(np.int32))
    return np.stack(flat, axis=1).astype(np.int32)


def edited_rows(logits: torch.Tensor, edits: Edits, vocab_size: int) -> torch.Tensor:
    """Returns the edited rows before the mask, float32 [R, vocab_size]."""
    device = logits.device
    arrays = {name: getattr(edits, name) for name in ("table", "tokens", "replaced", "added")}
    table, tokens, replaced, added = place_together(arrays, device).values()
    edited = torch.empty((len(edits.points), vocab_size), dtype=torch.float32, device=device)
    counts = edited.view(torch.int32)
    counts[: edits.num_counted].zero_()
    if edits.longest:
        num_blocks = triton.cdiv(edits.longest, _BLOCK)
        _count[(edits.num_counted, num_blocks)](table, tokens, counts, vocab_size, BLOCK=_BLOCK)
    rows = (logits, table, counts, logits.stride(0), vocab_size, edits.num_counted)
    num_replaced, num_added = len(edits.replaced), len(edits.added)
    if num_replaced:
        _compute_replaced[(triton.cdiv(num_replaced, _BLOCK),)](
            *rows, replaced, num_replaced, BLOCK=_BLOCK, enable_fp_fusion=False
        )
    chunk = min(CHUNK, padded_size(vocab_size, 128))
    _edit_rows[(len(edits.points), triton.cdiv(vocab_size, chunk))](*rows, edited, CHUNK=chunk, enable_fp_fusion=False)
    if num_replaced:
        _replace[(triton.cdiv(num_replaced, _BLOCK),)](edited, replaced, num_replaced, vocab_size, BLOCK=_BLOCK)
    if num_added:
        _add[(triton.cdiv(num_added, _BLOCK),)](edited, added, num_added, vocab_size, BLOCK=_BLOCK)
    return edited


@triton.jit
def _count(table, tokens, counts, vocab_size, BLOCK: tl.constexpr):
    """Counts a row's tokens: how often each is in the output, and whether it is in the prompt."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(table + row * _NUM_COLUMNS + _FIRST)
    end = tl.load(table + row * _NUM_COLUMNS + _END)
    num_prompt = tl.load(table + row * _NUM_COLUMNS + _NUM_PROMPT)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = index < end - first
    token = tl.load(tokens + first + index, mask=exists, other=0)
    place = counts + row * vocab_size + token
    tl.atomic_add(place, 1, mask=exists & (index >= num_prompt), sem="relaxed")
    tl.atomic_or(place, _IN_PROMPT, mask=exists & (index < num_prompt), sem="relaxed")


@triton.jit
def _column(table, row, COLUMN: tl.constexpr):
    """Returns the float32 in a column of each row."""
    return tl.load(table + row * _NUM_COLUMNS + COLUMN).to(tl.float32, bitcast=True)


@triton.jit
def _penalised(values, count, table, row):
    """Returns logits under the penalties of their rows; tokens with count 0 have none."""
    repetition = _column(table, row, _REPETITION)
    repeated = tl.where(values > 0.0, tl.div_rn(values, repetition), values * repetition)
    num_output = count & _COUNT
    cost = num_output.to(tl.float32) * _column(table, row, _FREQUENCY) + _column(table, row, _PRESENCE)
    values = tl.where(count != 0, repeated, values)
    return tl.where(num_output > 0, values - cost, values)


@triton.jit(do_not_specialize=["num_counted", "num_entries"])
def _compute_replaced(
    logits, table, counts, logits_stride, vocab_size, num_counted, entries, num_entries, BLOCK: tl.constexpr
):
    """Replaces the bias of each entry by the token's edited logit.

    It starts from the model's logit, so that duplicate entries are harmless, and applies penalties while the counts
    exist.
    """
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = entry < num_entries
    row = tl.load(entries + entry * 3, mask=exists, other=0).to(tl.int64)
    token = tl.load(entries + entry * 3 + 1, mask=exists, other=0)
    bias = tl.load(entries + entry * 3 + 2, mask=exists, other=0).to(tl.float32, bitcast=True)
    point = tl.load(table + row * _NUM_COLUMNS + _POINT).to(tl.int64)
    values = tl.load(logits + point * logits_stride + token, mask=exists, other=0.0).to(tl.float32) + bias
    count = tl.load(counts + row * vocab_size + token, mask=exists & (row < num_counted), other=0)
    values = _penalised(values, count, table, row)
    tl.store(entries + entry * 3 + 2, values.to(tl.int32, bitcast=True), mask=exists)


@triton.jit(do_not_specialize=["num_counted"])
def _edit_rows(logits, table, counts, logits_stride, vocab_size, num_counted, edited, CHUNK: tl.constexpr):
    """Copies a chunk of one row in each program: its logits with penalties replace its counts, or -inf does if the row
    has allowed tokens.
    """
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    exists = token < vocab_size
    point = tl.load(table + row * _NUM_COLUMNS + _POINT).to(tl.int64)
    values = tl.load(logits + point * logits_stride + token, mask=exists, other=0.0).to(tl.float32)
    is_counted = token < tl.where(row < num_counted, vocab_size, 0)
    count = tl.load(counts + row * vocab_size + token, mask=is_counted, other=0)
    values = _penalised(values, count, table, row)
    only_allowed = tl.load(table + row * _NUM_COLUMNS + _ONLY_ALLOWED)
    values = tl.where(only_allowed != 0, float("-inf"), values)
    tl.store(edited + row * vocab_size + token, values, mask=exists)


@triton.jit(do_not_specialize=["num_entries"])
def _replace(edited, entries, num_entries, vocab_size, BLOCK: tl.constexpr):
    """Writes the entries' values to their tokens."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = entry < num_entries
    row = tl.load(entries + entry * 3, mask=exists, other=0).to(tl.int64)
    token = tl.load(entries + entry * 3 + 1, mask=exists, other=0)
    value = tl.load(entries + entry * 3 + 2, mask=exists, other=0).to(tl.float32, bitcast=True)
    tl.store(edited + row * vocab_size + token, value, mask=exists)


@triton.jit(do_not_specialize=["num_entries"])
def _add(edited, entries, num_entries, vocab_size, BLOCK: tl.constexpr):
    """Adds the entries' values. At most one entry of a token is finite, so their order does not matter."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = entry < num_entries
    row = tl.load(entries + entry * 3, mask=exists, other=0).to(tl.int64)
    token = tl.load(entries + entry * 3 + 1, mask=exists, other=0)
    value = tl.load(entries + entry * 3 + 2, mask=exists, other=0).to(tl.float32, bitcast=True)
    tl.atomic_add(edited + row * vocab_size + token, value, mask=exists, sem="relaxed")
