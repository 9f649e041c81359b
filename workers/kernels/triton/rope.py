"""One Triton kernel after the qkv linear: q/k norm, rotation, and the write of keys and values to their KV slots.

`reference.rope_and_cache` defines the result. A token with a negative slot is padding of a captured graph: it writes no
key and no value. Blocks may lie further apart than their size, in layers with smaller heads than others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.triton.launch import padded_size
from manta.workers.models.model_config import HeadShape

_TILE_ELEMENTS = 1024
"""Elements of one half of the heads that a program rotates."""


def rope_and_cache(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    metadata: AttentionMetadata,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    heads: HeadShape,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    head_dim, all_heads = heads.head_dim, sum(heads.counts)
    half = padded_size(head_dim // 2)
    tile_heads = min(padded_size(all_heads), max(1, _TILE_ELEMENTS // half))
    has_norm = q_norm_weight is not None
    _rope_and_cache[(qkv.shape[0], triton.cdiv(all_heads, tile_heads))](
        qkv,
        cos_sin,
        metadata.positions,
        metadata.slot_mapping,
        k_cache,
        v_cache,
        qkv if q_norm_weight is None else q_norm_weight,
        qkv if k_norm_weight is None else k_norm_weight,
        qkv.stride(0),
        eps,
        NUM_HEADS=heads.num_heads,
        NUM_KEYS=heads.num_kv_heads,
        NUM_VALUES=heads.counts[2],
        HEAD_DIM=head_dim,
        BLOCK_SIZE=metadata.block_size,
        BLOCK_STRIDE=k_cache.stride(0),
        HALF=half,
        TILE_HEADS=tile_heads,
        HAS_NORM=has_norm,
    )


@triton.jit
def _rope_and_cache(
    qkv,
    cos_sin,
    positions,
    slot_mapping,
    k_cache,
    v_cache,
    q_norm,
    k_norm,
    qkv_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    NUM_VALUES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    HALF: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Rotates `TILE_HEADS` heads of one token in each program, as [TILE_HEADS, HALF] for each half of the heads. A row
    has `NUM_HEADS` queries, then `NUM_KEYS` keys and `NUM_VALUES` values.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)[:, None]
    dim = tl.arange(0, HALF)[None, :]
    exists = (head < NUM_HEADS + NUM_KEYS + NUM_VALUES) & (dim < HEAD_DIM // 2)
    is_query = head < NUM_HEADS
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KEYS)
    source = qkv + token * qkv_stride + head * HEAD_DIM + dim
    low = tl.load(source, mask=exists, other=0.0).to(tl.float32)
    high = tl.load(source + HEAD_DIM // 2, mask=exists, other=0.0).to(tl.float32)
    is_value = head >= NUM_HEADS + NUM_KEYS
    plain_low = low
    plain_high = high
    if HAS_NORM:
        mean_square = (tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / HEAD_DIM
        scale = (1.0 / tl.sqrt(mean_square + eps))[:, None]
        q_mask = exists & is_query
        k_mask = exists & is_key
        q_low = tl.load(q_norm + dim + head * 0, mask=q_mask, other=0.0).to(tl.float32)
        q_high = tl.load(q_norm + HEAD_DIM // 2 + dim + head * 0, mask=q_mask, other=0.0).to(tl.float32)
        k_low = tl.load(k_norm + dim + head * 0, mask=k_mask, other=0.0).to(tl.float32)
        k_high = tl.load(k_norm + HEAD_DIM // 2 + dim + head * 0, mask=k_mask, other=0.0).to(tl.float32)
        low = low * scale * (q_low + k_low)
        high = high * scale * (q_high + k_high)
    position = tl.load(positions + token)
    angle = cos_sin + position * HEAD_DIM + dim
    in_half = dim < HEAD_DIM // 2
    cos = tl.load(angle, mask=in_half, other=0.0)
    sin = tl.load(angle + HEAD_DIM // 2, mask=in_half, other=0.0)
    turned_low = tl.where(is_value, plain_low, low * cos - high * sin)
    turned_high = tl.where(is_value, plain_high, high * cos + low * sin)
    result_low = turned_low.to(qkv.dtype.element_ty)
    result_high = turned_high.to(qkv.dtype.element_ty)
    tl.store(source, result_low, mask=exists & is_query)
    tl.store(source + HEAD_DIM // 2, result_high, mask=exists & is_query)
    if NUM_KEYS == 0:  # the layer reads keys and values of another one
        return
    slot = tl.load(slot_mapping + token)
    kv_head = tl.where(is_key, head - NUM_HEADS, head - NUM_HEADS - NUM_KEYS)
    place = (slot % BLOCK_SIZE * NUM_KEYS + kv_head) * HEAD_DIM
    offset = slot // BLOCK_SIZE * BLOCK_STRIDE + place + dim
    has_slot = exists & (dim < tl.where(slot >= 0, HALF, 0))
    tl.store(k_cache + offset, result_low, mask=has_slot & is_key)
    tl.store(k_cache + offset + HEAD_DIM // 2, result_high, mask=has_slot & is_key)
    if NUM_VALUES > 0:
        tl.store(v_cache + offset, result_low, mask=has_slot & is_value)
        tl.store(v_cache + offset + HEAD_DIM // 2, result_high, mask=has_slot & is_value)
