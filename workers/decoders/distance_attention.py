"""Grouped-query attention with a bias for each distance of a query and a key (Inkling), in torch on every device.

A token's bias for a distance is the product of numbers of each query head and a profile of the distance. There is none
from the number of profiles on. Called by the decoder.
"""

from __future__ import annotations

import torch

from manta.workers.decoders.sparse_attention import PIECE_BYTES, pieces
from manta.workers.kernels import kv_cache
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.protocol import Kernels
from manta.workers.models.model_config import HeadShape

_COPIES = 4
"""Numbers of each query head and key that are held at a time: product, bias, and what the softmax makes of them."""


def attend_with_distances(
    qkv: torch.Tensor,
    numbers: torch.Tensor,
    profiles: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    metadata: AttentionMetadata,
    heads: HeadShape,
    sliding_window: int | None,
    kernels: Kernels,
    piece_bytes: int = PIECE_BYTES,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns what `paged_attention` does of qkv and `caches`, with biases: [num_tokens, num_heads * head_dim].
    `numbers`, float32 [num_tokens, num_heads, rank], are those of the tokens, and `profiles` float32 [rank, distances].
    `sinks`, float32 [num_tokens, num_heads], are logits of each token that take part in its softmax and have no value.
    What is computed for several tokens takes at most `piece_bytes` at a time.
    """
    block_size = metadata.block_size
    query = qkv[:, : heads.num_heads * heads.head_dim].view(-1, heads.num_heads, heads.head_dim)
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    starts = metadata.query_start.tolist()
    for sequence, context_len in enumerate(metadata.context_lens.tolist()):
        first, last = starts[sequence], starts[sequence + 1]
        for rows in pieces(first, last, _COPIES * heads.num_heads * context_len * 4, piece_bytes):
            begin, end = (context_len - last + row for row in (rows.start, rows.stop))
            first_seen = 0 if sliding_window is None else max(0, begin - sliding_window + 1)
            first_block = first_seen // block_size
            blocks = metadata.block_tables[sequence, first_block : -(-end // block_size)].long()
            seen = slice(first_seen - first_block * block_size, end - first_block * block_size)
            key, value = (kv_cache.read(cache, blocks, block_size, heads)[seen].float() for cache in caches)
            distances = torch.arange(begin, end, device=qkv.device).unsqueeze(1)
            distances = distances - torch.arange(first_seen, end, device=qkv.device)
            biases = _biases(numbers[rows], profiles, distances, kernels)
            is_visible = distances >= 0
            if sliding_window is not None:
                is_visible &= distances < sliding_window
            own_sinks = None if sinks is None else sinks[rows]
            attended = _attend(query[rows].float(), key, value, biases, is_visible, own_sinks, heads, kernels)
            output[rows] = attended.to(qkv.dtype)
    return output.flatten(1)


def _biases(numbers: torch.Tensor, profiles: torch.Tensor, distances: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """Returns the biases [n, num_heads, context] for distances [n, context]."""
    num_tokens, num_heads, rank = numbers.shape
    by_distance = kernels.head_products(numbers.reshape(-1, 1, rank), profiles.unsqueeze(0))
    by_distance = by_distance.reshape(num_tokens, num_heads, -1)
    places = distances.clamp(0, profiles.shape[1] - 1).unsqueeze(1).expand(-1, num_heads, -1)
    is_far = (distances >= profiles.shape[1]).unsqueeze(1)
    return by_distance.gather(-1, places).masked_fill(is_far, 0.0)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    biases: torch.Tensor,
    is_visible: torch.Tensor,
    sinks: torch.Tensor | None,
    heads: HeadShape,
    kernels: Kernels,
) -> torch.Tensor:
    """Returns [n, num_heads, head_dim] of query [n, num_heads, head_dim] over key and value [context, num_kv_heads,
    head_dim], all float32. Every sum is over the dimensions of a head or over keys in their order.
    """
    num_groups = heads.num_heads // heads.num_kv_heads
    by_group = query.unflatten(1, (-1, num_groups)).transpose(1, 2).flatten(0, 1)  # rows of a query of each KV head
    products = kernels.head_products(by_group, key.permute(1, 2, 0).contiguous())
    added = biases.unflatten(1, (-1, num_groups)).transpose(1, 2).flatten(0, 1)
    hidden = ~is_visible.repeat_interleave(num_groups, dim=0).unsqueeze(1)
    logits = (products * heads.scale + added).masked_fill(hidden, -torch.inf)
    largest = logits.amax(-1, keepdim=True)
    if sinks is not None:
        of_group = sinks.unflatten(1, (-1, num_groups)).transpose(1, 2).flatten(0, 1).unsqueeze(-1)
        largest = torch.maximum(largest, of_group)
    below_largest = (logits - largest).masked_fill(hidden, 0.0)
    weights = kernels.recurrent.exp(below_largest).masked_fill(hidden, 0.0)
    sums = kernels.head_products(weights, weights.new_ones((heads.num_kv_heads, len(key), 1)))
    if sinks is not None:
        sums = sums + kernels.recurrent.exp(of_group - largest)
    attended = kernels.head_products(weights, value.transpose(0, 1).contiguous()) / sums
    return attended.unflatten(0, (-1, num_groups)).transpose(1, 2).flatten(1, 2)
