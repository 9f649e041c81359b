"""The rows of a step in the order of their experts, and the weighted sums of the experts' results, on the device.

A pair is a row and one of its choices: pair `row * num_chosen + place`. Pairs are sorted by expert, so that a program
multiplies pairs of one expert, a block of them at a time. The host learns nothing of it and waits for nothing: it
launches as many programs as the worst choice needs, and those without pairs end at once. Nothing is added atomically,
so each run gives the same bits. An index that is no expert's, as of a row that pads, gets no pair.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from manta.workers.kernels.triton.launch import padded_size

_CHUNK, _COMPARED = 128, 1 << 14
"""Most pairs that a program sorts, and most comparisons of them with experts."""
_COUNTED_CHUNKS = 4
"""Most chunks whose experts each sorting program counts itself; of more, another kernel counts each once."""
_COUNTS = 4096
"""Most counts that a sorting program adds at a time."""
_BLOCKS = 16
"""Blocks that a sorting program looks up at a time."""
_COMBINED_COLUMNS = 1024


class ExpertBlocks(NamedTuple):
    """The work of the products: blocks of pairs of one expert. A single row needs no order; its pairs are blocks."""

    order: torch.Tensor
    """int32 [num_pairs]: pairs, those of one expert together, in the order of the experts. A single row needs none."""
    table: torch.Tensor
    """int32 [3, num_blocks]: the expert of each block, or -1 for no block; its first place in `order`, and the place
    after the expert's last one. For a single row, int64: the experts of its pairs.
    """
    num_blocks: int
    size: int
    """Most pairs of a block."""
    is_single_row: bool


def sort_pairs(chosen: torch.Tensor, num_experts: int, block_size: int) -> ExpertBlocks:
    """Returns the blocks of `chosen`, int64 [num_rows, num_chosen]."""
    chosen = chosen.contiguous()
    num_rows, num_pairs, device = chosen.shape[0], chosen.numel(), chosen.device
    if num_rows == 1:
        return ExpertBlocks(chosen, chosen, num_pairs, block_size, is_single_row=True)
    num_blocks = num_pairs // block_size + min(num_experts, num_pairs)
    order = torch.empty(num_pairs, dtype=torch.int32, device=device)
    table = torch.empty((3, num_blocks), dtype=torch.int32, device=device)
    experts = padded_size(num_experts, 16)
    chunk = min(_CHUNK, max(16, _COMPARED // experts), padded_size(num_pairs, 16))
    num_chunks = triton.cdiv(num_pairs, chunk)
    counts = order  # a pointer that is not read
    if num_chunks > _COUNTED_CHUNKS:
        counts = torch.empty((num_chunks, experts), dtype=torch.int32, device=device)
        _count_pairs[(num_chunks,)](chosen, counts, num_pairs, CHUNK=chunk, EXPERTS=experts, num_warps=8)
    _sort_pairs[(num_chunks,)](
        chosen, counts, order, table, num_pairs, num_chunks, num_experts, num_blocks,
        HAS_COUNTS=num_chunks > _COUNTED_CHUNKS, BLOCK=block_size, CHUNK=chunk,
        CHUNKS=max(1, _COUNTS // experts), EXPERTS=experts, BLOCKS=_BLOCKS, num_warps=8,
    )  # fmt: skip
    return ExpertBlocks(order, table, num_blocks, block_size, is_single_row=False)


def combine(
    results: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, num_experts: int, has_shares: bool
) -> torch.Tensor:
    """Returns the sums over each row's choices, float32 [num_rows, hidden], of results [num_pairs, hidden]. They are
    added in the order of the experts, and with `has_shares` multiplied by `shares`, float32 [num_rows, num_chosen].
    """
    num_rows, num_chosen = chosen.shape
    hidden = results.shape[1]
    total = torch.empty((num_rows, hidden), device=results.device)
    columns = min(_COMBINED_COLUMNS, padded_size(hidden))
    _combine[(num_rows, triton.cdiv(hidden, columns))](
        results, chosen.contiguous(), shares.contiguous(), total, hidden, num_experts,
        NUM_CHOSEN=num_chosen, CHOICES=padded_size(num_chosen), HAS_SHARES=has_shares, COLUMNS=columns,
        num_warps=min(4, max(1, columns // 256)), enable_fp_fusion=False,
    )  # fmt: skip
    return total


@triton.jit
def _experts_of(chosen, chunk, num_pairs, CHUNK: tl.constexpr):
    """Returns the pairs of a chunk, and their experts; -1 for a place after the last pair."""
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    return pair, tl.load(chosen + pair, mask=pair < num_pairs, other=-1).to(tl.int32)


@triton.jit
def _histogram(expert, EXPERTS: tl.constexpr):
    """Returns how many of the pairs have each expert, int32 [EXPERTS]."""
    return tl.sum((expert[:, None] == tl.arange(0, EXPERTS)[None, :]).to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["num_pairs"])
def _count_pairs(chosen, counts, num_pairs, CHUNK: tl.constexpr, EXPERTS: tl.constexpr):
    chunk = tl.program_id(0)
    expert = _experts_of(chosen, chunk, num_pairs, CHUNK)[1]
    tl.store(counts + chunk * EXPERTS + tl.arange(0, EXPERTS), _histogram(expert, EXPERTS))


@triton.jit(do_not_specialize=["num_pairs", "num_chunks", "num_blocks"])
def _sort_pairs(
    chosen, counts, order, table, num_pairs, num_chunks, num_experts, num_blocks,
    HAS_COUNTS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Writes the places of a chunk's pairs, and a part of the table of blocks."""
    chunk = tl.program_id(0)
    index = tl.arange(0, EXPERTS)
    total, before = tl.zeros((EXPERTS,), tl.int32), tl.zeros((EXPERTS,), tl.int32)
    if HAS_COUNTS:
        for first in range(0, num_chunks, CHUNKS):
            other = first + tl.arange(0, CHUNKS)
            there = (other < num_chunks)[:, None]
            count = tl.load(counts + other[:, None] * EXPERTS + index[None, :], mask=there, other=0)
            total += tl.sum(count, axis=0)
            before += tl.sum(tl.where((other < chunk)[:, None], count, 0), axis=0)
    else:
        for other in range(num_chunks):
            count = _histogram(_experts_of(chosen, other, num_pairs, CHUNK)[1], EXPERTS)
            total += count
            before += tl.where(other < chunk, count, 0)
    is_expert = index < num_experts
    total, before = tl.where(is_expert, total, 0), tl.where(is_expert, before, 0)
    end = tl.cumsum(total, axis=0)
    start = end - total
    pair, expert = _experts_of(chosen, chunk, num_pairs, CHUNK)
    is_own = expert[:, None] == index[None, :]
    first = tl.sum(tl.where(is_own, (start + before)[None, :], 0), axis=1)
    is_earlier = (expert[:, None] == expert[None, :]) & (pair[:, None] > pair[None, :])
    place = first + tl.sum(is_earlier.to(tl.int32), axis=1)
    tl.store(order + place, pair, mask=(expert >= 0) & (expert < num_experts))
    # Blocks of all experts, one after the other
    own_blocks = (total + BLOCK - 1) // BLOCK
    end_block = tl.cumsum(own_blocks, axis=0)
    first_block = end_block - own_blocks
    for first_own in range(chunk * BLOCKS, num_blocks, num_chunks * BLOCKS):
        block = first_own + tl.arange(0, BLOCKS)
        is_of = (block[:, None] >= first_block[None, :]) & (block[:, None] < end_block[None, :])
        is_block = tl.sum(is_of.to(tl.int32), axis=1) > 0
        of_expert = tl.sum(tl.where(is_of, index[None, :], 0), axis=1)
        start_of = tl.sum(tl.where(is_of, start[None, :] + (block[:, None] - first_block[None, :]) * BLOCK, 0), axis=1)
        end_of = tl.sum(tl.where(is_of, end[None, :], 0), axis=1)
        there = block < num_blocks
        tl.store(table + block, tl.where(is_block, of_expert, -1), mask=there)
        tl.store(table + num_blocks + block, start_of, mask=there)
        tl.store(table + 2 * num_blocks + block, end_of, mask=there)


@triton.jit
def load_block(order, table, num_blocks, num_experts, IS_SINGLE_ROW: tl.constexpr, ROWS: tl.constexpr):
    """Returns the expert of this program's block, or -1 for none; its pairs, int64 [ROWS]; and which of them are
    there.
    """
    block = tl.program_id(0)
    place = tl.arange(0, ROWS)
    expert = tl.load(table + block).to(tl.int32)
    if IS_SINGLE_ROW:
        expert = tl.where(expert < num_experts, expert, -1)
        is_pair = place < 1
        pair = tl.zeros((ROWS,), tl.int64) + block
    else:
        place += tl.load(table + num_blocks + block)
        is_pair = place < tl.load(table + 2 * num_blocks + block)  # 0 for no block
        pair = tl.load(order + place, mask=is_pair, other=0).to(tl.int64)
    return expert, pair, is_pair


@triton.jit
def _combine(
    results, chosen, shares, total, hidden, num_experts,
    NUM_CHOSEN: tl.constexpr, CHOICES: tl.constexpr, HAS_SHARES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Adds a part of a row's results in the order of the experts, each product rounded by itself."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < hidden
    choice = tl.arange(0, CHOICES)
    place = chosen + row * NUM_CHOSEN + choice
    expert = tl.load(place, mask=choice < NUM_CHOSEN, other=num_experts)
    is_later = expert[:, None] > expert[None, :]
    is_later |= (expert[:, None] == expert[None, :]) & (choice[:, None] > choice[None, :])
    rank = tl.sum(is_later.to(tl.int32), axis=1)
    sums = tl.zeros((COLUMNS,), tl.float32)
    for number in tl.static_range(NUM_CHOSEN):
        own = tl.sum(tl.where(rank == number, choice, 0), axis=0)
        index = tl.load(chosen + row * NUM_CHOSEN + own)
        is_chosen = (index >= 0) & (index < num_experts)
        pair = row * NUM_CHOSEN + own
        there = column < tl.where(is_chosen, hidden, 0)
        result = tl.load(results + pair * hidden + column, mask=there, other=0.0).to(tl.float32)
        if HAS_SHARES:
            result *= tl.load(shares + pair, mask=is_chosen, other=0.0)
        sums += result
    tl.store(total + row * hidden + column, sums, mask=is_column)
