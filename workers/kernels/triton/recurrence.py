"""Linear recurrences in Triton, one token after the other. Prompts in bfloat16 whose keys are short take chunks
(`chunked_recurrence.py`).

`workers/kernels/recurrence.py` defines the results. A program keeps a tile of one sequence's states in registers from
its first token to its last, and writes it where a segment ends: a decode step reads and writes each state once. A token
has the same order of operations wherever its segment begins. The host looks at no number of the step, so that captured
graphs run it (`workers/kernels/triton/graphs.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from manta.workers.kernels.recurrence import RecurrentInputs
from manta.workers.kernels.recurrent_step import RecurrentStep
from manta.workers.kernels.triton.chunked_recurrence import recur_chunks
from manta.workers.kernels.triton.launch import padded_size

_DECODE_NUMBERS = 4096
"""Numbers of the states in a program of a decode step: 16 KiB, of which a few programs on each multiprocessor keep its
memory busy.
"""
_NUMBERS = 1024
"""Numbers of the states in a program that computes several tokens, which wait for each other: one warp needs no other
for its sums over a key.
"""
_NUMBERS_OF_WARP = 1024
MOST_CHUNK_KEYS = 64
"""Largest keys whose prompts are computed in chunks. On an H200 chunks of keys of 128 numbers read outside of memory
(Qwen3-Next's shape in bfloat16), while they used the products that `chunked_recurrence.py` now avoids. They have not
run on a GPU since.
"""


class _Tile(NamedTuple):
    """The states of one program."""

    heads: int
    keys: int
    values: int

    @classmethod
    def of(cls, num_heads: int, key_dim: int, value_dim: int, numbers: int) -> _Tile:
        """Returns a tile of about so many numbers, with whole keys. Heads with few numbers share a program."""
        keys = padded_size(key_dim)
        values = min(padded_size(value_dim), max(1, numbers // keys))
        return cls(min(padded_size(num_heads), max(1, numbers // (keys * values))), keys, values)


def recur(inputs: RecurrentInputs, states: torch.Tensor, step: RecurrentStep) -> torch.Tensor:
    """Computes `workers.kernels.recurrence.recur`. Rows that pad a step are not written."""
    query, key, value, log_decay = map(in_rows, inputs[:4])
    beta = None if inputs.beta is None else in_rows(inputs.beta)
    has_fine_decays = log_decay.dim() == 3
    has_chunks = inputs.rates is None and (beta is not None or not has_fine_decays)
    has_chunks = has_chunks and key.shape[2] <= MOST_CHUNK_KEYS
    if has_chunks and inputs.dtype == torch.bfloat16 and not step.is_decode:
        return recur_chunks(RecurrentInputs(query, key, value, log_decay, beta), states, step)
    num_tokens, num_heads, value_dim = value.shape
    key_dim = key.shape[2]
    output = value.new_empty((num_tokens, num_heads, value_dim))
    numbers = _DECODE_NUMBERS if step.is_decode else _NUMBERS
    tile = _Tile.of(num_heads, key_dim, value_dim, numbers)
    grid = (
        triton.cdiv(num_heads, tile.heads),
        triton.cdiv(value_dim, tile.values),
        len(step.sequence_starts) - 1,
    )
    _recur[grid](
        query,
        key,
        value,
        log_decay,
        log_decay if beta is None else beta,
        log_decay if inputs.rates is None else inputs.rates,
        states,
        output,
        step.starts,
        step.reads,
        step.writes,
        step.first_segments,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        log_decay.stride(0),
        0 if beta is None else beta.stride(0),
        NUM_HEADS=num_heads,
        REPEATS=inputs.repeats,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        HAS_BETA=beta is not None,
        HAS_RATES=inputs.rates is not None,
        HAS_FINE_DECAYS=has_fine_decays,
        IS_DECODE=step.is_decode,
        TILE_HEADS=tile.heads,
        TILE_KEYS=tile.keys,
        TILE_VALUES=tile.values,
        num_warps=max(1, tile.heads * tile.keys * tile.values // _NUMBERS_OF_WARP),
    )
    return output


def in_rows(x: torch.Tensor) -> torch.Tensor:
    """Returns x [num_tokens, ...] with the numbers of each token one after the other; tokens may lie apart."""
    return x if x[0].is_contiguous() else x.contiguous()


@triton.jit
def _recur(
    query,
    key,
    value,
    log_decay,
    beta,
    rates,
    states,
    output,
    starts,
    reads,
    writes,
    first_segments,
    query_stride,
    key_stride,
    value_stride,
    decay_stride,
    beta_stride,
    NUM_HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HAS_BETA: tl.constexpr,
    HAS_RATES: tl.constexpr,
    HAS_FINE_DECAYS: tl.constexpr,
    IS_DECODE: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    TILE_VALUES: tl.constexpr,
):
    """Advances one sequence's states [TILE_HEADS, TILE_KEYS, TILE_VALUES] by its tokens."""
    sequence = tl.program_id(2)
    head = tl.program_id(0) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    dim = tl.arange(0, TILE_KEYS)
    column = tl.arange(0, TILE_VALUES)
    if TILE_VALUES < VALUE_DIM:  # else the compiler would not know that it is a multiple of 4
        column += tl.program_id(1) * TILE_VALUES
    has_head = head < NUM_HEADS
    has_key = has_head[:, None] & (dim < KEY_DIM)[None, :]
    has_value = has_head[:, None] & (column < VALUE_DIM)[None, :]
    if REPEATS % TILE_HEADS == 0:  # all heads of the program share a key
        key_place = (tl.program_id(0) * TILE_HEADS // REPEATS) * KEY_DIM + dim[None, :]
        has_key_row = (dim < KEY_DIM)[None, :]
    else:
        key_place = (head // REPEATS)[:, None] * KEY_DIM + dim[None, :]
        has_key_row = has_key
    decay_place = head[:, None] * KEY_DIM + dim[None, :]
    value_place = head[:, None] * VALUE_DIM + column[None, :]
    state_place = decay_place[:, :, None] * VALUE_DIM + column[None, None, :]
    in_state = has_key[:, :, None] & (column < VALUE_DIM)[None, None, :]
    state_size: tl.constexpr = NUM_HEADS * KEY_DIM * VALUE_DIM
    rate = 1.0
    if HAS_RATES:
        rate = tl.load(rates + decay_place, mask=has_key, other=0.0)
    sources = query, key, value, log_decay, beta
    strides = query_stride, key_stride, value_stride, decay_stride, beta_stride
    places = key_place, value_place, decay_place, head
    masks = has_key, has_key_row, has_value, has_head
    if IS_DECODE:
        slot = tl.load(reads + sequence)
    else:
        first = tl.load(first_segments + sequence)
        end_segment = tl.load(first_segments + sequence + 1)
        slot = tl.load(reads + first, mask=first < end_segment, other=-1)
    if slot < 0:  # a sequence that pads
        return
    state = tl.load(states + slot.to(tl.int64) * state_size + state_place, mask=in_state, other=0.0)
    if IS_DECODE:
        state, result = advance(
            state, sequence, sources, strides, places, masks, rate, HAS_BETA, HAS_RATES, HAS_FINE_DECAYS
        )
        tl.store(output + tl.cast(sequence, tl.int64) * (NUM_HEADS * VALUE_DIM) + value_place, result, mask=has_value)
        slot = tl.load(writes + sequence)
        tl.store(states + slot.to(tl.int64) * state_size + state_place, state, mask=in_state)
    else:
        for segment in range(first, end_segment):
            for row in range(tl.load(starts + segment), tl.load(starts + segment + 1)):
                state, result = advance(
                    state, row, sources, strides, places, masks, rate, HAS_BETA, HAS_RATES, HAS_FINE_DECAYS
                )
                tl.store(
                    output + tl.cast(row, tl.int64) * (NUM_HEADS * VALUE_DIM) + value_place, result, mask=has_value
                )
            slot = tl.load(writes + segment)
            tl.store(states + slot.to(tl.int64) * state_size + state_place, state, mask=in_state)


@triton.jit
def advance(
    state,
    number,
    sources,
    strides,
    places,
    masks,
    rate,
    HAS_BETA: tl.constexpr,
    HAS_RATES: tl.constexpr,
    HAS_FINE_DECAYS: tl.constexpr,
):
    """Returns the states [TILE_HEADS, TILE_KEYS, TILE_VALUES] after a row, and its results [TILE_HEADS, TILE_VALUES].

    Of the tuples, `sources` and `strides` are those of query, key, value, decay and beta.
    """
    query, key, value, log_decay, beta = sources
    query_stride, key_stride, value_stride, decay_stride, beta_stride = strides
    key_place, value_place, decay_place, head = places
    has_key, has_key_row, has_value, has_head = masks
    row = tl.cast(number, tl.int64)
    queries = tl.load(query + row * query_stride + key_place, mask=has_key_row, other=0.0)
    keys = tl.load(key + row * key_stride + key_place, mask=has_key_row, other=0.0)
    values = tl.load(value + row * value_stride + value_place, mask=has_value, other=0.0)
    if HAS_FINE_DECAYS:
        logarithm = tl.load(log_decay + row * decay_stride + decay_place, mask=has_key, other=0.0)
    else:
        logarithm = tl.load(log_decay + row * decay_stride + head, mask=has_head, other=0.0)[:, None]
    if HAS_RATES:
        logarithm = logarithm * rate
    state = state * tl.exp(logarithm)[:, :, None]
    if HAS_BETA:
        rule = tl.load(beta + row * beta_stride + head, mask=has_head, other=0.0)
        values = (values - tl.sum(state * keys[:, :, None], axis=1)) * rule[:, None]
    state = state + keys[:, :, None] * values[:, None, :]
    return state, tl.sum(state * queries[:, :, None], axis=1)
