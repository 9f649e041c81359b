"""Attention of long prompts over latent vectors that are expanded to the keys and values of every head.

With absorbed weights (`workers/decoders/latent_attention.py`) each pair of a query and a key takes as many
multiplications as the latent vector is wide, which is several times a head's own width. For a token of a prompt it pays
to expand the latent vectors instead, once for all queries of the step, as DeepSeek-V2's report (2024, section 2.1) has
it for training. Only on CPUs: a device's step does not tell the host how long its sequences are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from manta.workers.kernels import kv_cache
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.weights import LatentAttentionWeights
from manta.workers.models.model_config import HeadShape, LatentShape

LEAST_TOKENS = 32
"""Tokens of a sequence in a step below which it is not worth a look."""
LEAST_GAIN = 1.2
"""Ratio of multiplications from which on the latent vectors are expanded."""
MOST_BYTES = 64 * 2**20
"""Bytes of expanded keys and values that are held at a time: those of as many heads as fit, of at least one."""


def expanded_sequences(metadata: AttentionMetadata, heads: HeadShape, shape: LatentShape) -> list[int]:
    """Returns the numbers of the sequences whose attention takes fewer multiplications over expanded keys and
    values.
    """
    if type(metadata) is not AttentionMetadata or metadata.max_query_len < LEAST_TOKENS:
        return []
    query_lens = metadata.query_start.diff().tolist()
    pairs = zip(query_lens, metadata.context_lens.tolist(), strict=True)
    return [sequence for sequence, lens in enumerate(pairs) if _pays_off(*lens, heads, shape)]


def _pays_off(query_len: int, context_len: int, heads: HeadShape, shape: LatentShape) -> bool:
    if query_len < LEAST_TOKENS:
        return False
    num_pairs = query_len * (context_len - query_len / 2)
    product = (shape.plain_dim + shape.value_dim) * heads.head_dim  # of a token with the weights of a head
    absorbed = 2 * heads.head_dim * num_pairs + product * query_len
    expanded = 2 * _width(shape) * num_pairs + product * context_len
    return absorbed > LEAST_GAIN * expanded


def _width(shape: LatentShape) -> int:
    """Returns the common width of a head's keys and values: torch's attention takes only equal ones."""
    return max(shape.plain_dim + shape.rope_dim, shape.value_dim)


def attend_expanded(
    weights: LatentAttentionWeights,
    queries: torch.Tensor,
    k_cache: torch.Tensor,
    metadata: AttentionMetadata,
    sequence: int,
    heads: HeadShape,
    shape: LatentShape,
) -> torch.Tensor:
    """Returns the values [query_len, num_heads, value_dim] that one sequence's tokens attend to.

    `queries` is [query_len, num_heads, plain_dim + rope_dim], the rotated dimensions last. The cache holds the latent
    vectors of the whole context, those of this step too.
    """
    query_len, context_len = len(queries), int(metadata.context_lens[sequence])
    blocks = metadata.block_tables[sequence, : -(-context_len // metadata.block_size)].long()
    cached = kv_cache.read(k_cache, blocks, metadata.block_size, heads)[:context_len, 0].to(queries.dtype)
    rotated = cached.unflatten(-1, (2, -1))[..., : shape.rope_dim // 2].flatten(-2)
    width = _width(shape)
    visible = None
    if query_len < context_len:
        visible = torch.ones(query_len, context_len, dtype=torch.bool).tril(context_len - query_len)
    step = max(1, MOST_BYTES // (2 * context_len * width * queries.element_size()))
    found = queries.new_empty((query_len, heads.num_heads, shape.value_dim))
    for first in range(0, heads.num_heads, step):
        own = slice(first, first + step)
        plain = torch.matmul(cached, weights.keys[own].transpose(1, 2))
        keys = torch.cat((plain, rotated.expand(len(plain), -1, -1)), dim=-1)
        values = torch.matmul(cached, weights.values[own])
        attended = F.scaled_dot_product_attention(
            _widened(queries[:, own].transpose(0, 1), width),
            _widened(keys, width),
            _widened(values, width),
            attn_mask=visible,
            is_causal=visible is None,
            scale=heads.scale,
        )
        found[:, own] = attended[0, ..., : shape.value_dim].transpose(0, 1)
    return found


def _widened(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Returns [1, num_heads, n, width] of [num_heads, n, dim], filled up with zeros."""
    return F.pad(tensor, (0, width - tensor.shape[-1])).unsqueeze(0)
