"""Pools of neighbouring tokens, of which latent attention reads those that an indexer chooses (GLM-5.3 Flash).

The key of a pool is a sum of its tokens' keys, weighted by a softmax over the tokens for each dimension. A token caches
its key and the logarithms of its weights. The token that completes a pool caches the pool's key in place of its own,
which nothing else reads: a pool whose last token was a rejected draft is made anew with the next one. Pools begin at
multiples of their length and lie in one block, so blocks are shared, copied and given back as those of other models.

`block_choice.py` chooses blocks whose keys are means of their tokens'. What both do is there.
"""

from __future__ import annotations

import functools

import torch

from manta.workers.decoders.block_choice import best_blocks
from manta.workers.decoders.sparse_attention import PIECE_BYTES, TokenChoice
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.protocol import Kernels
from manta.workers.kernels.weights import IndexerWeights

_LEAST_EXPONENT = -87.0
"""Logarithm of the least weight of a token in a sum: that of about the smallest float32."""


def write_pools(weights: IndexerWeights, cached: torch.Tensor, metadata: AttentionMetadata, kernels: Kernels) -> None:
    """Writes the keys of the pools that a step's tokens complete. `cached` [num_blocks, block_size, 2, head_dim] has
    the keys of all KV slots and then the logarithms of their weights, this step's written.
    """
    assert weights.pool_biases is not None
    length, block_size = weights.shape.pool_len, metadata.block_size
    last = ((metadata.positions + 1) % length == 0).nonzero().squeeze(1)
    slots = metadata.slot_mapping[last].long()
    of_pools = slots.unsqueeze(1) + torch.arange(1 - length, 1, device=slots.device)
    keys, logits = cached[of_pools // block_size, of_pools % block_size].float().unbind(2)
    summed = softmax_sums(keys, logits + weights.pool_biases, kernels)
    cached[slots // block_size, slots % block_size, 0] = summed.to(cached.dtype)


def choose_pools(
    weights: IndexerWeights,
    normed: torch.Tensor,
    query_latents: torch.Tensor,
    cached: torch.Tensor,
    metadata: AttentionMetadata,
    kernels: Kernels,
    piece_bytes: int = PIECE_BYTES,
) -> TokenChoice:
    """Returns what the tokens of a step attend to, by their normed hidden states and the normed latent vectors of their
    queries. `cached` is that of `write_pools`, the step's pools written. Scores of several tokens take at most
    `piece_bytes` at a time.
    """
    pools = weights.shape.pools
    if metadata.max_context_len // pools.block_len <= pools.num_chosen:
        return TokenChoice()
    queries = weights.queries.forward(query_latents, metadata).unflatten(-1, (pools.num_heads, -1)).float()
    shares = weights.shares.forward(normed.float())
    of_pools = cached[:, pools.block_len - 1 :: pools.block_len, 0]

    def pool_keys(blocks: torch.Tensor, num_pools: int) -> torch.Tensor:
        return of_pools[blocks].flatten(0, 1)[:num_pools].float().T.contiguous()

    return best_blocks(queries, shares, pool_keys, pools, metadata, kernels, piece_bytes)


def softmax_sums(
    numbers: torch.Tensor, logits: torch.Tensor, kernels: Kernels, is_there: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the sums of terms weighted by a softmax over the terms for each dimension, float32 [num_rows, width], of
    the terms' numbers and logits, both [num_rows, num_terms, width]. Terms where `is_there` [num_rows, num_terms] is
    False do not count; with None all do. Terms are added one after the other.
    """
    if is_there is not None:
        is_missing = ~is_there.unsqueeze(-1)
        logits, numbers = logits.masked_fill(is_missing, -torch.inf), numbers.masked_fill(is_missing, 0)
    powers = kernels.recurrent.exp((logits - logits.amax(1, keepdim=True)).clamp(min=_LEAST_EXPONENT))
    if is_there is not None:
        powers = powers.masked_fill(is_missing, 0)
    total = functools.reduce(torch.add, powers.unbind(1))
    return functools.reduce(torch.add, (powers * numbers).unbind(1)) / total
