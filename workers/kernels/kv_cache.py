"""Reads and writes the KV cache of a layer in torch. The kernels write and read the same bits (`native/kv_cache.h`).

A cache in the model's dtype is [num_blocks, block_size, num_kv_heads, head_dim]. A cache of int8 is [num_blocks,
block_bytes]: in each block the values [block_size, num_kv_heads, head_dim], then float32 scales [num_kv_heads,
block_size]. A number is its value times the scale of its token and head. The scale is the largest magnitude of those
`head_dim` numbers, divided by 127.
"""

from __future__ import annotations

import torch

from manta.workers.kernels.quantized_reference import round_activations
from manta.workers.models.model_config import KV_SCALE_BYTES, HeadShape


def layer_shape(dtype: torch.dtype, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> list[int]:
    """Returns the shape of the keys, or of the values, of one layer."""
    if dtype == torch.int8:
        return [num_blocks, block_size * num_kv_heads * (head_dim + KV_SCALE_BYTES)]
    return [num_blocks, block_size, num_kv_heads, head_dim]


def narrowed(cache: torch.Tensor, heads: HeadShape, largest: HeadShape) -> torch.Tensor:
    """Returns the part of a layer's keys, or values, that a layer with other heads than the `largest` ones uses: the
    beginning of each block.
    """
    if (heads.num_kv_heads, heads.head_dim) == (largest.num_kv_heads, largest.head_dim):
        return cache
    blocks = cache.flatten(1)
    scale_bytes = KV_SCALE_BYTES if cache.dtype == torch.int8 else 0
    block_size = blocks.shape[1] // (largest.num_kv_heads * (largest.head_dim + scale_bytes))
    used = blocks[:, : block_size * heads.num_kv_heads * (heads.head_dim + scale_bytes)]
    return used if scale_bytes else used.unflatten(1, (block_size, heads.num_kv_heads, heads.head_dim))


def write(cache: torch.Tensor, slots: torch.Tensor, numbers: torch.Tensor, block_size: int) -> None:
    """Writes the keys, or the values, [num_tokens, num_kv_heads, head_dim] of tokens to their KV slots."""
    num_tokens, num_kv_heads, head_dim = numbers.shape
    if cache.dtype != torch.int8:
        cache[slots // block_size, slots % block_size] = numbers.to(cache.dtype)
        return
    values, scales = split(cache, block_size, num_kv_heads, head_dim)
    rounded = round_activations(numbers.reshape(-1, head_dim), head_dim, one_scale=True)
    blocks, offsets = slots // block_size, slots % block_size
    values[blocks, offsets] = rounded.values.view(numbers.shape).to(torch.int8)
    scales[blocks, :, offsets] = rounded.scales.view(num_tokens, num_kv_heads)


def read(cache: torch.Tensor, blocks: torch.Tensor, block_size: int, heads: HeadShape) -> torch.Tensor:
    """Returns the keys, or the values, of some blocks: [num_tokens, num_kv_heads, head_dim], in float32 if the cache is
    of int8.
    """
    shape = (-1, heads.num_kv_heads, heads.head_dim)
    if cache.dtype != torch.int8:
        return cache[blocks].view(shape)
    values, scales = split(cache, block_size, heads.num_kv_heads, heads.head_dim)
    return (values[blocks].float() * scales[blocks].transpose(1, 2).unsqueeze(-1)).view(shape)


def split(cache: torch.Tensor, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns views of a cache of int8: the values [num_blocks, block_size, num_kv_heads, head_dim] and the scales
    [num_blocks, num_kv_heads, block_size].
    """
    num_values = block_size * num_kv_heads * head_dim
    values = cache[:, :num_values].unflatten(1, (block_size, num_kv_heads, head_dim))
    scales = cache[:, num_values:].view(torch.float32).unflatten(1, (num_kv_heads, block_size))
    return values, scales
