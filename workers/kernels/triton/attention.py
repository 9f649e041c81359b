"""Paged attention in Triton: one kernel for prefill chunks, decodes and mixes of both, cut into items of similar length
(`work.py`). A shared prefix is read once for its group, and the results are merged by log-sum-exp.

`reference.paged_attention` defines the result. Splits and their merge follow Flash-Decoding (Dao et al., 2023), and
shared prefixes follow Hydragen (Juravsky et al., 2024). An attention sink is in the sum of the first split from the
start. The query heads of one KV head are rows of one tile (packed GQA), so that its keys are read once for all of them.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.triton.attention_softmax import over_keys
from manta.workers.kernels.triton.launch import needs_wide_dot, num_processors, padded_size, shared_bytes
from manta.workers.kernels.triton.metadata import DeviceMetadata, PrefixRows
from manta.workers.kernels.triton.work import PROGRAMS_PER_PROCESSOR, TILE_ROWS
from manta.workers.models.model_config import HeadShape

LEAST_DOT = 16
"""Smallest side of a matrix product in Triton."""
TILE_BYTES = 16384
"""Bytes of keys, and of values, in one tile of keys."""
MOST_TILE_KEYS = 128
MOST_VISIBLE_DIM = 128
"""Largest head size with a loop of its own for the tiles that every row sees: with 256, two loops spill registers.
"""
MOST_PREFIX_SPLITS = 8
SPLITS_AT_A_TIME = 32
"""Number of splits of a token that are merged in one iteration."""


def paged_attention(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: AttentionMetadata,
    heads: HeadShape,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes `reference.paged_attention`; `metadata` must be a `DeviceMetadata`."""
    num_heads, num_kv_heads, head_dim, scale = heads[:4]
    group = num_heads // num_kv_heads
    output = qkv.new_empty((qkv.shape[0], num_heads * head_dim))
    work = metadata.work if isinstance(metadata, DeviceMetadata) else None
    assert work is not None, "the kernels read how attention is cut"
    tile_tokens = 1 if work.item_tokens == 1 else _tile_tokens(group, qkv.dtype)
    tile_rows = padded_size(tile_tokens * group, LEAST_DOT)
    constants = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": padded_size(head_dim, LEAST_DOT),
        "BLOCK_SIZE": metadata.block_size,
        "TILE_KEYS": _tile_keys(head_dim, k_cache.dtype),
        "HAS_VISIBLE": head_dim <= MOST_VISIBLE_DIM,
        "HAS_CAP": heads.logit_cap != 0,
        "WIDE": needs_wide_dot(qkv.dtype),
    }
    rows = metadata.prefix_rows if isinstance(metadata, DeviceMetadata) and sliding_window is None else None
    caches = (qkv, k_cache, v_cache)
    factors = _factors(scale, heads.logit_cap)
    prefix, num_prefix_splits = output, 0
    first_rows = metadata.context_lens
    prefix_sums = output
    if rows is not None:
        prefix, prefix_sums = _attend_prefixes(caches, metadata, rows, factors, constants)
        first_rows, num_prefix_splits = rows.first_rows, prefix.shape[0]
    partials, log_sums = _partials(max(1, work.num_slots), work.item_tokens, num_heads, head_dim, qkv.device)
    _attend[(work.items.shape[0], num_kv_heads, triton.cdiv(work.item_tokens, tile_tokens))](
        *caches,
        output,
        partials,
        log_sums,
        prefix,
        prefix_sums,
        output if sinks is None else sinks,
        work.items,
        metadata.query_start,
        metadata.context_lens,
        metadata.block_tables,
        first_rows,
        work.item_tokens,
        prefix.shape[1],
        qkv.stride(0),
        metadata.block_tables.stride(0),
        0 if sliding_window is None else sliding_window,
        num_prefix_splits,
        *factors,
        **constants,
        TILE_TOKENS=tile_tokens,
        TILE_ROWS=tile_rows,
        HAS_PREFIX=rows is not None,
        HAS_WINDOW=sliding_window is not None,
        HAS_SINKS=sinks is not None,
        num_warps=_num_warps(head_dim, qkv.dtype),
        num_stages=_num_stages(qkv, tile_rows * constants["PADDED_DIM"]),
    )
    if work.merges.shape[0]:
        _merge[(work.merges.shape[0], num_heads)](
            output,
            partials,
            log_sums,
            work.merges,
            work.item_tokens,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            PADDED_DIM=constants["PADDED_DIM"],
            SPLITS_AT_A_TIME=SPLITS_AT_A_TIME,
            num_warps=4,
        )
    return output


def _attend_prefixes(
    caches: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    metadata: AttentionMetadata,
    rows: PrefixRows,
    factors: tuple[float, float],
    constants: dict[str, int | bool],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the attention of every row of a group over its shared keys, float32 [splits, num_rows, num_heads,
    head_dim], and the base-2 logarithms of the softmax sums, [splits, num_rows, num_heads].
    """
    qkv = caches[0]
    group, num_kv_heads, head_dim = constants["GROUP"], constants["NUM_KV_HEADS"], constants["HEAD_DIM"]
    tile_tokens = _tile_tokens(group, qkv.dtype)
    tile_rows = padded_size(tile_tokens * group, LEAST_DOT)
    num_tiles = rows.num_rows // tile_tokens + rows.num_groups
    num_splits = _num_prefix_splits(triton.cdiv(rows.num_rows, tile_tokens) * num_kv_heads, qkv.device)
    partials, log_sums = _partials(num_splits, rows.num_rows, group * num_kv_heads, head_dim, qkv.device)
    _attend_prefix[(num_tiles, num_kv_heads, num_splits)](
        *caches,
        partials,
        log_sums,
        rows.row_start,
        rows.tokens,
        rows.leaders,
        rows.group_lens,
        metadata.block_tables,
        rows.num_groups,
        rows.num_rows,
        qkv.stride(0),
        metadata.block_tables.stride(0),
        *factors,
        **constants,
        TILE_TOKENS=tile_tokens,
        TILE_ROWS=tile_rows,
        num_warps=_num_warps(head_dim, qkv.dtype),
        num_stages=_num_stages(qkv, tile_rows * constants["PADDED_DIM"]),
    )
    return partials, log_sums


def _factors(scale: float, cap: float) -> tuple[float, float]:
    """Returns the factor on products of queries and keys, and the bound of capped ones, as the kernels take them. The
    scores are logits in units of ln 2. The kernels compute `tanh(x)` as `1 - 2 / (2 ** (2 x log2(e)) + 1)`.
    """
    log2_e = math.log2(math.e)
    return (2 * scale / cap * log2_e, cap * log2_e) if cap else (scale * log2_e, 0.0)


def _partials(
    num_splits: int, num_rows: int, num_heads: int, head_dim: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (num_splits, num_rows, num_heads)
    return torch.empty((*shape, head_dim), device=device), torch.empty(shape, device=device)


def _num_prefix_splits(num_programs: int, device: torch.device) -> int:
    """Returns the number of programs that read one group's keys; `num_programs` would run without splits.

    It does not depend on the number of keys, because a captured graph runs for every length.
    """
    wanted = PROGRAMS_PER_PROCESSOR * num_processors(device)
    return min(MOST_PREFIX_SPLITS, max(1, wanted // max(1, num_programs)))


def _tile_tokens(group: int, dtype: torch.dtype) -> int:
    """Returns the number of query tokens of a tile.

    One size serves every step that does more than decode, because each size is a separate kernel, which takes seconds
    to compile. A tile of float32 has `LEAST_DOT` rows, because a product of three passes takes four times the
    registers.
    """
    return max(1, (TILE_ROWS if dtype.itemsize == 2 else LEAST_DOT) // group)


def _num_warps(head_dim: int, dtype: torch.dtype) -> int:
    """Returns the number of warps. Every warp holds all rows of its queries, and 256 float32 exceed the registers of
    four.
    """
    return 8 if dtype.itemsize == 4 and head_dim > 128 else 4


def _tile_keys(head_dim: int, dtype: torch.dtype) -> int:
    fitting = TILE_BYTES // (padded_size(head_dim, LEAST_DOT) * dtype.itemsize)
    return max(LEAST_DOT, min(MOST_TILE_KEYS, fitting))


def _num_stages(qkv: torch.Tensor, tile_size: int) -> int:
    """Returns the number of key and value tiles in flight, limited by the memory that a program's tile of queries
    leaves.
    """
    fitting = (shared_bytes(qkv.device) - tile_size * qkv.dtype.itemsize) // (2 * TILE_BYTES)
    return max(1, min(3 if qkv.dtype.itemsize == 2 else 2, fitting))


@triton.jit
def _find(starts, num_items, tile, TILE_TOKENS: tl.constexpr):
    """Returns the item of a tile: item `i` begins at token `starts[i]` and at tile `starts[i] // TILE_TOKENS + i`."""
    left: tl.int32 = 0
    right = num_items
    while left < right:
        middle = (left + right) // 2
        first_tile = tl.load(starts + middle) // TILE_TOKENS + middle
        if first_tile <= tile:
            left = middle + 1
        else:
            right = middle
    return left - 1


@triton.jit(do_not_specialize=["item_tokens", "num_prefix_rows", "table_stride", "window", "num_prefix_splits"])
def _attend(
    qkv,
    k_cache,
    v_cache,
    output,
    partials,
    log_sums,
    prefix,
    prefix_sums,
    sinks,
    items,
    query_start,
    context_lens,
    block_tables,
    first_rows,
    item_tokens,
    num_prefix_rows,
    qkv_stride,
    table_stride,
    window,
    num_prefix_splits,
    factor,
    cap,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    HAS_VISIBLE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    WIDE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Computes one item of `items`, one KV head and one tile of the item's query tokens in each program. The first
    split starts from the head's sink and the result of its group's shared prefix.
    """
    item = items + tl.program_id(0) * 6
    kv_head = tl.program_id(1)
    item_row = tl.program_id(2) * TILE_TOKENS
    sequence = tl.load(item)
    if sequence < 0:
        return
    first_flat = tl.load(query_start + sequence)
    query_len = tl.load(query_start + sequence + 1) - first_flat
    item_token = tl.load(item + 1)
    first_token = item_token + item_row
    end_token = tl.minimum(query_len, item_token + item_tokens)
    if first_token >= end_token:
        return
    slot = tl.load(item + 4)
    split = tl.load(item + 5)
    context_len = tl.load(context_lens + sequence)
    num_computed = context_len - query_len

    row = tl.arange(0, TILE_ROWS)
    dim = tl.arange(0, PADDED_DIM)
    token = first_token + row // GROUP
    head = kv_head * GROUP + row % GROUP
    exists = (row < TILE_TOKENS * GROUP) & (token < end_token)
    mask = exists[:, None] & (dim < HEAD_DIM)[None, :]
    flat = (first_flat + token).to(tl.int64)
    query = tl.load(qkv + flat[:, None] * qkv_stride + head[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
    position = num_computed + token

    first_key = tl.load(item + 2)
    if not HAS_PREFIX:  # a layer with a window reads the shared keys itself
        first_key = tl.where(split == 0, 0, first_key)
    if HAS_WINDOW:
        first_key = tl.maximum(num_computed + first_token - window + 1, first_key)
    last_key = tl.minimum(tl.load(item + 3), num_computed + tl.minimum(first_token + TILE_TOKENS, end_token))

    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    largest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    attended = tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)
    if HAS_SINKS:
        has_sink = exists & (token < tl.where(split == 0, end_token, 0))
        sink = tl.load(sinks + head, mask=has_sink, other=float("-inf"))
        largest = sink * 1.4426950408889634  # log2(e)
        total = tl.where(has_sink, 1.0, 0.0)
    if HAS_PREFIX:
        first_row = tl.load(first_rows + sequence)
        in_group = exists & (token < tl.where((first_row >= 0) & (split == 0), query_len, 0))
        for prefix_split in tl.range(0, num_prefix_splits, num_stages=1):
            place = (prefix_split * num_prefix_rows + first_row + token).to(tl.int64) * NUM_HEADS + head
            log_sum = tl.load(prefix_sums + place, mask=in_group, other=float("-inf"))
            seen = tl.load(prefix + place[:, None] * HEAD_DIM + dim[None, :], mask=in_group[:, None] & mask, other=0.0)
            new_largest = tl.maximum(largest, log_sum)
            shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            decay = tl.exp2(largest - shift)
            weight = tl.exp2(log_sum - shift)
            total = total * decay + weight
            attended = attended * decay[:, None] + seen * weight[:, None]
            largest = new_largest
    largest, total, attended = over_keys(
        query,
        position,
        k_cache,
        v_cache,
        block_tables + sequence.to(tl.int64) * table_stride,
        kv_head,
        first_key,
        last_key,
        window,
        factor,
        cap,
        largest,
        total,
        attended,
        NUM_KV_HEADS,
        HEAD_DIM,
        PADDED_DIM,
        BLOCK_SIZE,
        TILE_KEYS,
        HAS_WINDOW,
        HAS_VISIBLE and TILE_TOKENS > 1 and not HAS_WINDOW,  # the items of a decode have few tiles
        HAS_CAP,
        WIDE,
    )
    sees_nothing = total == 0.0
    result = attended / tl.where(sees_nothing, 1.0, total)[:, None]
    if slot < 0:
        own = (flat * NUM_HEADS + head)[:, None] * HEAD_DIM + dim[None, :]
        tl.store(output + own, result.to(output.dtype.element_ty), mask=mask)
    else:
        part = (slot.to(tl.int64) * item_tokens + item_row + row // GROUP) * NUM_HEADS + head
        tl.store(partials + part[:, None] * HEAD_DIM + dim[None, :], result, mask=mask)
        log_sum = tl.where(sees_nothing, float("-inf"), largest + tl.log2(total))
        tl.store(log_sums + part, log_sum, mask=exists)


@triton.jit(do_not_specialize=["num_groups", "num_rows", "table_stride"])
def _attend_prefix(
    qkv,
    k_cache,
    v_cache,
    partials,
    log_sums,
    row_start,
    tokens,
    leaders,
    group_lens,
    block_tables,
    num_groups,
    num_rows,
    qkv_stride,
    table_stride,
    factor,
    cap,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    HAS_VISIBLE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    WIDE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Computes a tile of a group's query tokens, one KV head and one split of the shared keys in each program. Every
    row sees every key.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    group = _find(row_start, num_groups, tile, TILE_TOKENS)
    group_row = tl.load(row_start + group)
    count = tl.load(row_start + group + 1) - group_row
    first = (tile - group_row // TILE_TOKENS - group) * TILE_TOKENS
    if first >= count:
        return
    row = tl.arange(0, TILE_ROWS)
    dim = tl.arange(0, PADDED_DIM)
    token = first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    exists = (row < TILE_TOKENS * GROUP) & (token < count)
    mask = exists[:, None] & (dim < HEAD_DIM)[None, :]
    flat = tl.load(tokens + group_row + token, mask=exists, other=0).to(tl.int64)
    query = tl.load(qkv + flat[:, None] * qkv_stride + head[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)

    prefix_len = tl.load(group_lens + group)
    split_keys = tl.cdiv(tl.cdiv(prefix_len, TILE_KEYS), tl.num_programs(2)) * TILE_KEYS
    first_key = split * split_keys
    last_key = tl.minimum(prefix_len, first_key + split_keys)
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    largest, total, attended = over_keys(
        query,
        tl.zeros([TILE_ROWS], tl.int32) + prefix_len,
        k_cache,
        v_cache,
        block_tables + tl.load(leaders + group).to(tl.int64) * table_stride,
        kv_head,
        first_key,
        last_key,
        0,
        factor,
        cap,
        tl.full([TILE_ROWS], float("-inf"), tl.float32),
        tl.zeros([TILE_ROWS], tl.float32),
        tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32),
        NUM_KV_HEADS,
        HEAD_DIM,
        PADDED_DIM,
        BLOCK_SIZE,
        TILE_KEYS,
        False,
        HAS_VISIBLE,
        HAS_CAP,
        WIDE,
    )
    sees_nothing = total == 0.0
    place = (split.to(tl.int64) * num_rows + group_row + token) * NUM_HEADS + head
    result = attended / tl.where(sees_nothing, 1.0, total)[:, None]
    tl.store(partials + place[:, None] * HEAD_DIM + dim[None, :], result, mask=mask)
    tl.store(log_sums + place, tl.where(sees_nothing, float("-inf"), largest + tl.log2(total)), mask=exists)


@triton.jit(do_not_specialize=["item_tokens"])
def _merge(
    output,
    partials,
    log_sums,
    merges,
    item_tokens,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SPLITS_AT_A_TIME: tl.constexpr,
):
    """Merges the splits of one query head of one token: their mean, weighted by their softmax sums."""
    merge = merges + tl.program_id(0) * 3
    head = tl.program_id(1)
    token = tl.load(merge).to(tl.int64)
    row = tl.load(merge + 1).to(tl.int64)
    count = tl.load(merge + 2)
    if count == 0:
        return
    dim = tl.arange(0, PADDED_DIM)
    largest: tl.float32 = float("-inf")
    total: tl.float32 = 0.0
    result = tl.zeros([PADDED_DIM], tl.float32)
    for first in range(0, count, SPLITS_AT_A_TIME):
        split = first + tl.arange(0, SPLITS_AT_A_TIME)
        exists = split < count
        places = (row + split.to(tl.int64) * item_tokens) * NUM_HEADS + head
        log_sum = tl.load(log_sums + places, mask=exists, other=float("-inf"))
        new_largest = tl.maximum(largest, tl.max(log_sum, axis=0))
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weight = tl.exp2(log_sum - shift)
        decay = tl.exp2(largest - shift)
        mask = exists[:, None] & (dim < HEAD_DIM)[None, :]
        parts = tl.load(partials + places[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
        total = total * decay + tl.sum(weight, axis=0)
        result = result * decay + tl.sum(parts * weight[:, None], axis=0)
        largest = new_largest
    result = result / tl.where(total == 0.0, 1.0, total)
    place = (token * NUM_HEADS + head) * HEAD_DIM + dim
    tl.store(output + place, result.to(output.dtype.element_ty), mask=dim < HEAD_DIM)
