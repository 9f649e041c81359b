"""The softmax over paged keys that every program of attention runs (`attention.py`), tile by tile.

It is that of FlashAttention-2 (Dao, 2023) in powers of two: scores are logits in units of ln 2. The cap on them is
Gemma 2's.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
    position,
    k_cache,
    v_cache,
    table,
    kv_head,
    first,
    end,
    window,
    factor,
    cap,
    largest,
    total,
    attended,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
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
    is_dim = dim < HEAD_DIM
    key = first + tl.arange(0, TILE_KEYS)
    if IS_VISIBLE:
        block = tl.load(table + key // BLOCK_SIZE).to(tl.int64)
    else:
        block = tl.load(table + key // BLOCK_SIZE, mask=key < end, other=0).to(tl.int64)
    offset = ((block * BLOCK_SIZE + key % BLOCK_SIZE) * NUM_KV_HEADS + kv_head) * HEAD_DIM
    key_places = k_cache + offset[None, :] + dim[:, None]
    value_places = v_cache + offset[:, None] + dim[None, :]
    if IS_VISIBLE and HEAD_DIM == PADDED_DIM:
        keys = tl.load(key_places)
    elif IS_VISIBLE:
        keys = tl.load(key_places, mask=is_dim[:, None], other=0.0)
    else:
        keys = tl.load(key_places, mask=(key < end)[None, :] & is_dim[:, None], other=0.0)
    scores = _dot(query, keys, WIDE) * factor
    if HAS_CAP:
        scores = cap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))  # a power that overflows gives the cap
    if not IS_VISIBLE:
        visible = (key < end)[None, :] & (key[None, :] <= position[:, None])
        if HAS_WINDOW:
            visible = visible & (position[:, None] - key[None, :] < window)
        scores = tl.where(visible, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, axis=1))
    shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(largest - shift)
    if IS_VISIBLE and HEAD_DIM == PADDED_DIM:
        values = tl.load(value_places)
    elif IS_VISIBLE:
        values = tl.load(value_places, mask=is_dim[None, :], other=0.0)
    else:
        values = tl.load(value_places, mask=(key < end)[:, None] & is_dim[None, :], other=0.0)
    total = total * decay + tl.sum(weights, axis=1)
    attended = attended * decay[:, None] + _dot(weights.to(values.dtype), values, WIDE)
    return new_largest, total, attended


@triton.jit
def over_keys(
    query,
    position,
    k_cache,
    v_cache,
    table,
    kv_head,
    begin,
    end,
    window,
    factor,
    cap,
    largest,
    total,
    attended,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_VISIBLE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Continues the softmax of `query` [rows, dim] over the visible keys in `[begin, end)`. Returns the updated state.

    The state is `largest` [rows], the largest score; `total` [rows], the sum of powers of two relative to it; and
    `attended` [rows, dim], which is not yet divided by the sum. With `HAS_VISIBLE`, the tiles that every row sees come
    first and are not masked.
    """
    masked_begin = begin
    if HAS_VISIBLE:
        num_visible = tl.minimum(end, tl.min(position, axis=0) + 1) - begin
        masked_begin = begin + tl.maximum(num_visible, 0) // TILE_KEYS * TILE_KEYS
        for first in range(begin, masked_begin, TILE_KEYS):
            largest, total, attended = _over_tile(
                query, position, k_cache, v_cache, table, kv_head, first, end, window, factor, cap, largest, total,
                attended, NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE_KEYS, HAS_WINDOW, True, HAS_CAP, WIDE,
            )  # fmt: skip
    for first in range(masked_begin, end, TILE_KEYS):
        largest, total, attended = _over_tile(
            query, position, k_cache, v_cache, table, kv_head, first, end, window, factor, cap, largest, total,
            attended, NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE_KEYS, HAS_WINDOW, False, HAS_CAP, WIDE,
        )  # fmt: skip
    return largest, total, attended
