"""Linear recurrences in chunks of tokens in Triton, for prompts: products of matrices on tensor cores.

`workers/kernels/recurrence.py` defines the results, and its `chunked` the mathematics (Yang et al., 2024; Dao and Gu,
2024). The flat rows of a step are cut into blocks of a fixed length, and a chunk is what one segment has of a block, so
the host plans nothing. A first kernel computes what needs no state, for all chunks at once: how a chunk's queries see
its keys, and the inverse of the delta rule's triangular system. A second one walks through the chunks of each sequence
with a tile of its states in registers, and writes them where a segment ends.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from manta.workers.kernels.recurrence import RecurrentInputs
from manta.workers.kernels.recurrent_step import RecurrentStep
from manta.workers.kernels.triton.launch import needs_wide_dot, padded_size

_CHUNK = 32
"""Rows of a block with one decay a head."""
_FINE_CHUNK = 16
"""Rows of a block with a decay for each dimension of the key, whose pairs of rows are not products of matrices."""
_STATE_NUMBERS = 2048
"""Numbers of the states in a program, as registers allow."""
_KEY_PART = 64
"""Dimensions of the keys that are multiplied at a time where no state is needed."""
_WARPS = 2
"""Too few for the products of warp groups, which Triton from 3.4 on compiles wrongly for Hopper in chunks of 64 rows:
results that are off by half, or reads outside of memory (flash-linear-attention's issue 984, Triton's 11366).
"""
_LEAST = 16
"""Smallest side of a product on tensor cores."""


def recur_chunks(inputs: RecurrentInputs, states: torch.Tensor, step: RecurrentStep) -> torch.Tensor:
    """Computes `workers.kernels.recurrence.recur` in products of bfloat16, for activations that are rounded to it.

    The inputs are without `rates`, and have a decay for each dimension of a key only with `beta`. The numbers of each
    token lie one after the other. Rows that pad a step are not written.
    """
    value, log_decay, beta = inputs.value, inputs.log_decay, inputs.beta
    rounded = torch.float32 if needs_wide_dot(torch.bfloat16) else torch.bfloat16
    query, key = inputs.query.to(rounded), inputs.key.to(rounded)
    num_tokens, num_heads, value_dim = value.shape
    key_dim, has_fine_decays = key.shape[2], log_decay.dim() == 3
    chunk = _FINE_CHUNK if has_fine_decays else _CHUNK
    output = value.new_empty((num_tokens, num_heads, value_dim))
    scores = query.new_empty((num_tokens, num_heads, chunk))
    solved = scores if beta is None else torch.empty_like(scores)
    strides = query.stride(0), key.stride(0), log_decay.stride(0), 0 if beta is None else beta.stride(0)
    keys = padded_size(key_dim, _LEAST)
    values = min(max(_LEAST, _STATE_NUMBERS // keys), padded_size(value_dim, _LEAST))
    form = {
        "NUM_HEADS": num_heads,
        "REPEATS": inputs.repeats,
        "KEY_DIM": key_dim,
        "HAS_BETA": beta is not None,
        "HAS_FINE_DECAYS": has_fine_decays,
        "CHUNK": chunk,
        "TILE_KEYS": keys,
        "ROUNDS": rounded == torch.bfloat16,
    }
    arrays = query, key, log_decay, log_decay if beta is None else beta
    _recur_within[(num_heads, triton.cdiv(num_tokens, chunk))](
        *arrays, scores, solved, step.row_segments, *strides, num_tokens, **form,
        KEY_PART=min(_KEY_PART, keys), num_warps=_WARPS,
    )  # fmt: skip
    _recur_chunks[(num_heads, triton.cdiv(value_dim, values), len(step.sequence_starts) - 1)](
        *arrays[:3], value, scores, solved, states, output, step.starts, step.reads, step.writes, step.first_segments,
        *strides[:3], value.stride(0), **form, VALUE_DIM=value_dim, TILE_VALUES=values,
        num_warps=_WARPS, num_stages=1,
    )  # fmt: skip
    return output


@triton.jit(do_not_specialize=["num_tokens"])
def _recur_within(
    query,
    key,
    log_decay,
    beta,
    scores,
    solved,
    row_segments,
    query_stride,
    key_stride,
    decay_stride,
    beta_stride,
    num_tokens,
    NUM_HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    HAS_BETA: tl.constexpr,
    HAS_FINE_DECAYS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    ROUNDS: tl.constexpr,
    KEY_PART: tl.constexpr,
):
    """Computes one block and head in each program: `scores`, the products of queries and keys with the decays between
    them, and `solved`, the inverse of `I + beta * key key^T` below the diagonal, times beta. In both, rows see only
    those of their own segment.
    """
    head = tl.program_id(0)
    place = tl.arange(0, CHUNK)
    number = tl.program_id(1) * CHUNK + place
    segment = tl.load(row_segments + number, mask=number < num_tokens, other=-1)
    if tl.max(segment, axis=0) < 0:  # rows that pad
        return
    is_own = segment >= 0
    row = number.to(tl.int64)
    # Columns are the later rows and rows the earlier ones: what the inverse needs of a row is then a column
    sees = (segment[:, None] == segment[None, :]) & (place[:, None] <= place[None, :])
    between_keys = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    between_queries = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    if HAS_FINE_DECAYS:
        dim = tl.arange(0, TILE_KEYS)
        in_keys = is_own[:, None] & (dim < KEY_DIM)[None, :]
        key_place = head // REPEATS * KEY_DIM + dim[None, :]
        keys = tl.load(key + row[:, None] * key_stride + key_place, mask=in_keys, other=0.0)
        queries = tl.load(query + row[:, None] * query_stride + key_place, mask=in_keys, other=0.0)
        keys, queries = keys.to(tl.float32), queries.to(tl.float32)
        decay_place = row[:, None] * decay_stride + head * KEY_DIM + dim[None, :]
        decays = tl.load(log_decay + decay_place, mask=in_keys, other=0.0)
        between = tl.zeros((CHUNK, TILE_KEYS), dtype=tl.float32)  # logarithms of the decays from each row to the later
        for later in range(CHUNK):
            is_later = place[:, None] == later
            between += tl.sum(tl.where(is_later, decays, 0.0), axis=0)[None, :]
            between = tl.where(place[:, None] < later, between, 0.0)
            weights = tl.exp(between) * keys
            of_key = tl.sum(tl.sum(tl.where(is_later, keys, 0.0), axis=0)[None, :] * weights, axis=1)
            of_query = tl.sum(tl.sum(tl.where(is_later, queries, 0.0), axis=0)[None, :] * weights, axis=1)
            is_column = place[None, :] == later
            between_keys = tl.where(is_column, of_key[:, None], between_keys)
            between_queries = tl.where(is_column, of_query[:, None], between_queries)
    else:
        decays = tl.load(log_decay + row * decay_stride + head, mask=is_own, other=0.0)
        # In float32, a strong decay would swallow the differences of those after it. Each segment has a sum of its own,
        # so that infinite numbers of one sequence do not come into another.
        total = tl.sum(tl.where(sees, decays.to(tl.float64)[:, None], 0.0), axis=0)
        for part in range(0, TILE_KEYS, KEY_PART):
            dim = part + tl.arange(0, KEY_PART)
            in_keys = is_own[:, None] & (dim < KEY_DIM)[None, :]
            key_place = head // REPEATS * KEY_DIM + dim[None, :]
            keys = tl.load(key + row[:, None] * key_stride + key_place, mask=in_keys, other=0.0)
            queries = tl.load(query + row[:, None] * query_stride + key_place, mask=in_keys, other=0.0)
            between_queries = product(keys, tl.trans(queries), between_queries, ROUNDS)
            if HAS_BETA:
                between_keys = product(keys, tl.trans(keys), between_keys, ROUNDS)
        between = tl.exp(tl.where(sees, (total[None, :] - total[:, None]).to(tl.float32), float("-inf")))
        between_queries = between_queries * between
        between_keys = between_keys * between
    between_queries = tl.where(sees, between_queries, 0.0)
    to = (row[None, :] * NUM_HEADS + head) * CHUNK + place[:, None]
    tl.store(scores + to, between_queries.to(scores.dtype.element_ty), mask=is_own[None, :])
    if HAS_BETA:
        rule = tl.load(beta + row * beta_stride + head, mask=is_own, other=0.0)
        system = between_keys * rule[None, :]
        # Infinite numbers of one segment would come into others by products with zeros
        counts = sees & (place[:, None] < place[None, :]) & (tl.abs(system) < float("inf"))
        system = tl.where(counts, system, 0.0)
        inverse = inverted(system, CHUNK)
        of_rows = (row[:, None] * NUM_HEADS + head) * CHUNK + place[None, :]
        tl.store(solved + of_rows, (inverse * rule[None, :]).to(solved.dtype.element_ty), mask=is_own[:, None])


@triton.jit
def inverted(system, CHUNK: tl.constexpr):
    """Returns the inverse of `I + system^T` [CHUNK, CHUNK], where `system` has numbers above its diagonal only: each
    row follows from those before it.
    """
    place = tl.arange(0, CHUNK)
    inverse = tl.where(place[:, None] == place[None, :], 1.0, 0.0)
    for later in range(1, CHUNK):
        factors = tl.sum(tl.where(place[None, :] == later, system, 0.0), axis=1)
        change = tl.sum(factors[:, None] * inverse, axis=0)
        inverse = tl.where(place[:, None] == later, inverse - change[None, :], inverse)
    return inverse


@triton.jit
def _recur_chunks(
    query,
    key,
    log_decay,
    value,
    scores,
    solved,
    states,
    output,
    starts,
    reads,
    writes,
    first_segments,
    query_stride,
    key_stride,
    decay_stride,
    value_stride,
    NUM_HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    HAS_BETA: tl.constexpr,
    HAS_FINE_DECAYS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    ROUNDS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_VALUES: tl.constexpr,
):
    """Advances one sequence's states [TILE_KEYS, TILE_VALUES] of one head by its chunks."""
    head = tl.program_id(0)
    sequence = tl.program_id(2)
    first = tl.load(first_segments + sequence)
    end_segment = tl.load(first_segments + sequence + 1)
    if first == end_segment:  # a sequence that pads
        return
    dim = tl.arange(0, TILE_KEYS)
    column = tl.program_id(1) * TILE_VALUES + tl.arange(0, TILE_VALUES)
    has_dim = dim < KEY_DIM
    has_column = column < VALUE_DIM
    in_state = has_dim[:, None] & has_column[None, :]
    place_in_state = (head * KEY_DIM + dim[:, None]) * VALUE_DIM + column[None, :]
    state_size: tl.constexpr = NUM_HEADS * KEY_DIM * VALUE_DIM
    slot = tl.load(reads + first).to(tl.int64)
    state = tl.load(states + slot * state_size + place_in_state, mask=in_state, other=0.0)
    place = tl.arange(0, CHUNK)
    key_place = head // REPEATS * KEY_DIM + dim[None, :]
    value_place = head * VALUE_DIM + column[None, :]
    nothing = tl.zeros((CHUNK, TILE_VALUES), dtype=tl.float32)
    for segment in range(first, end_segment):
        start = tl.load(starts + segment)
        end = tl.load(starts + segment + 1)
        for block in range(start // CHUNK, tl.cdiv(end, CHUNK)):
            first_row = tl.cast(block, tl.int64) * CHUNK
            number = block * CHUNK + place
            is_own = (number >= start) & (number < end)
            in_keys = is_own[:, None] & has_dim[None, :]
            in_values = is_own[:, None] & has_column[None, :]
            keys_at = key + first_row * key_stride + place[:, None] * key_stride + key_place
            keys = tl.load(keys_at, mask=in_keys, other=0.0)
            queries_at = query + first_row * query_stride + place[:, None] * query_stride + key_place
            queries = tl.load(queries_at, mask=in_keys, other=0.0)
            values_at = value + first_row * value_stride + place[:, None] * value_stride + value_place
            values = tl.load(values_at, mask=in_values, other=0.0)
            within = (first_row * NUM_HEADS + head) * CHUNK + place[:, None] * (NUM_HEADS * CHUNK) + place[None, :]
            own_scores = tl.load(scores + within, mask=is_own[:, None], other=0.0)
            # Sums from the chunk's start and to its end, without a difference of two: a strong decay would swallow it
            is_before = is_own & (number + 1 < end) & (place + 1 < CHUNK)
            if HAS_FINE_DECAYS:
                decays_at = log_decay + first_row * decay_stride + place[:, None] * decay_stride
                decays_at += head * KEY_DIM + dim[None, :]
                decays = tl.load(decays_at, mask=in_keys, other=0.0)
                later_decays = tl.load(decays_at + decay_stride, mask=is_before[:, None] & has_dim[None, :], other=0.0)
                decay = tl.exp(tl.sum(decays, axis=0))[:, None]
                since = tl.exp(tl.cumsum(decays, axis=0))
                until = tl.exp(tl.cumsum(later_decays, axis=0, reverse=True))
            else:
                decays_at = log_decay + first_row * decay_stride + place * decay_stride + head
                decays = tl.load(decays_at, mask=is_own, other=0.0)
                later_decays = tl.load(decays_at + decay_stride, mask=is_before, other=0.0)
                decay = tl.exp(tl.sum(decays, axis=0))
                since = tl.exp(tl.cumsum(decays, axis=0))[:, None]
                until = tl.exp(tl.cumsum(later_decays, axis=0, reverse=True))[:, None]
            if HAS_FINE_DECAYS:
                from_start = product(queries * since, state, nothing, ROUNDS)
            else:
                from_start = product(queries, state, nothing, ROUNDS) * since
            if HAS_BETA:
                inverse = tl.load(solved + within, mask=is_own[:, None], other=0.0)
                if HAS_FINE_DECAYS:
                    values -= product(keys * since, state, nothing, ROUNDS)
                else:
                    values -= product(keys, state, nothing, ROUNDS) * since
                values = product(inverse, values, nothing, ROUNDS)
            result = product(own_scores, values, from_start, ROUNDS)
            results_at = output + first_row * (NUM_HEADS * VALUE_DIM) + place[:, None] * (NUM_HEADS * VALUE_DIM)
            tl.store(results_at + value_place, result, mask=in_values)
            if HAS_FINE_DECAYS:
                state = product(tl.trans(keys * until), values, state * decay, ROUNDS)
            else:
                state = product(tl.trans(keys), values * until, state * decay, ROUNDS)
        slot = tl.load(writes + segment).to(tl.int64)
        tl.store(states + slot * state_size + place_in_state, state, mask=in_state)


@triton.jit
def product(left, right, addend, ROUNDS: tl.constexpr):
    """Returns `left @ right + addend` in float32, the factors rounded to bfloat16 with `ROUNDS`."""
    if ROUNDS:
        left, right = left.to(tl.bfloat16), right.to(tl.bfloat16)
    return tl.dot(left, right, addend)
