"""Grouped-query attention to the blocks of tokens that an indexer chooses (Qwen4-Exp's QSA).

An indexer has small query heads, and one key a token, which is cached behind the keys of attention. The key of a block
of neighbouring tokens is the mean of theirs, normed and rotated to the block's first position. A block's score is the
sum over the heads of `relu(query . key)`. A token attends to the blocks with the best scores among the whole ones up to
its own position, and to the tokens after these. Of equal scores the earlier block's counts as the better one.

`sparse_attention.py` chooses tokens for latent attention, and `key_pools.py` pools of tokens. What all do is in the
former, such as attention to the choice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from manta.workers.decoders.sparse_attention import PIECE_BYTES, TokenChoice, best_places, pieces, scores_of
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.protocol import Kernels
from manta.workers.kernels.weights import BlockIndexerWeights
from manta.workers.models.block_indexer import BlockIndexerShape


def choose_blocks(
    weights: BlockIndexerWeights,
    normed: torch.Tensor,
    cos_sin: torch.Tensor,
    rope_dim: int,
    key_cache: torch.Tensor,
    metadata: AttentionMetadata,
    eps: float,
    kernels: Kernels,
    piece_bytes: int = PIECE_BYTES,
) -> TokenChoice:
    """Returns the tokens that those of a step attend to, by their normed hidden states, and writes their keys to
    `key_cache` [num_blocks, block_size, ...]. `rope_dim` first dimensions of a head rotate. Scores of several tokens
    take at most `piece_bytes` at a time.
    """
    shape, block_size = weights.shape, metadata.block_size
    projected = weights.projection.forward(normed, metadata).unflatten(-1, (-1, shape.head_dim))
    slots = metadata.slot_mapping.long()
    key_cache[slots // block_size, slots % block_size, : shape.head_dim] = projected[:, -1].to(key_cache.dtype)
    if metadata.max_context_len // shape.block_len <= shape.num_chosen:
        return TokenChoice()
    queries = kernels.rms_norm(projected[:, :-1], weights.query_norm, eps)
    queries = _rotated(queries, cos_sin[metadata.positions], rope_dim)

    def block_keys(blocks: torch.Tensor, num_blocks: int) -> torch.Tensor:
        cached = key_cache[blocks][..., : shape.head_dim].flatten(0, 1)
        return _block_keys(weights, cached[: num_blocks * shape.block_len], cos_sin, rope_dim, eps, kernels)

    shares = queries.new_ones(queries.shape[:2])
    return best_blocks(queries, shares, block_keys, shape, metadata, kernels, piece_bytes)


def best_blocks(
    queries: torch.Tensor,
    shares: torch.Tensor,
    keys_of: Callable[[torch.Tensor, int], torch.Tensor],
    shape: BlockIndexerShape,
    metadata: AttentionMetadata,
    kernels: Kernels,
    piece_bytes: int = PIECE_BYTES,
) -> TokenChoice:
    """Returns the tokens of the blocks whose keys score best for each token of a step, and those after the last whole
    block. `queries` [num_tokens, num_heads, head_dim] and `shares` [num_tokens, num_heads] are float32. `keys_of` gives
    the keys of a sequence's whole blocks, float32 [head_dim, num_blocks], of its blocks of the cache and their number.
    """
    block_size = metadata.block_size
    chosen = torch.zeros((len(queries), shape.most_tokens), dtype=torch.int32, device=queries.device)
    starts = metadata.query_start.tolist()
    for sequence, context_len in enumerate(metadata.context_lens.tolist()):
        rows = slice(starts[sequence], starts[sequence + 1])
        blocks = metadata.block_tables[sequence, : -(-context_len // block_size)].long()
        own_slots = (blocks.unsqueeze(1) * block_size + torch.arange(block_size, device=blocks.device)).flatten()
        if context_len // shape.block_len <= shape.num_chosen:
            chosen[rows, :context_len] = own_slots[:context_len].int()
            continue
        keys = keys_of(blocks, context_len // shape.block_len)
        for part in pieces(rows.start, rows.stop, shape.num_heads * keys.shape[1] * keys.itemsize, piece_bytes):
            places = _chosen_places(queries[part], shares[part], keys, metadata.positions[part], shape, kernels)
            chosen[part] = own_slots[places.clamp(max=context_len - 1)].int()
    num_whole = (metadata.positions + 1) // shape.block_len
    lens = num_whole.clamp(max=shape.num_chosen) * shape.block_len + (metadata.positions + 1) % shape.block_len
    return TokenChoice(chosen, lens.int())


def _block_keys(
    weights: BlockIndexerWeights,
    cached: torch.Tensor,
    cos_sin: torch.Tensor,
    rope_dim: int,
    eps: float,
    kernels: Kernels,
) -> torch.Tensor:
    """Returns the keys of a sequence's whole blocks, float32 [head_dim, num_blocks], of the keys of their tokens
    [num_blocks * block_len, head_dim].
    """
    length = weights.shape.block_len
    num_blocks = len(cached) // length
    first, *others = cached.float().unflatten(0, (num_blocks, length)).unbind(1)
    for other in others:
        first = first + other
    means = (first / length).to(weights.key_norm.dtype)
    normed = kernels.rms_norm(means, weights.key_norm, eps).unsqueeze(1)
    return _rotated(normed, cos_sin[: num_blocks * length : length], rope_dim).squeeze(1).T.contiguous()


def _chosen_places(
    queries: torch.Tensor,
    shares: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    shape: BlockIndexerShape,
    kernels: Kernels,
) -> torch.Tensor:
    """Returns the positions that tokens attend to, int64 [num_tokens, most_tokens] in ascending order: those of the
    best blocks, then those after the last whole one, of which not all are there. Tokens with fewer whole blocks than
    are chosen attend to all positions, and have these first.
    """
    num_whole = (positions + 1).unsqueeze(1) // shape.block_len
    scores = scores_of(queries, keys, shares, kernels)
    scores.masked_fill_(torch.arange(keys.shape[1], device=keys.device) >= num_whole, -torch.inf)
    of_block = torch.arange(shape.block_len, device=keys.device)
    best = best_places(scores, shape.num_chosen).unsqueeze(-1) * shape.block_len + of_block
    return torch.cat((best.flatten(1), num_whole * shape.block_len + of_block[:-1]), dim=-1)


def _rotated(heads: torch.Tensor, cos_sin: torch.Tensor, rope_dim: int) -> torch.Tensor:
    """Returns heads [num_rows, num_heads, head_dim] rotated by the rows of a rotary table, in float32."""
    cos, sin = (each[..., : rope_dim // 2] for each in cos_sin.unsqueeze(1).chunk(2, dim=-1))
    rotating, plain = heads.float().split((rope_dim, heads.shape[-1] - rope_dim), dim=-1)
    low, high = rotating.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin, plain), dim=-1)
