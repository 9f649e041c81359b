"""Linears with low-rank adapters on a GPU: two products of all rows that have one, whichever adapters they have.

The first multiplies rows by their adapters' first halves, and the second adds the products with the second halves to
what the linear has computed. A table on the device says where each adapter's halves lie and how many ranks they have,
so one launch serves adapters of all ranks. Rows without an adapter are not touched. Sums are in float32, and results
are rounded where `TorchAdaptedLinear` rounds them. No sum is added atomically, so each run gives the same bits.
`workers/platforms/cuda.py` makes these linears.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from manta.workers.kernels.adapted_linear import LowRank
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.transfer import place
from manta.workers.kernels.triton.adapter_blocks import BLOCK_COLUMNS, BLOCK_ROWS, AdapterBlocks
from manta.workers.kernels.triton.launch import needs_wide_dot, padded_size
from manta.workers.kernels.triton.metadata import DeviceMetadata
from manta.workers.kernels.weights import Linear

_RANKS = 16
"""Ranks that a program multiplies at a time."""
_INPUTS = 128
"""Most inputs that a program reads of each row at a time."""
_OUTPUTS = {16: 128, 64: 64}
"""Outputs of a program by the rows of its block."""
_ADAPTER_COLUMNS, _PART_COLUMNS = tl.constexpr(2), tl.constexpr(5)
"""Numbers of an adapter, and of each of its parts, in a linear's table."""


class TritonAdaptedLinear:
    """A linear with adapters, of which each row of a step may have another one."""

    def __init__(self, linear: Linear, device: torch.device) -> None:
        self._linear = linear
        self._device = device
        self._held: dict[int, LowRank] = {}
        self._table = torch.empty(0)
        """int64 [num_adapters, 2 + 5 * num_parts]: the address of `a` and its ranks; of each part the address of `b`,
        its first rank, its ranks, its first output and its outputs. 0 for no adapter and no part.
        """
        self._scales = torch.empty(0)
        """float32 [num_adapters, num_parts]"""
        self._most_ranks = self._num_parts = 0

    def hold(self, number: int, low_rank: LowRank) -> None:
        placed = low_rank.on(self._device)
        has_more_parts = len(placed.parts) > self._num_parts
        self._num_parts = max(self._num_parts, len(placed.parts))
        self._held[number] = placed
        self._write_tables()
        if has_more_parts:  # the kernels have a form for each number of parts
            self._compile(placed)

    def drop(self, number: int) -> None:
        if self._held.pop(number, None) is not None:
            self._write_tables()

    def forward(self, x: torch.Tensor, step: AttentionMetadata | None = None) -> torch.Tensor:
        y = self._linear.forward(x, step)
        blocks = step.adapter_blocks if isinstance(step, DeviceMetadata) else None
        if blocks is not None and self._held:
            self._add(x.contiguous(), y, blocks)
        return y

    def _write_tables(self) -> None:
        """Writes tables of the adapters that are held. Kernels under way go on with the former ones."""
        size = max(self._held, default=-1) + 1
        table = np.zeros((size, _ADAPTER_COLUMNS.value + self._num_parts * _PART_COLUMNS.value), dtype=np.int64)
        scales = np.zeros((size, self._num_parts), dtype=np.float32)
        for number, low_rank in self._held.items():
            row = [low_rank.a.data_ptr(), len(low_rank.a)]
            for index, part in enumerate(low_rank.parts):
                rank, num_outputs = part.b.shape
                row += [part.b.data_ptr(), part.first_rank, rank, part.first_output, num_outputs]
                scales[number, index] = part.scale
            table[number, : len(row)] = row
        self._table, self._scales = place(table, self._device), place(scales, self._device)
        self._most_ranks = max((len(each.a) for each in self._held.values()), default=0)

    def _compile(self, low_rank: LowRank) -> None:
        """Runs the kernels for blocks of no adapter, so that no request waits for a compiler."""
        rows = torch.zeros(1, dtype=torch.int32, device=self._device)
        table = torch.full((1, BLOCK_COLUMNS), -1, dtype=torch.int32, device=self._device)
        x = low_rank.a[:1].contiguous()
        y = self._linear.forward(x)
        for size in BLOCK_ROWS:
            self._add(x, y, AdapterBlocks(rows, table, size))

    def _add(self, x: torch.Tensor, y: torch.Tensor, blocks: AdapterBlocks) -> None:
        """Adds to the results y [num_rows, out_features] of rows x [num_rows, in_features]."""
        in_features, out_features = x.shape[1], y.shape[1]
        num_adapters, num_parts = self._scales.shape
        num_blocks, outputs = len(blocks.table), _OUTPUTS[blocks.size]
        products = torch.empty((len(blocks.rows), self._most_ranks), dtype=torch.float32, device=x.device)
        _multiply_first_halves[(num_blocks, triton.cdiv(self._most_ranks, _RANKS))](
            x, blocks.rows, blocks.table, self._table, products, num_adapters, self._most_ranks, in_features,
            BLOCK_COLUMNS=BLOCK_COLUMNS, PARTS=num_parts, IS_WIDE=needs_wide_dot(x.dtype), ROWS=blocks.size,
            RANKS=_RANKS, INPUTS=min(_INPUTS, padded_size(in_features, 16)), num_warps=4, num_stages=3,
            enable_fp_fusion=False,
        )  # fmt: skip
        _add_second_halves[(num_blocks, triton.cdiv(out_features, outputs))](
            products, blocks.rows, blocks.table, self._table, self._scales, y, num_adapters, self._most_ranks,
            out_features, BLOCK_COLUMNS=BLOCK_COLUMNS, PARTS=num_parts, ROWS=blocks.size, RANKS=_RANKS,
            OUTPUTS=outputs, num_warps=4 if blocks.size == BLOCK_ROWS[0] else 8, num_stages=2, enable_fp_fusion=False,
        )  # fmt: skip


@triton.jit
def _load_block(
    rows, blocks, table, num_adapters, BLOCK_COLUMNS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Returns the entry of the table of the adapter of this program's block, and its ranks, 0 if it is not held; places
    and rows of the block, int64 [ROWS], and which of them are there.
    """
    block = blocks + tl.program_id(0) * BLOCK_COLUMNS
    adapter = tl.load(block)
    is_held = (adapter >= 0) & (adapter < num_adapters)
    entry = table + adapter.to(tl.int64) * (_ADAPTER_COLUMNS + PARTS * _PART_COLUMNS)
    num_ranks = tl.load(entry + 1, mask=is_held, other=0).to(tl.int32)
    place = tl.load(block + 1).to(tl.int64) + tl.arange(0, ROWS)
    is_row = place < tl.load(block + 2)
    row = tl.load(rows + place, mask=is_row, other=0).to(tl.int64)
    return entry, num_ranks, place, row, is_row


@triton.jit(do_not_specialize=["num_adapters", "most_ranks"])
def _multiply_first_halves(
    x, rows, blocks, table, products, num_adapters, most_ranks, in_features,
    BLOCK_COLUMNS: tl.constexpr, PARTS: tl.constexpr, IS_WIDE: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr,
    INPUTS: tl.constexpr,
):  # fmt: skip
    """Multiplies a block of rows by `RANKS` rows of its adapter's `a`."""
    entry, num_ranks, place, row, is_row = _load_block(rows, blocks, table, num_adapters, BLOCK_COLUMNS, PARTS, ROWS)
    if tl.program_id(1) * RANKS >= num_ranks:
        return
    a = tl.load(entry).to(tl.pointer_type(x.dtype.element_ty))
    rank = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    is_rank = rank < num_ranks
    k = tl.arange(0, INPUTS)
    row_place = x + row[:, None] * in_features + k[None, :]
    rank_place = a + rank[None, :].to(tl.int64) * in_features + k[:, None]
    sums = tl.zeros((ROWS, RANKS), tl.float32)
    for start in range(0, in_features, INPUTS):
        is_input = start + k < in_features
        inputs = tl.load(row_place + start, mask=is_row[:, None] & is_input[None, :], other=0.0)
        columns = tl.load(rank_place + start, mask=is_input[:, None] & is_rank[None, :], other=0.0)
        if IS_WIDE:
            inputs, columns = inputs.to(tl.float32), columns.to(tl.float32)
        sums = tl.dot(inputs, columns, sums, input_precision="ieee")
    tl.store(products + place[:, None] * most_ranks + rank[None, :], sums, mask=is_row[:, None] & is_rank[None, :])


@triton.jit(do_not_specialize=["num_adapters", "most_ranks"])
def _add_second_halves(
    products, rows, blocks, table, scales, y, num_adapters, most_ranks, out_features,
    BLOCK_COLUMNS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Adds to `OUTPUTS` outputs of a block of rows."""
    entry, num_ranks, place, row, is_row = _load_block(rows, blocks, table, num_adapters, BLOCK_COLUMNS, PARTS, ROWS)
    if num_ranks == 0:
        return
    block = blocks + tl.program_id(0) * BLOCK_COLUMNS
    scales += tl.load(block) * PARTS
    scale = tl.load(block + 3).to(tl.float32, bitcast=True)
    first = tl.program_id(1) * OUTPUTS
    output = first + tl.arange(0, OUTPUTS)
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for part in tl.static_range(PARTS):
        of_part = entry + _ADAPTER_COLUMNS + part * _PART_COLUMNS
        b = tl.load(of_part).to(tl.pointer_type(y.dtype.element_ty))
        first_rank, part_ranks = tl.load(of_part + 1).to(tl.int32), tl.load(of_part + 2).to(tl.int32)
        first_output, num_outputs = tl.load(of_part + 3).to(tl.int32), tl.load(of_part + 4).to(tl.int32)
        own = output - first_output
        is_own = (own >= 0) & (own < num_outputs)
        has_some = (first < first_output + num_outputs) & (first + OUTPUTS > first_output)
        sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
        for start in range(0, tl.where(has_some, part_ranks, 0), RANKS):
            rank = start + tl.arange(0, RANKS)
            is_rank = rank < part_ranks
            left_place = products + place[:, None] * most_ranks + (first_rank + rank)[None, :]
            left = tl.load(left_place, mask=is_row[:, None] & is_rank[None, :], other=0.0)
            right_place = b + rank[:, None].to(tl.int64) * num_outputs + own[None, :]
            right = tl.load(right_place, mask=is_rank[:, None] & is_own[None, :], other=0.0)
            sums = tl.dot(left, right.to(tl.float32), sums, input_precision="ieee")
        total += sums * (tl.load(scales + part) * scale)
    y_place = y + row[:, None] * out_features + output[None, :]
    is_there = is_row[:, None] & (output < out_features)[None, :]
    before = tl.load(y_place, mask=is_there, other=0.0).to(tl.float32)
    tl.store(y_place, (before + total).to(y.dtype.element_ty), mask=is_there)
