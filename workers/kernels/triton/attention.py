"""Paged attention in Triton: one kernel for prefill chunks, decodes and mixes of both, cut into items of similar length
(`work.py`). A shared prefix is read once for its group, and the results are merged by log-sum-exp.

`reference.paged_attention` defines the result. Splits and their merge follow Flash-Decoding (Dao et al., 2023), and
shared prefixes follow Hydragen (Juravsky et al., 2024). An attention sink is in the sum of the first split from the
start. The query heads of one KV head are rows of one tile (packed GQA), so that its keys are read once for all of them.
With latent attention (DeepSeek-V2) these are all query heads, and a key is read once as the value too.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.triton.attention_softmax import over_keys, places_of, tail_places_of
from manta.workers.kernels.triton.attention_tiles import LEAST_DOT, MOST_VISIBLE_DIM, Tiles, tiles_of
from manta.workers.kernels.triton.launch import needs_wide_dot, num_processors, padded_size
from manta.workers.kernels.triton.metadata import DeviceMetadata, PrefixRows
from manta.workers.kernels.triton.work import PROGRAMS_PER_PROCESSOR
from manta.workers.models.model_config import HeadShape

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
    """Computes `reference.paged_attention`; `metadata` must be a `DeviceMetadata`. With latent attention the result has
    zeros in the rotated dimensions.
    """
    assert isinstance(metadata, DeviceMetadata), "the kernels read how attention is cut"
    assert metadata.work is not None
    work, num_heads, head_dim = metadata.work, heads.num_heads, heads.head_dim
    output = qkv.new_empty((qkv.shape[0], num_heads * head_dim))
    tiles = tiles_of(heads, qkv.dtype, qkv.device, decodes=work.item_tokens == 1)
    caches = (qkv, k_cache, v_cache)
    constants = _constants(caches, metadata.block_size, heads)
    window = metadata.chunk_size if sliding_window is None else sliding_window
    rows = metadata.prefix_rows if window is None else None
    factors = _factors(heads.scale, heads.logit_cap)
    prefix, num_prefix_splits = output, 0
    first_rows = metadata.context_lens
    prefix_sums = output
    if rows is not None:
        prefix, prefix_sums = _attend_prefixes(caches, metadata, rows, heads, factors, constants)
        first_rows, num_prefix_splits = rows.first_rows, prefix.shape[0]
    partials, log_sums = _partials(max(1, work.num_slots), work.item_tokens, heads, qkv.device)
    _attend[(tiles.num_head_tiles * work.items.shape[0], triton.cdiv(work.item_tokens, tiles.num_tokens))](
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
        window or 0,
        num_prefix_splits,
        *factors,
        **constants,
        **_tile_constants(tiles),
        HAS_PREFIX=rows is not None,
        HAS_WINDOW=window is not None,
        HAS_CHUNKS=metadata.chunk_size is not None,
        HAS_SINKS=sinks is not None,
    )
    if work.merges.shape[0]:
        _merge[(work.merges.shape[0], num_heads)](
            output,
            partials,
            log_sums,
            work.merges,
            work.item_tokens,
            **{name: constants[name] for name in ("NUM_HEADS", "HEAD_DIM", "PADDED_DIM", "TAIL_DIM", "PADDED_TAIL")},
            SPLITS_AT_A_TIME=SPLITS_AT_A_TIME,
            num_warps=4,
        )
    return output


def _constants(
    caches: tuple[torch.Tensor, torch.Tensor, torch.Tensor], block_size: int, heads: HeadShape
) -> dict[str, int | bool]:
    """Returns the constants of both kernels that read keys, but for those of their tiles."""
    qkv, k_cache, _ = caches
    tail_dim = heads.head_dim - heads.latent_dim if heads.latent_dim else 0
    return {
        "NUM_HEADS": heads.num_heads,
        "NUM_CACHED": heads.num_kv_heads,
        "HEAD_DIM": heads.head_dim,
        "PADDED_DIM": padded_size(heads.head_dim - tail_dim, LEAST_DOT),
        "TAIL_DIM": tail_dim,
        "PADDED_TAIL": padded_size(tail_dim, LEAST_DOT),
        "BLOCK_SIZE": block_size,
        "BLOCK_STRIDE": k_cache.stride(0),
        "HAS_VISIBLE": heads.head_dim <= MOST_VISIBLE_DIM,
        "HAS_CAP": heads.logit_cap != 0,
        "WIDE": needs_wide_dot(qkv.dtype),
    }


def _tile_constants(tiles: Tiles) -> dict[str, int]:
    """Returns the constants of a kernel's tiles, and how it is launched."""
    return {
        "GROUP": tiles.group,
        "TILE_KEYS": tiles.num_keys,
        "TILE_TOKENS": tiles.num_tokens,
        "TILE_ROWS": tiles.num_rows,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


def _attend_prefixes(
    caches: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    metadata: AttentionMetadata,
    rows: PrefixRows,
    heads: HeadShape,
    factors: tuple[float, float],
    constants: dict[str, int | bool],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the attention of every row of a group over its shared keys, float32 [splits, num_rows, num_heads,
    width of values], and the base-2 logarithms of the softmax sums, [splits, num_rows, num_heads].
    """
    qkv = caches[0]
    tiles = tiles_of(heads, qkv.dtype, qkv.device)
    num_tiles = rows.num_rows // tiles.num_tokens + rows.num_groups
    num_programs = triton.cdiv(rows.num_rows, tiles.num_tokens) * tiles.num_head_tiles
    num_splits = _num_prefix_splits(num_programs, qkv.device)
    partials, log_sums = _partials(num_splits, rows.num_rows, heads, qkv.device)
    _attend_prefix[(tiles.num_head_tiles * num_tiles, num_splits)](
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
        **_tile_constants(tiles),
    )
    return partials, log_sums


def _factors(scale: float, cap: float) -> tuple[float, float]:
    """Returns the factor on products of queries and keys, and the bound of capped ones, as the kernels take them. The
    scores are logits in units of ln 2. The kernels compute `tanh(x)` as `1 - 2 / (2 ** (2 x log2(e)) + 1)`.
    """
    log2_e = math.log2(math.e)
    return (2 * scale / cap * log2_e, cap * log2_e) if cap else (scale * log2_e, 0.0)


def _partials(
    num_splits: int, num_rows: int, heads: HeadShape, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    shape, width = (num_splits, num_rows, heads.num_heads), heads.latent_dim or heads.head_dim
    return torch.empty((*shape, width), device=device), torch.empty(shape, device=device)


def _num_prefix_splits(num_programs: int, device: torch.device) -> int:
    """Returns the number of programs that read one group's keys; `num_programs` would run without splits.

    It does not depend on the number of keys, because a captured graph runs for every length.
    """
    wanted = PROGRAMS_PER_PROCESSOR * num_processors(device)
    return min(MOST_PREFIX_SPLITS, max(1, wanted // max(1, num_programs)))


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
    NUM_HEADS: tl.constexpr,
    NUM_CACHED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TAIL_DIM: tl.constexpr,
    PADDED_TAIL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    HAS_VISIBLE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    WIDE: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNKS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Computes one item of `items`, one tile of query heads and one tile of the item's query tokens in each program.
    The first split starts from the head's sink and the result of its group's shared prefix. With `HAS_CHUNKS`, `window`
    is the length of a chunk.
    """
    NUM_HEAD_TILES: tl.constexpr = (NUM_HEADS + GROUP - 1) // GROUP
    # From the last item on: a prompt's last tokens see the most keys, and would be computed alone at the end
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    head_tile = program % NUM_HEAD_TILES  # tiles that read the same keys run beside one another
    item = items + program // NUM_HEAD_TILES * 6
    item_row = tl.program_id(1) * TILE_TOKENS
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
    head = head_tile * GROUP + row % GROUP
    exists = (row < TILE_TOKENS * GROUP) & (token < end_token) & (head < NUM_HEADS)
    VALUE_DIM: tl.constexpr = HEAD_DIM - TAIL_DIM
    mask = exists[:, None] & (dim < VALUE_DIM)[None, :]
    place = places_of(dim, HEAD_DIM, TAIL_DIM)[None, :]
    flat = (first_flat + token).to(tl.int64)
    query_row = flat[:, None] * qkv_stride + head[:, None] * HEAD_DIM
    query = tl.load(qkv + query_row + place, mask=mask, other=0.0)
    tail = query
    if TAIL_DIM > 0:
        tail_dim = tl.arange(0, PADDED_TAIL)
        tail_place = tail_places_of(tail_dim, HEAD_DIM, TAIL_DIM)[None, :]
        tail_mask = exists[:, None] & (tail_dim < TAIL_DIM)[None, :]
        tail = tl.load(qkv + query_row + tail_place, mask=tail_mask, other=0.0)
    position = num_computed + token

    first_key = tl.load(item + 2)
    if not HAS_PREFIX:  # a layer with a window reads the shared keys itself
        first_key = tl.where(split == 0, 0, first_key)
    first_seen = position
    if HAS_CHUNKS:
        first_seen = position // window * window
        first_key = tl.maximum((num_computed + first_token) // window * window, first_key)
    elif HAS_WINDOW:
        first_seen = position - window + 1
        first_key = tl.maximum(num_computed + first_token - window + 1, first_key)
    last_key = tl.minimum(tl.load(item + 3), num_computed + tl.minimum(first_token + TILE_TOKENS, end_token))

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
            part = (prefix_split * num_prefix_rows + first_row + token).to(tl.int64) * NUM_HEADS + head
            log_sum = tl.load(prefix_sums + part, mask=in_group, other=float("-inf"))
            part_places = part[:, None] * VALUE_DIM + dim[None, :]
            seen = tl.load(prefix + part_places, mask=in_group[:, None] & mask, other=0.0)
            new_largest = tl.maximum(largest, log_sum)
            shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            decay = tl.exp2(largest - shift)
            weight = tl.exp2(log_sum - shift)
            total = total * decay + weight
            attended = attended * decay[:, None] + seen * weight[:, None]
            largest = new_largest
    largest, total, attended = over_keys(
        query,
        tail,
        position,
        first_seen,
        k_cache,
        v_cache,
        block_tables + sequence.to(tl.int64) * table_stride,
        head_tile % NUM_CACHED,
        first_key,
        last_key,
        factor,
        cap,
        largest,
        total,
        attended,
        NUM_CACHED,
        HEAD_DIM,
        PADDED_DIM,
        TAIL_DIM,
        PADDED_TAIL,
        BLOCK_SIZE,
        BLOCK_STRIDE,
        TILE_KEYS,
        HAS_WINDOW,
        HAS_VISIBLE and TILE_TOKENS > 1 and not HAS_WINDOW,  # the items of a decode have few tiles
        HAS_CAP,
        WIDE,
    )
    sees_nothing = total == 0.0
    result = attended / tl.where(sees_nothing, 1.0, total)[:, None]
    if slot < 0:
        own = output + (flat * NUM_HEADS + head)[:, None] * HEAD_DIM
        tl.store(own + place, result.to(output.dtype.element_ty), mask=mask)
        if TAIL_DIM > 0:
            tl.store(own + tail_place, tl.zeros_like(tail), mask=tail_mask)
    else:
        part = (slot.to(tl.int64) * item_tokens + item_row + row // GROUP) * NUM_HEADS + head
        tl.store(partials + part[:, None] * VALUE_DIM + dim[None, :], result, mask=mask)
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
    NUM_HEADS: tl.constexpr,
    NUM_CACHED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TAIL_DIM: tl.constexpr,
    PADDED_TAIL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    HAS_VISIBLE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    WIDE: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Computes a tile of a group's query tokens, one tile of query heads and one split of the shared keys in each
    program. Every row sees every key.
    """
    NUM_HEAD_TILES: tl.constexpr = (NUM_HEADS + GROUP - 1) // GROUP
    head_tile = tl.program_id(0) % NUM_HEAD_TILES
    tile = tl.program_id(0) // NUM_HEAD_TILES
    split = tl.program_id(1)
    group = _find(row_start, num_groups, tile, TILE_TOKENS)
    group_row = tl.load(row_start + group)
    count = tl.load(row_start + group + 1) - group_row
    first = (tile - group_row // TILE_TOKENS - group) * TILE_TOKENS
    if first >= count:
        return
    row = tl.arange(0, TILE_ROWS)
    dim = tl.arange(0, PADDED_DIM)
    token = first + row // GROUP
    head = head_tile * GROUP + row % GROUP
    exists = (row < TILE_TOKENS * GROUP) & (token < count) & (head < NUM_HEADS)
    VALUE_DIM: tl.constexpr = HEAD_DIM - TAIL_DIM
    mask = exists[:, None] & (dim < VALUE_DIM)[None, :]
    flat = tl.load(tokens + group_row + token, mask=exists, other=0).to(tl.int64)
    query_row = flat[:, None] * qkv_stride + head[:, None] * HEAD_DIM
    query = tl.load(qkv + query_row + places_of(dim, HEAD_DIM, TAIL_DIM)[None, :], mask=mask, other=0.0)
    tail = query
    if TAIL_DIM > 0:
        tail_dim = tl.arange(0, PADDED_TAIL)
        tail_mask = exists[:, None] & (tail_dim < TAIL_DIM)[None, :]
        tail = tl.load(
            qkv + query_row + tail_places_of(tail_dim, HEAD_DIM, TAIL_DIM)[None, :], mask=tail_mask, other=0.0
        )

    prefix_len = tl.load(group_lens + group)
    split_keys = tl.cdiv(tl.cdiv(prefix_len, TILE_KEYS), tl.num_programs(1)) * TILE_KEYS
    first_key = split * split_keys
    last_key = tl.minimum(prefix_len, first_key + split_keys)
    position = tl.zeros([TILE_ROWS], tl.int32) + prefix_len
    largest, total, attended = over_keys(
        query,
        tail,
        position,
        position,
        k_cache,
        v_cache,
        block_tables + tl.load(leaders + group).to(tl.int64) * table_stride,
        head_tile % NUM_CACHED,
        first_key,
        last_key,
        factor,
        cap,
        tl.full([TILE_ROWS], float("-inf"), tl.float32),
        tl.zeros([TILE_ROWS], tl.float32),
        tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32),
        NUM_CACHED,
        HEAD_DIM,
        PADDED_DIM,
        TAIL_DIM,
        PADDED_TAIL,
        BLOCK_SIZE,
        BLOCK_STRIDE,
        TILE_KEYS,
        False,
        HAS_VISIBLE,
        HAS_CAP,
        WIDE,
    )
    sees_nothing = total == 0.0
    part = (split.to(tl.int64) * num_rows + group_row + token) * NUM_HEADS + head
    result = attended / tl.where(sees_nothing, 1.0, total)[:, None]
    tl.store(partials + part[:, None] * VALUE_DIM + dim[None, :], result, mask=mask)
    tl.store(log_sums + part, tl.where(sees_nothing, float("-inf"), largest + tl.log2(total)), mask=exists)


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
    TAIL_DIM: tl.constexpr,
    PADDED_TAIL: tl.constexpr,
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
    VALUE_DIM: tl.constexpr = HEAD_DIM - TAIL_DIM
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
        mask = exists[:, None] & (dim < VALUE_DIM)[None, :]
        parts = tl.load(partials + places[:, None] * VALUE_DIM + dim[None, :], mask=mask, other=0.0)
        total = total * decay + tl.sum(weight, axis=0)
        result = result * decay + tl.sum(parts * weight[:, None], axis=0)
        largest = new_largest
    result = result / tl.where(total == 0.0, 1.0, total)
    own = output + (token * NUM_HEADS + head) * HEAD_DIM
    result = result.to(output.dtype.element_ty)
    tl.store(own + places_of(dim, HEAD_DIM, TAIL_DIM), result, mask=dim < VALUE_DIM)
    if TAIL_DIM > 0:
        tail_dim = tl.arange(0, PADDED_TAIL)
        zeros = tl.zeros([PADDED_TAIL], output.dtype.element_ty)
        tl.store(own + tail_places_of(tail_dim, HEAD_DIM, TAIL_DIM), zeros, mask=tail_dim < TAIL_DIM)
