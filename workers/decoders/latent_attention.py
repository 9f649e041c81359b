"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1) over a cache of latent vectors.

Keys and values of all heads are products of one latent vector and a weight of each head. The weights are absorbed: the
keys' one multiplies queries, and the values' one multiplies results. What remains is attention of all query heads over
one KV head, whose key is also its value, so every kernel of grouped-query attention computes it.

A cached token is one head in the order in which the kernels rotate, dimension `i` with dimension `i + head_dim / 2`:
half of the rotated key, half of the latent vector, then the other halves. The latent dimensions have a cosine of 1.
"""

from __future__ import annotations

import torch

from manta.workers.decoders.head_gates import gated_heads
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.protocol import Kernels
from manta.workers.kernels.weights import LatentAttentionWeights
from manta.workers.models.model_config import HeadShape, LatentShape


def cached_layout(expansion: torch.Tensor, shape: LatentShape) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `LatentAttentionWeights.keys` and `.values` of the weight [num_heads * (plain_dim + value_dim), kv_rank],
    which has the keys of all heads, then their values. Rows of the rotated dimensions are zeros.
    """
    num_heads = len(expansion) // (shape.plain_dim + shape.value_dim)
    half = shape.kv_rank // 2
    zeros = expansion.new_zeros((len(expansion), shape.rope_dim // 2))
    padded = torch.cat((zeros, expansion[:, :half], zeros, expansion[:, half:]), dim=-1)
    keys, values = padded.split((num_heads * shape.plain_dim, num_heads * shape.value_dim))
    return keys.unflatten(0, (num_heads, -1)), values.unflatten(0, (num_heads, -1)).transpose(1, 2)


def attend_latent(
    weights: LatentAttentionWeights,
    normed: torch.Tensor,
    cos_sin: torch.Tensor,
    metadata: AttentionMetadata,
    kv_cache: tuple[torch.Tensor, torch.Tensor],
    heads: HeadShape,
    shape: LatentShape,
    kernels: Kernels,
    growth: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the attention's result [num_tokens, hidden] of normed hidden states, and writes the tokens' latent
    vectors and rotated keys to their KV slots. `growth` [num_tokens, 1] multiplies the queries.
    """
    query_width = shape.query_rank or heads.num_heads * (shape.plain_dim + shape.rope_dim)
    queries, cached = weights.inputs.forward(normed, metadata).split((query_width, heads.head_dim), dim=-1)
    if weights.queries is not None:
        assert weights.query_norm is not None
        queries = kernels.rms_norm(queries, weights.query_norm, shape.norm_eps)
        queries = weights.queries.forward(queries, metadata)
    latent, key = cached.split((shape.kv_rank, shape.rope_dim), dim=-1)
    latent = kernels.rms_norm(latent, weights.latent_norm, shape.norm_eps)
    plain, rotated = queries.unflatten(-1, (heads.num_heads, -1)).split((shape.plain_dim, shape.rope_dim), dim=-1)
    # One row of all query heads and the cached one
    together = normed.new_empty((len(normed), heads.num_heads + 1, heads.head_dim))
    together[:, :-1] = kernels.head_products(plain, weights.keys)
    _rotated_part(together[:, :-1], shape).copy_(rotated.unflatten(-1, (2, -1)))
    _rotated_part(together[:, -1], shape).copy_(key.unflatten(-1, (2, -1)))
    _latent_part(together[:, -1], shape).copy_(latent.unflatten(-1, (2, -1)))
    row = together.flatten(1)
    kernels.rope_and_cache(row, cos_sin, metadata, *kv_cache, heads)
    if growth is not None:
        row[:, : heads.num_heads * heads.head_dim] *= growth.to(row.dtype)
    attended = kernels.paged_attention(row, *kv_cache, metadata, heads)
    values = kernels.head_products(attended.unflatten(-1, (heads.num_heads, -1)), weights.values).flatten(1)
    if weights.gate is not None:
        values = gated_heads(values, weights.gate.forward(normed, metadata), kernels)
    return weights.output.forward(values, metadata)


def _rotated_part(head: torch.Tensor, shape: LatentShape) -> torch.Tensor:
    """Returns the view [..., 2, rope_dim / 2] of the rotated dimensions of heads [..., head_dim]."""
    return head.unflatten(-1, (2, -1))[..., : shape.rope_dim // 2]


def _latent_part(head: torch.Tensor, shape: LatentShape) -> torch.Tensor:
    """Returns the view [..., 2, kv_rank / 2] of the dimensions of latent vectors."""
    return head.unflatten(-1, (2, -1))[..., shape.rope_dim // 2 :]
