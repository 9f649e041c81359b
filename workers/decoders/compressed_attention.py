"""Attention over the last tokens, and over entries that each stand for several tokens (DeepSeek-V4, 2026, section 2.3).

All heads have one key, which is their value too. A token attends to the last tokens in a window, and to entries that
end with it or before. An entry is a sum of products of its tokens' hidden states, weighted by a softmax over the tokens
for each dimension (heavily compressed attention). Or an entry is made of two series: one of its own tokens, and one of
the tokens of the entry before. A token then attends to the `num_chosen` entries that an indexer scores best, whose keys
are compressed likewise (compressed sparse attention).

The token that completes an entry writes it to the cache: spread over the rows of its last tokens, which lie in one
block, behind their keys. What an entry will be made of is a recurrent state, the products of the last tokens. So blocks
and states are shared, copied and given back as those of any other model. Entries that a rejected draft has completed
are written again before a token may read them.

The keys of a token's window and its entries are copied side by side, and the platform's own kernel attends to them.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from manta.workers.decoders.key_pools import softmax_sums
from manta.workers.decoders.sparse_attention import PIECE_BYTES, attend_copies, best_keys, whole_blocks
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.convolution import behind_states
from manta.workers.kernels.protocol import Kernels
from manta.workers.kernels.weights import CompressedAttentionWeights, CompressorWeights, EntriesWeights
from manta.workers.models.model_config import CompressedShape, HeadShape


def attend_compressed(
    weights: CompressedAttentionWeights,
    normed: torch.Tensor,
    cos_sin: torch.Tensor,
    metadata: AttentionMetadata,
    cache: tuple[torch.Tensor, ...],
    cached_heads: HeadShape,
    shape: CompressedShape,
    eps: float,
    kernels: Kernels,
) -> torch.Tensor:
    """Returns the attention's result [num_tokens, hidden] of normed hidden states. Writes the tokens' keys to their KV
    slots, the entries that they complete, and the step's states. `cache` holds the rows of the cache twice, and the
    state of a layer with entries. `cached_heads` are those of the cache, and `eps` is the constant in all norms.
    """
    rows, _, *states = cache
    num_heads, head_dim = cached_heads.num_heads, shape.head_dim
    latents, keys = weights.inputs.forward(normed, metadata).split((shape.query_rank, head_dim), dim=-1)
    latents = kernels.rms_norm(latents, weights.query_norm, eps)
    queries = weights.queries.forward(latents, metadata).unflatten(-1, (num_heads, head_dim))
    turn = functools.partial(_turned, cos_sin=cos_sin, rope_dim=shape.rope_dim)
    queries = turn(kernels.rms_norm(queries, weights.head_norm, eps), positions=metadata.positions)
    keys = turn(kernels.rms_norm(keys, weights.key_norm, eps).unsqueeze(1), positions=metadata.positions).squeeze(1)
    flat = rows.view(-1, rows.shape[-1])
    if weights.entries is None:
        attended = _attend_window(queries, keys, flat, rows, metadata, cached_heads, shape, weights.sinks, kernels)
    else:
        flat[metadata.slot_mapping, :head_dim] = keys
        stored = _write_entries(weights.entries, normed, flat, states[0], turn, metadata, shape, eps, kernels)
        chosen = _choose(weights.entries, normed, latents, turn, stored, metadata, shape, kernels)
        heads = cached_heads._replace(head_dim=head_dim)
        rate, sinks = weights.entries.rate, weights.sinks
        attended = _attend_entries(queries, flat, stored, chosen, rate, metadata, heads, shape, sinks, kernels)
    values = attended.unflatten(-1, (num_heads, -1))[..., :head_dim]
    back = turn(values, positions=metadata.positions, is_back=True)
    grouped = back.flatten(1).unflatten(-1, (len(weights.group_outputs), -1))
    return weights.output.forward(kernels.head_products(grouped, weights.group_outputs).flatten(1), metadata)


def _turned(
    heads: torch.Tensor, *, cos_sin: torch.Tensor, rope_dim: int, positions: torch.Tensor, is_back: bool = False
) -> torch.Tensor:
    """Returns heads [num_rows, num_heads, width] with their last `rope_dim` dimensions rotated for `positions`, or
    rotated back. Neighbours rotate together.
    """
    cos, sin = (each[..., : rope_dim // 2] for each in cos_sin[positions].unsqueeze(1).chunk(2, dim=-1))
    sin = -sin if is_back else sin
    plain, rotating = heads.split((heads.shape[-1] - rope_dim, rope_dim), dim=-1)
    low, high = rotating.float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((low * cos - high * sin, high * cos + low * sin), dim=-1).flatten(-2)
    return torch.cat((plain, rotated.to(heads.dtype)), dim=-1)


def _attend_window(
    queries: torch.Tensor,
    keys: torch.Tensor,
    flat: torch.Tensor,
    rows: torch.Tensor,
    metadata: AttentionMetadata,
    heads: HeadShape,
    shape: CompressedShape,
    sinks: torch.Tensor,
    kernels: Kernels,
) -> torch.Tensor:
    """Returns the attention of a layer without entries, [num_tokens, num_heads * cached width]: zeros follow its keys
    in the cache.
    """
    rest = (0, heads.head_dim - shape.head_dim)
    flat[metadata.slot_mapping] = F.pad(keys, rest)
    return kernels.paged_attention(F.pad(queries, rest).flatten(1), rows, rows, metadata, heads, shape.window, sinks)


class _StoredEntries:
    """Views of the entries in the cache: [num_slots / spread, spread, width / spread] each."""

    def __init__(self, flat: torch.Tensor, shape: CompressedShape) -> None:
        spread, first = shape.spread, shape.head_dim
        by_entry = flat.unflatten(0, (-1, spread))
        part, index_part = first // spread, shape.index_dim // spread
        self.keys = by_entry[..., first : first + part]
        self.index_keys = by_entry[..., first + part : first + part + index_part]


def _write_entries(
    weights: EntriesWeights,
    normed: torch.Tensor,
    flat: torch.Tensor,
    states: torch.Tensor,
    turn: functools.partial[torch.Tensor],
    metadata: AttentionMetadata,
    shape: CompressedShape,
    eps: float,
    kernels: Kernels,
) -> _StoredEntries:
    """Writes the entries that the step's tokens complete. Returns those of the cache."""
    step, stored = metadata.states, _StoredEntries(flat, shape)
    assert step is not None, "a model with recurrent states gets their slots with each step"
    projected = weights.inputs.forward(normed, metadata).float()
    before, places = behind_states(projected, states, step)
    last = ((metadata.positions + 1) % weights.rate == 0).nonzero().squeeze(1)
    terms = torch.arange(1 - weights.num_terms, 1, device=flat.device)
    products = before[places[last].unsqueeze(1) + terms]
    ends = metadata.positions[last]
    is_there = ends.unsqueeze(1) + terms >= 0
    places_of_entries = metadata.slot_mapping[last] // shape.spread
    widths = [2 * compressor.num_products for compressor in weights.compressors]
    views = (stored.keys, stored.index_keys)
    for compressor, of_kind, view in zip(weights.compressors, products.split(widths, dim=-1), views, strict=False):
        entries = _compressed(compressor, of_kind, is_there, kernels).to(flat.dtype)
        entries = kernels.rms_norm(entries, compressor.norm, eps).unsqueeze(1)
        entries = turn(entries, positions=ends + 1 - weights.rate)
        view[places_of_entries] = entries.view(-1, *view.shape[1:])
    return stored


def _compressed(
    weights: CompressorWeights, products: torch.Tensor, is_there: torch.Tensor, kernels: Kernels
) -> torch.Tensor:
    """Returns entries, float32 [num_entries, width], of the products of their tokens [num_entries, num_terms, 2 *
    num_products]: numbers, then the logarithms of their weights. Tokens before the first one, where `is_there` is
    False, have no weight.
    """
    num_terms, width = weights.biases.shape
    numbers, logits = products.chunk(2, dim=-1)
    if weights.num_products > width:  # the series of the entry before, then the entry's own
        half = num_terms // 2
        numbers, logits = (
            torch.cat((each[:, :half, :width], each[:, half:, width:]), dim=1) for each in (numbers, logits)
        )
    return softmax_sums(numbers, logits + weights.biases, kernels, is_there)


def _choose(
    weights: EntriesWeights,
    normed: torch.Tensor,
    latents: torch.Tensor,
    turn: functools.partial[torch.Tensor],
    stored: _StoredEntries,
    metadata: AttentionMetadata,
    shape: CompressedShape,
    kernels: Kernels,
    piece_bytes: int = PIECE_BYTES,
) -> torch.Tensor | None:
    """Returns the numbers of the entries that each token attends to, int64 [num_tokens, num_chosen] ascending, those
    that the token sees first. None: all that it sees.
    """
    indexer = weights.indexer
    if indexer is None or metadata.max_context_len // weights.rate <= indexer.shape.num_chosen:
        return None
    sizes = indexer.shape
    queries = indexer.queries.forward(latents, metadata).unflatten(-1, (sizes.num_heads, -1))
    queries = turn(queries, positions=metadata.positions).float()
    shares = indexer.shares.forward(normed.float())
    num_seen = (metadata.positions + 1) // weights.rate
    chosen = torch.arange(sizes.num_chosen, device=normed.device).repeat(len(normed), 1)
    starts = metadata.query_start.tolist()
    for sequence, context_len in enumerate(metadata.context_lens.tolist()):
        rows, num_entries = slice(starts[sequence], starts[sequence + 1]), context_len // weights.rate
        if num_entries <= sizes.num_chosen:
            continue
        numbers = torch.arange(num_entries, device=normed.device).unsqueeze(0)
        places = _entry_places(metadata, torch.tensor([sequence]), numbers, weights.rate, shape).squeeze(0)
        keys = stored.index_keys[places].flatten(1).float().T.contiguous()
        chosen[rows] = best_keys(
            queries[rows], keys, shares[rows], num_seen[rows], sizes.num_chosen, kernels, piece_bytes
        )
    return chosen


def _slots(metadata: AttentionMetadata, sequences: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Returns the KV slots, int64 [num_rows, n], of positions [num_rows, n] in `sequences` [num_rows]."""
    size = metadata.block_size
    return metadata.block_tables[sequences.unsqueeze(1), positions // size].long() * size + positions % size


def _entry_places(
    metadata: AttentionMetadata, sequences: torch.Tensor, numbers: torch.Tensor, rate: int, shape: CompressedShape
) -> torch.Tensor:
    """Returns where the views of `_StoredEntries` have the entries with `numbers` [num_rows, n] of `sequences`."""
    return _slots(metadata, sequences, numbers * rate + rate - 1) // shape.spread


def _attend_entries(
    queries: torch.Tensor,
    flat: torch.Tensor,
    stored: _StoredEntries,
    chosen: torch.Tensor | None,
    rate: int,
    metadata: AttentionMetadata,
    heads: HeadShape,
    shape: CompressedShape,
    sinks: torch.Tensor,
    kernels: Kernels,
    piece_bytes: int = PIECE_BYTES,
) -> torch.Tensor:
    """Returns the attention of each token to its entries and to its window, [num_tokens, num_heads * head_dim]. Copied
    keys of several tokens take at most `piece_bytes` at a time.
    """
    positions, device = metadata.positions, flat.device
    query_lens = metadata.query_start.diff().long()
    sequences = torch.arange(metadata.num_sequences, device=device).repeat_interleave(query_lens)
    num_entries = (positions + 1) // rate
    if chosen is not None:
        num_entries = num_entries.clamp(max=chosen.shape[1])
    num_tokens = (positions + 1).clamp(max=shape.window)
    most_entries, most_tokens = int(num_entries.max()), int(num_tokens.max())
    numbers = torch.arange(most_entries, device=device)
    places = torch.arange(most_tokens, device=device)

    def copy(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        of_row, entries, tokens = sequences[rows], num_entries[rows].unsqueeze(1), num_tokens[rows].unsqueeze(1)
        heads_of_rows = flat.new_zeros((len(of_row), num_keys, shape.head_dim))
        row, number = (numbers < entries).nonzero().unbind(1)
        own = number if chosen is None else chosen[rows][row, number]
        found = _entry_places(metadata, of_row[row], own.unsqueeze(1), rate, shape).squeeze(1)
        heads_of_rows[row, number] = stored.keys[found].flatten(1)
        row, place = (places < tokens).nonzero().unbind(1)
        seen = positions[rows][row] + 1 - num_tokens[rows][row] + place
        found = _slots(metadata, of_row[row], seen.unsqueeze(1)).squeeze(1)
        heads_of_rows[row, num_entries[rows][row] + place] = flat[found, : shape.head_dim]
        keys = heads_of_rows.view(-1, metadata.block_size, 1, shape.head_dim)
        return keys, keys

    lens = (num_entries + num_tokens).int()
    most_keys = int(lens.max())
    num_keys = whole_blocks(most_keys, metadata)
    row_bytes = num_keys * shape.head_dim * flat.element_size()
    return attend_copies(
        queries.flatten(1), copy, most_keys, lens, row_bytes, metadata, heads, kernels, sinks, piece_bytes
    )
