"""The softmax over paged keys that every program of attention runs (`attention.py`), tile by tile.

It is that of FlashAttention-2 (Dao, 2023) in powers of two: scores are logits in units of ln 2. The cap on them is
Gemma 2's. With latent attention (`TAIL_DIM`) a tile of latent vectors is read once, as keys and as values, beside the
rotated dimensions of the keys, the tail.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def places_of(dim, HEAD_DIM: tl.constexpr, TAIL_DIM: tl.constexpr):
    """Returns where dimensions of values lie in a head: of a cached head with a tail, those of the latent vector."""
    if TAIL_DIM == 0:
        return dim
    HALF: tl.constexpr = (HEAD_DIM - TAIL_DIM) // 2
    return TAIL_DIM // 2 + dim % HALF + dim // HALF * (HEAD_DIM // 2)


@triton.jit
def tail_places_of(dim, HEAD_DIM: tl.constexpr, TAIL_DIM: tl.constexpr):
    """Returns where the dimensions of the tail lie in a head."""
    HALF: tl.constexpr = TAIL_DIM // 2
    return dim % HALF + dim // HALF * (HEAD_DIM // 2)


@triton.jit
def _load(places, dim, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Returns what lies at `places`, with zeros from dimension `DIM` on."""
    if DIM == PADDED:
        return tl.load(places)
    return tl.load(places, mask=dim < DIM, other=0.0)


@triton.jit
def _dot(a, b, WIDE: tl.constexpr):
    if WIDE:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    # For float32: three products on tensor cores are about as exact as one without them, which would spill registers
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _over_tile(
    query,
    tail,
    position,
    first_seen,
    k_cache,
    v_cache,
    table,
    cached_head,
    first,
    end,
    factor,
    cap,
    largest,
    total,
    attended,
    NUM_CACHED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TAIL_DIM: tl.constexpr,
    PADDED_TAIL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_VISIBLE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Continues the softmax of `over_keys` over the tile of keys from `first` on. With `IS_VISIBLE` every row sees
    every key of the tile, so that nothing is masked.
    """
    dim = tl.arange(0, PADDED_DIM)
    key = first + tl.arange(0, TILE_KEYS)
    # Past the end the last key is read again, which nobody sees, so that no load has a mask of keys
    read = key if IS_VISIBLE else tl.minimum(key, end - 1)
    block = tl.load(table + read // BLOCK_SIZE).to(tl.int64)
    offset = block * BLOCK_STRIDE + (read % BLOCK_SIZE * NUM_CACHED + cached_head) * HEAD_DIM
    # Keys and values in the same order, so that their addresses are computed once
    places = offset[:, None] + places_of(dim, HEAD_DIM, TAIL_DIM)[None, :]
    keys = _load(k_cache + places, dim[None, :], HEAD_DIM - TAIL_DIM, PADDED_DIM)
    scores = _dot(query, tl.trans(keys), WIDE)
    if TAIL_DIM > 0:
        tail_dim = tl.arange(0, PADDED_TAIL)
        tail_places = offset[:, None] + tail_places_of(tail_dim, HEAD_DIM, TAIL_DIM)[None, :]
        tail_keys = _load(k_cache + tail_places, tail_dim[None, :], TAIL_DIM, PADDED_TAIL)
        scores += _dot(tail, tl.trans(tail_keys), WIDE)
    if HAS_CAP:
        scores = cap * (1.0 - 2.0 / (tl.exp2(scores * factor) + 1.0))  # a power that overflows gives the cap
        factor = 1.0
    if not IS_VISIBLE:
        visible = (key < end)[None, :] & (key[None, :] <= position[:, None])
        if HAS_WINDOW:
            visible = visible & (key[None, :] >= first_seen[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, axis=1) * factor)
    shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp2(scores * factor - shift[:, None])
    decay = tl.exp2(largest - shift)
    values = keys if TAIL_DIM > 0 else _load(v_cache + places, dim[None, :], HEAD_DIM, PADDED_DIM)
    total = total * decay + tl.sum(weights, axis=1)
    attended = attended * decay[:, None] + _dot(weights.to(values.dtype), values, WIDE)
    return new_largest, total, attended


@triton.jit
def over_keys(
    query,
    tail,
    position,
    first_seen,
    k_cache,
    v_cache,
    table,
    cached_head,
    begin,
    end,
    factor,
    cap,
    largest,
    total,
    attended,
    NUM_CACHED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TAIL_DIM: tl.constexpr,
    PADDED_TAIL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_VISIBLE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Continues the softmax of `query` [rows, dim], and of `tail` [rows, tail dim] if keys have one, over the visible
    keys in `[begin, end)`. Returns the updated state.

    The state is `largest` [rows], the largest score; `total` [rows], the sum of powers of two relative to it; and
    `attended` [rows, dim], which is not yet divided by the sum. A row sees the keys up to its `position`, with a window
    only those from its `first_seen` on. With `HAS_VISIBLE`, the tiles that every row sees come first and are not
    masked.
    """
    masked_begin = begin
    if HAS_VISIBLE:
        num_visible = tl.minimum(end, tl.min(position, axis=0) + 1) - begin
        masked_begin = begin + tl.maximum(num_visible, 0) // TILE_KEYS * TILE_KEYS
        for first in range(begin, masked_begin, TILE_KEYS):
            largest, total, attended = _over_tile(
                query, tail, position, first_seen, k_cache, v_cache, table, cached_head, first, end, factor, cap,
                largest, total, attended, NUM_CACHED, HEAD_DIM, PADDED_DIM, TAIL_DIM, PADDED_TAIL, BLOCK_SIZE,
                BLOCK_STRIDE, TILE_KEYS, HAS_WINDOW, True, HAS_CAP, WIDE,
            )  # fmt: skip
    for first in range(masked_begin, end, TILE_KEYS):
        largest, total, attended = _over_tile(
            query, tail, position, first_seen, k_cache, v_cache, table, cached_head, first, end, factor, cap,
            largest, total, attended, NUM_CACHED, HEAD_DIM, PADDED_DIM, TAIL_DIM, PADDED_TAIL, BLOCK_SIZE,
            BLOCK_STRIDE, TILE_KEYS, HAS_WINDOW, False, HAS_CAP, WIDE,
        )  # fmt: skip
    return largest, total, attended
