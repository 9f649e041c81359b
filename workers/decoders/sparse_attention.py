"""Attention to the tokens that an indexer chooses (DeepSeek Sparse Attention; DeepSeek-V3.2, 2025,
https://arxiv.org/abs/2512.02556, section 2.1).

An indexer has small query heads, and one key a token, which is cached as the last dimensions of the token's latent
head. The score of an earlier token is the sum over the heads of `relu(query . key)`, times a share of each head that is
computed of the hidden state. A token attends to the `num_chosen` tokens with the best scores, or to all if there are
no more. Of equal scores the earlier token's counts as the better one, whatever is computed in the same step.

The cached heads of the chosen tokens are copied side by side, to blocks of a sequence that has no other tokens. So the
platform's own kernel attends to them, and reads nothing of a token that was not chosen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.protocol import Kernels
from manta.workers.kernels.weights import GrowthWeights, IndexerWeights
from manta.workers.models.model_config import HeadShape, IndexerShape

PIECE_BYTES = 32 << 20
"""Largest buffer of scores, and of copied heads, which are made for as many tokens at a time as fit."""


@dataclasses.dataclass(slots=True)
class TokenChoice:
    """The tokens that those of a step attend to. A layer with an indexer replaces what the one before it chose."""

    slots: torch.Tensor | None = None
    """int32 [num_tokens, num_chosen]: KV slots in the order of their positions. None if every token attends to all."""
    lens: torch.Tensor | None = None
    """int32 [num_tokens]: how many of the slots count."""

    def take(self, other: TokenChoice) -> None:
        self.slots, self.lens = other.slots, other.lens


def head_growth(growth: GrowthWeights, metadata: AttentionMetadata, kernels: Kernels) -> torch.Tensor:
    """Returns the factors on the queries of each head, float32 [num_tokens, num_heads]."""
    return growth.rate * kernels.log1p(metadata.positions.float()).unsqueeze(-1) + growth.bias


def index_keys(
    weights: IndexerWeights,
    normed: torch.Tensor,
    cos_sin: torch.Tensor,
    rope_dim: int,
    metadata: AttentionMetadata,
    kernels: Kernels,
) -> torch.Tensor:
    """Returns what is cached of normed hidden states, float32 [num_tokens, cached_dim]: their rotated keys, and with
    pools the logarithms of their weights.
    """
    shape = weights.shape
    projected = weights.keys.forward(normed, metadata)
    keys, logits = projected.split((shape.head_dim, projected.shape[-1] - shape.head_dim), dim=-1)
    keys = kernels.layer_norm(keys.float(), weights.key_norm, shape.norm_eps) + weights.key_bias
    keys = _rotated(keys.to(normed.dtype).unsqueeze(1), cos_sin, rope_dim, shape, metadata).squeeze(1)
    return torch.cat((keys, logits.float()), dim=-1)


def choose_tokens(
    weights: IndexerWeights,
    normed: torch.Tensor,
    query_latents: torch.Tensor | None,
    cos_sin: torch.Tensor,
    rope_dim: int,
    cached_keys: torch.Tensor,
    metadata: AttentionMetadata,
    kernels: Kernels,
    piece_bytes: int = PIECE_BYTES,
) -> TokenChoice:
    """Returns what the tokens of a step attend to, by their normed hidden states and the normed latent vectors of their
    queries, if they have some. `cached_keys` [num_blocks, block_size, ...] are those of all KV slots, this step's
    written. Scores of several tokens take at most `piece_bytes` at a time.
    """
    shape, block_size = weights.shape, metadata.block_size
    if metadata.max_context_len <= shape.num_chosen:
        return TokenChoice()
    if weights.query_norm is not None:
        scale, bias = weights.query_norm
        query_latents = (kernels.layer_norm(normed.float(), scale, shape.norm_eps) + bias).to(normed.dtype)
    assert query_latents is not None
    queries = weights.queries.forward(query_latents, metadata).unflatten(-1, (shape.num_heads, -1))
    if weights.growth is not None:
        queries = queries * head_growth(weights.growth, metadata, kernels).unsqueeze(-1)
    queries = _rotated(queries, cos_sin, rope_dim, shape, metadata)
    shares = weights.shares.forward(normed.float())
    slots = torch.zeros((len(normed), shape.num_chosen), dtype=torch.int32, device=normed.device)
    starts = metadata.query_start.tolist()
    for sequence, context_len in enumerate(metadata.context_lens.tolist()):
        first, last = starts[sequence], starts[sequence + 1]
        blocks = metadata.block_tables[sequence, : -(-context_len // block_size)].long()
        own_slots = (blocks.unsqueeze(1) * block_size + torch.arange(block_size, device=blocks.device)).flatten()
        if context_len <= shape.num_chosen:
            slots[first:last, :context_len] = own_slots[:context_len]
            continue
        keys = cached_keys[blocks].reshape(-1, shape.head_dim)[:context_len].float().T.contiguous()
        own, num_seen = slice(first, last), metadata.positions[first:last] + 1
        best = best_keys(queries[own], keys, shares[own], num_seen, shape.num_chosen, kernels, piece_bytes)
        slots[own] = own_slots[best].int()
    return TokenChoice(slots, (metadata.positions + 1).clamp(max=shape.num_chosen).int())


def attend_chosen(
    row: torch.Tensor,
    k_cache: torch.Tensor,
    choice: TokenChoice,
    metadata: AttentionMetadata,
    heads: HeadShape,
    kernels: Kernels,
    piece_bytes: int = PIECE_BYTES,
    v_cache: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the attention of each token over the tokens of `choice`, [num_tokens, num_heads * head_dim]. Cached heads
    for several tokens take at most `piece_bytes` at a time. Without a `v_cache` keys are the values too. The other
    arguments are those of `paged_attention`.
    """
    assert choice.slots is not None
    assert choice.lens is not None
    block_size, num_chosen = metadata.block_size, choice.slots.shape[1]
    slots = F.pad(choice.slots, (0, whole_blocks(num_chosen, metadata) - num_chosen)).long()

    def copy(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        places = slots[rows].view(-1, block_size)
        keys = k_cache[places // block_size, places % block_size]
        return keys, keys if v_cache is None else v_cache[places // block_size, places % block_size]

    row_bytes = slots.shape[1] * k_cache[0, 0].nbytes
    return attend_copies(row, copy, num_chosen, choice.lens, row_bytes, metadata, heads, kernels, sinks, piece_bytes)


def attend_copies(
    row: torch.Tensor,
    copy: Callable[[slice], tuple[torch.Tensor, torch.Tensor]],
    most_keys: int,
    lens: torch.Tensor,
    row_bytes: int,
    metadata: AttentionMetadata,
    heads: HeadShape,
    kernels: Kernels,
    sinks: torch.Tensor | None = None,
    piece_bytes: int = PIECE_BYTES,
) -> torch.Tensor:
    """Returns the attention of each token over keys of its own, [num_tokens, num_heads * head_dim]. `copy` returns the
    keys and values of some tokens in blocks, [num_blocks, block_size, num_kv_heads, head_dim]: for each token as many
    blocks as `most_keys` need, of whose keys the first `lens` (int32 [num_tokens]) count. Those of a token have
    `row_bytes`, and those of several take at most `piece_bytes` at a time. The other arguments are those of
    `paged_attention`.
    """
    num_blocks = whole_blocks(most_keys, metadata) // metadata.block_size
    parts = []
    for rows in pieces(0, len(lens), row_bytes, piece_bytes):
        each = each_alone(metadata, rows, lens[rows], num_blocks)
        parts.append(kernels.paged_attention(row[rows], *copy(rows), each, heads, sinks=sinks))
    return torch.cat(parts)


def whole_blocks(num_keys: int, metadata: AttentionMetadata) -> int:
    """Returns the number of keys for which blocks that hold `num_keys` have room."""
    return -(-num_keys // metadata.block_size) * metadata.block_size


def best_keys(
    queries: torch.Tensor,
    keys: torch.Tensor,
    shares: torch.Tensor,
    num_seen: torch.Tensor,
    num_chosen: int,
    kernels: Kernels,
    piece_bytes: int = PIECE_BYTES,
) -> torch.Tensor:
    """Returns which keys an indexer scores best for each token, int64 [num_tokens, num_chosen] ascending: of the first
    `num_seen` [num_tokens], and then of the others. `queries` [num_tokens, num_heads, head_dim], `keys` [head_dim,
    num_keys] and `shares` [num_tokens, num_heads] are float32.
    """
    places = torch.arange(keys.shape[1], device=keys.device)
    row_bytes = queries.shape[1] * keys.shape[1] * keys.itemsize
    found = []
    for rows in pieces(0, len(queries), row_bytes, piece_bytes):
        scores = scores_of(queries[rows], keys, shares[rows], kernels)
        scores.masked_fill_(places >= num_seen[rows].unsqueeze(1), -torch.inf)
        found.append(best_places(scores, num_chosen))
    return torch.cat(found)


def pieces(first: int, last: int, row_bytes: int, piece_bytes: int) -> Iterator[slice]:
    """Yields slices of the rows `[first, last)` that need at most `piece_bytes`, or one row, at `row_bytes` each."""
    num_rows = max(1, piece_bytes // row_bytes)
    for start in range(first, last, num_rows):
        yield slice(start, min(last, start + num_rows))


def _rotated(
    heads: torch.Tensor, cos_sin: torch.Tensor, rope_dim: int, shape: IndexerShape, metadata: AttentionMetadata
) -> torch.Tensor:
    """Returns heads [num_tokens, num_heads, head_dim] rotated, in float32. Queries and keys get the same new order of
    their dimensions.
    """
    cos, sin = (each[..., : rope_dim // 2] for each in cos_sin[metadata.positions].unsqueeze(1).chunk(2, dim=-1))
    wide, rest = heads.float(), shape.head_dim - rope_dim
    plain, rotating = wide.split((rest, rope_dim), -1) if shape.rotates_last else wide.split((rope_dim, rest), -1)[::-1]
    if shape.is_interleaved:
        low, high = rotating[..., ::2], rotating[..., 1::2]
    else:
        low, high = rotating.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin, plain), dim=-1)


def scores_of(queries: torch.Tensor, keys: torch.Tensor, shares: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """Returns the scores of all keys [head_dim, context_len] for each token, float32 [num_tokens, context_len]; minus
    infinity for what is no number. The paper's constant factors on all scores change no choice, and are left out.
    """
    num_tokens, num_heads, _ = queries.shape
    products = kernels.head_products(queries.flatten(0, 1).unsqueeze(1), keys.unsqueeze(0))
    products = products.reshape(num_tokens, num_heads, -1).relu_()
    scores = kernels.head_products(shares.unsqueeze(0), products).squeeze(0)
    return scores.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def best_places(scores: torch.Tensor, num_chosen: int) -> torch.Tensor:
    """Returns where the best scores of each row are, int64 [num_rows, num_chosen] in ascending order; of those that
    equal the last one of them, the first ones.
    """
    bits = (scores + 0.0).view(torch.int32).long()  # the sum makes 0 of -0
    in_order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # integers that compare as the floats do
    ranked = (in_order << 32) - torch.arange(scores.shape[1], device=scores.device)
    return ranked.topk(num_chosen, dim=-1, sorted=False).indices.sort(dim=-1).values


def each_alone(metadata: AttentionMetadata, rows: slice, lens: torch.Tensor, num_blocks: int) -> AttentionMetadata:
    """Returns metadata in which each token of `rows` is a sequence of `lens` tokens, in `num_blocks` blocks of its own
    that lie one after the other.
    """
    num_rows, device = len(lens), lens.device
    return dataclasses.replace(
        metadata,
        positions=metadata.positions[rows],
        slot_mapping=metadata.slot_mapping[rows],
        query_start=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
        context_lens=lens,
        block_tables=torch.arange(num_rows * num_blocks, dtype=torch.int32, device=device).view(num_rows, -1),
        max_query_len=1,
        max_context_len=int(lens.max()),
        total_context_len=sum(lens.tolist()),
        shared_prefixes=None,
        other_groups=(),
    )
