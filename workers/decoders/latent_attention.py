"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1) over a cache of latent vectors.

Keys and values of all heads are products of one latent vector and a weight of each head. The weights are absorbed: the
keys' one multiplies queries, and the values' one multiplies results. What remains is attention of all query heads over
one KV head, whose key is also its value, so every kernel of grouped-query attention computes it.

A cached token is one head in the order in which the kernels rotate, dimension `i` with dimension `i + head_dim / 2`:
half of the rotated key, half of the latent vector, half of the keys of indexers if there are some, then the other
halves. All but the rotated key have a cosine of 1. Queries are zero where the indexers' keys are, so attention does not
see them. A layer that reads the latent vectors of an earlier one may have an indexer, whose key lies beside them.
"""

from __future__ import annotations

import torch

from manta.workers.decoders.head_gates import gated_heads
from manta.workers.decoders.key_pools import choose_pools, write_pools
from manta.workers.decoders.sparse_attention import TokenChoice, attend_chosen, choose_tokens, head_growth, index_keys
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.latent_adapters import latent_part
from manta.workers.kernels.protocol import Kernels
from manta.workers.kernels.weights import IndexerWeights, LatentAttentionWeights
from manta.workers.models.model_config import HeadShape, LatentShape


def cached_layout(expansion: torch.Tensor, shape: LatentShape, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `LatentAttentionWeights.keys` and `.values` of the weight [num_heads * (plain_dim + value_dim), kv_rank],
    which has the keys of all heads, then their values. Rows of dimensions that are not the latent vector's are zeros.
    """
    num_heads = len(expansion) // (shape.plain_dim + shape.value_dim)
    padded = expansion.new_zeros((len(expansion), head_dim))
    latent_part(padded, shape).copy_(expansion.unflatten(-1, (2, -1)))
    keys, values = padded.split((num_heads * shape.plain_dim, num_heads * shape.value_dim))
    return keys.unflatten(0, (num_heads, -1)), values.unflatten(0, (num_heads, -1)).transpose(1, 2)


def attend_latent(
    weights: LatentAttentionWeights,
    normed: torch.Tensor,
    cos_sin: torch.Tensor,
    metadata: AttentionMetadata,
    kv_cache: tuple[torch.Tensor, torch.Tensor],
    heads: HeadShape,
    kernels: Kernels,
    growth: torch.Tensor | None = None,
    choice: TokenChoice | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Returns the attention's result [num_tokens, hidden] of normed hidden states, and writes the tokens' latent
    vectors and rotated keys to their KV slots. `growth` [num_tokens, 1] multiplies the queries. A layer with an indexer
    puts the tokens that it chooses into `choice`, which holds those of an earlier layer otherwise; None if attention
    reads all, or those of a window.
    """
    shape = weights.shape
    query_dim = shape.plain_dim + shape.rope_dim
    query_width = shape.query_rank or heads.num_heads * query_dim
    writes = weights.latent_norm is not None
    widths = (query_width, shape.cached_dim) if writes else query_width
    queries, *cached = weights.inputs.forward(normed, metadata).split(widths, dim=-1)
    query_latents = None
    if weights.queries is not None:
        assert weights.query_norm is not None
        query_latents = kernels.rms_norm(queries, weights.query_norm, shape.norm_eps)
        read = torch.cat((query_latents, queries), dim=-1) if shape.has_gates else query_latents
        queries = weights.queries.forward(read, metadata)
    gates = None
    if shape.has_gates:
        queries, gates = queries.split((heads.num_heads * query_dim, heads.num_heads * shape.value_dim), dim=-1)
    plain, rotated = queries.unflatten(-1, (heads.num_heads, -1)).split((shape.plain_dim, shape.rope_dim), dim=-1)
    # One row of all query heads and the cached one
    together = normed.new_empty((len(normed), heads.num_heads + writes, heads.head_dim))
    own, head = together[:, : heads.num_heads], together[:, -1]
    own.copy_(kernels.head_products(plain, weights.keys))
    if weights.adapters is not None:
        weights.adapters.add_to_queries(plain, own, metadata, kernels)
    _rotated_part(own, shape).copy_(rotated.unflatten(-1, (2, -1)))
    if writes:
        _write_head(weights, cached[0], head, kernels)
    indexer, index_key = weights.indexer, None
    if indexer is not None:
        index_key = index_keys(indexer, normed, cos_sin, shape.rope_dim, metadata, kernels).unflatten(-1, (2, -1))
        if writes:
            _index_part(head, shape, indexer).copy_(index_key)
    row = together.flatten(1)
    kernels.rope_and_cache(row, cos_sin, metadata, *kv_cache, heads if writes else heads._replace(num_kv_heads=0))
    if growth is not None:
        row[:, : heads.num_heads * heads.head_dim] *= growth.to(row.dtype)
    if weights.growth is not None:
        own *= head_growth(weights.growth, metadata, kernels).unsqueeze(-1).to(own.dtype)
    if indexer is not None:
        assert choice is not None
        assert index_key is not None
        cached_keys, rope = _index_part(kv_cache[0], shape, indexer), (cos_sin, shape.rope_dim)
        if not writes:
            slots = metadata.slot_mapping.long()
            cached_keys[slots // metadata.block_size, slots % metadata.block_size, 0] = index_key.to(cached_keys.dtype)
        if indexer.shape.pool_len:
            write_pools(indexer, cached_keys[:, :, 0], metadata, kernels)
            assert query_latents is not None
            choice.take(choose_pools(indexer, normed, query_latents, cached_keys[:, :, 0], metadata, kernels))
        else:
            choice.take(choose_tokens(indexer, normed, query_latents, *rope, cached_keys, metadata, kernels))
    if choice is None or choice.slots is None:
        attended = kernels.paged_attention(row, *kv_cache, metadata, heads, sliding_window, weights.sinks)
    else:
        attended = attend_chosen(row, kv_cache[0], choice, metadata, heads, kernels, sinks=weights.sinks)
    attended = attended.unflatten(-1, (heads.num_heads, -1))
    of_heads = kernels.head_products(attended, weights.values)
    if weights.adapters is not None:
        weights.adapters.add_to_values(attended, of_heads, metadata, kernels)
    values = of_heads.flatten(1)
    if gates is not None:
        values = (values * kernels.recurrent.sigmoid(gates.float())).to(values.dtype)
    if weights.gate is not None:
        values = gated_heads(values, weights.gate.forward(normed, metadata), kernels)
    return weights.output.forward(values, metadata)


def _write_head(weights: LatentAttentionWeights, cached: torch.Tensor, head: torch.Tensor, kernels: Kernels) -> None:
    """Writes what is cached of tokens, [num_tokens, cached_dim] before its norms, to heads [num_tokens, head_dim], with
    zeros where the keys of indexers are.
    """
    shape = weights.shape
    assert weights.latent_norm is not None
    latent, key = cached.split((shape.kv_rank, shape.rope_dim), dim=-1)
    latent = kernels.rms_norm(latent, weights.latent_norm, shape.norm_eps)
    if weights.key_norm is not None:
        key = kernels.rms_norm(key, weights.key_norm, shape.norm_eps)
    _rotated_part(head, shape).copy_(key.unflatten(-1, (2, -1)))
    latent_part(head, shape).copy_(latent.unflatten(-1, (2, -1)))
    head.unflatten(-1, (2, -1))[..., shape.cached_dim // 2 :] = 0


def _rotated_part(head: torch.Tensor, shape: LatentShape) -> torch.Tensor:
    """Returns the view [..., 2, rope_dim / 2] of the rotated dimensions of heads [..., head_dim]."""
    return head.unflatten(-1, (2, -1))[..., : shape.rope_dim // 2]


def _index_part(head: torch.Tensor, shape: LatentShape, indexer: IndexerWeights) -> torch.Tensor:
    """Returns the view [..., 2, n / 2] of the `n` dimensions that an indexer caches. With pools the first half is a
    key, and the second the logarithms of its weights.
    """
    width = indexer.shape.cached_dim // 2
    first = shape.cached_dim // 2 + indexer.place * width
    return head.unflatten(-1, (2, -1))[..., first : first + width]
