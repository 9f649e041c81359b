"""Reads and writes the KV cache of a layer in torch. The kernels write and read the same bits (`native/kv_cache.h`).

A cache in the model's dtype is [num_blocks, block_size, num_kv_heads, head_dim]. A rounded cache is [num_blocks,
block_bytes]: in each block the values [block_size, num_kv_heads, bytes of a head], then float32 scales [num_kv_heads,
block_size].

- `int8` is a tensor of int8. A number is its value times the scale of its token and head. The scale is the largest
  magnitude of those `head_dim` numbers, divided by 127.
- `int4` is a tensor of uint8, each with two codes. `four_bit_heads.py` says what they stand for. The kernels write the
  same but for rounding: a number in the middle of two levels may become the other one.
"""

from __future__ import annotations

import torch

from manta.workers.kernels.four_bit_heads import packed_width, round_heads, widen_heads
from manta.workers.kernels.quantized_reference import round_activations
from manta.workers.models.model_config import KV_SCALE_BYTES, HeadShape

ROUNDED = {"int8": torch.int8, "int4": torch.uint8}
"""The dtype of a rounded cache's tensor, by the option `kv_cache_dtype`."""


def layer_shape(dtype: torch.dtype, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> list[int]:
    """Returns the shape of the keys, or of the values, of one layer."""
    if dtype in ROUNDED.values():
        return [num_blocks, block_size * num_kv_heads * _head_size(dtype, head_dim)]
    return [num_blocks, block_size, num_kv_heads, head_dim]


def _head_size(dtype: torch.dtype, head_dim: int) -> int:
    """Returns the elements of a cache that a head of a token takes, with its scale."""
    return _value_size(dtype, head_dim) + (KV_SCALE_BYTES if dtype in ROUNDED.values() else 0)


def _value_size(dtype: torch.dtype, head_dim: int) -> int:
    return packed_width(head_dim) if dtype == torch.uint8 else head_dim


def narrowed(cache: torch.Tensor, heads: HeadShape, largest: HeadShape) -> torch.Tensor:
    """Returns the part of a layer's keys, or values, that a layer with other heads than the `largest` ones uses: the
    beginning of each block.
    """
    if (heads.num_kv_heads, heads.head_dim) == (largest.num_kv_heads, largest.head_dim):
        return cache
    blocks = cache.flatten(1)
    token_size, largest_size = (each.num_kv_heads * _head_size(cache.dtype, each.head_dim) for each in (heads, largest))
    block_size = blocks.shape[1] // largest_size
    used = blocks[:, : block_size * token_size]
    if cache.dtype in ROUNDED.values():
        return used
    return used.unflatten(1, (block_size, heads.num_kv_heads, heads.head_dim))


def beyond(cache: torch.Tensor, heads: HeadShape, largest: HeadShape) -> torch.Tensor:
    """Returns what `narrowed` leaves of a cache that has room for one more head than a layer has: [num_blocks,
    block_size, head_dim], the end of each block. The cache is not rounded.
    """
    block_size = cache.shape[1]
    rest = cache.flatten(1)[:, block_size * heads.num_kv_heads * heads.head_dim :]
    return rest.unflatten(1, (block_size, largest.head_dim))


def write(cache: torch.Tensor, slots: torch.Tensor, numbers: torch.Tensor, block_size: int) -> None:
    """Writes the keys, or the values, [num_tokens, num_kv_heads, head_dim] of tokens to their KV slots."""
    num_tokens, num_kv_heads, head_dim = numbers.shape
    blocks, offsets = slots // block_size, slots % block_size
    if cache.dtype not in ROUNDED.values():
        cache[blocks, offsets] = numbers.to(cache.dtype)
        return
    values, scales = split(cache, block_size, num_kv_heads, head_dim)
    heads = numbers.reshape(-1, head_dim)
    if cache.dtype == torch.uint8:
        new_values, new_scales = round_heads(heads)
    else:
        rounded = round_activations(heads, head_dim, one_scale=True)
        new_values, new_scales = rounded.values.to(torch.int8), rounded.scales
    values[blocks, offsets] = new_values.view(num_tokens, num_kv_heads, -1)
    scales[blocks, :, offsets] = new_scales.view(num_tokens, num_kv_heads)


def read(cache: torch.Tensor, blocks: torch.Tensor, block_size: int, heads: HeadShape) -> torch.Tensor:
    """Returns the keys, or the values, of some blocks: [num_tokens, num_kv_heads, head_dim], in float32 if the cache is
    rounded.
    """
    shape = (-1, heads.num_kv_heads, heads.head_dim)
    if cache.dtype not in ROUNDED.values():
        return cache[blocks].view(shape)
    values, scales = split(cache, block_size, heads.num_kv_heads, heads.head_dim)
    values, scales = values[blocks], scales[blocks].transpose(1, 2)
    if cache.dtype == torch.uint8:
        return widen_heads(values, scales, heads.head_dim).view(shape)
    return (values.float() * scales.unsqueeze(-1)).view(shape)


def split(cache: torch.Tensor, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns views of a rounded cache: the values [num_blocks, block_size, num_kv_heads, bytes of a head] and the
    scales [num_blocks, num_kv_heads, block_size].
    """
    width = _value_size(cache.dtype, head_dim)
    num_values = block_size * num_kv_heads * width
    values = cache[:, :num_values].unflatten(1, (block_size, num_kv_heads, width))
    scales = cache[:, num_values:].view(torch.float32).unflatten(1, (num_kv_heads, block_size))
    return values, scales
