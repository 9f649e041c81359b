"""The causal convolution of recurrent mixers in Triton: one kernel for all tokens of a step.

`workers/kernels/convolution.py` defines the results, and every token has its order of operations. Programs compute
either a tile of rows, whose earlier inputs are rows of the step or in the state that the sequence reads, or the state
after a segment.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from manta.workers.kernels.recurrent_step import RecurrentStep
from manta.workers.kernels.triton.launch import padded_size
from manta.workers.kernels.triton.recurrence import in_rows

_CHANNELS = 128
"""Channels of a program."""
_ROWS = 8
"""Rows of a program in a step that does more than decode."""


def convolve(
    x: torch.Tensor,
    kernel: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    step: RecurrentStep,
    activates: bool = False,
) -> torch.Tensor:
    """Computes `workers.kernels.convolution.convolve`. Rows that pad a step are not written."""
    x = in_rows(x)
    num_tokens, num_channels = x.shape
    output = torch.empty((num_tokens, num_channels), dtype=torch.float32, device=x.device)
    columns = min(_CHANNELS, padded_size(num_channels))
    tile_rows = 1 if step.is_decode else _ROWS
    num_row_tiles, num_segments = triton.cdiv(num_tokens, tile_rows), len(step.reads)
    grid = (triton.cdiv(num_channels, columns), num_row_tiles + num_segments)
    _convolve[grid](
        x,
        kernel,
        kernel if bias is None else bias,
        states,
        output,
        step.starts,
        step.reads,
        step.writes,
        step.first_segments,
        step.sequence_starts,
        step.row_sequences,
        x.stride(0),
        num_tokens,
        num_row_tiles,
        num_channels,
        WIDTH=kernel.shape[1],
        HAS_BIAS=bias is not None,
        ACTIVATES=activates,
        TILE_ROWS=tile_rows,
        COLUMNS=columns,
        num_warps=1 if step.is_decode else 4,
        enable_fp_fusion=False,
    )
    return output


@triton.jit(do_not_specialize=["num_tokens", "num_row_tiles"])
def _convolve(
    x,
    kernel,
    bias,
    states,
    output,
    starts,
    reads,
    writes,
    first_segments,
    sequence_starts,
    row_sequences,
    stride,
    num_tokens,
    num_row_tiles,
    num_channels,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Computes `TILE_ROWS` rows, or one state, of `COLUMNS` channels in each program."""
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    has_channel = channel < num_channels
    part = tl.program_id(1)
    if part < num_row_tiles:
        number = part * TILE_ROWS + tl.arange(0, TILE_ROWS)
        sequence = tl.load(row_sequences + number, mask=number < num_tokens, other=-1)
        has_row = sequence >= 0
        first_row = tl.load(sequence_starts + sequence, mask=has_row, other=0)
        slot = tl.load(reads + tl.load(first_segments + sequence, mask=has_row, other=0), mask=has_row, other=0)
        total = tl.zeros((TILE_ROWS, COLUMNS), dtype=tl.float32)
        exists = has_row[:, None] & has_channel[None, :]
        for tap in tl.static_range(WIDTH):
            taken = inputs_at(
                x, states, (number - WIDTH + 1 + tap)[:, None], first_row[:, None], slot[:, None], stride,
                num_channels, channel[None, :], exists, WIDTH,
            )  # fmt: skip
            total += taken * tl.load(kernel + channel * WIDTH + tap, mask=has_channel, other=0.0)[None, :]
        if HAS_BIAS:
            total += tl.load(bias + channel, mask=has_channel, other=0.0)[None, :]
        if ACTIVATES:
            total = total / (1.0 + tl.exp(-total))
        place = number.to(tl.int64)[:, None] * num_channels + channel[None, :]
        tl.store(output + place, total, mask=exists)
    else:
        segment = part - num_row_tiles
        written = tl.load(writes + segment)
        if written >= 0:
            end = tl.load(starts + segment + 1)
            sequence = tl.load(row_sequences + end - 1)
            first_row = tl.load(sequence_starts + sequence)
            slot = tl.load(reads + tl.load(first_segments + sequence))
            place = states + (written.to(tl.int64) * num_channels + channel) * (WIDTH - 1)
            for tap in tl.static_range(WIDTH - 1):
                taken = inputs_at(
                    x, states, end - WIDTH + 1 + tap + channel * 0, first_row, slot, stride, num_channels, channel,
                    has_channel, WIDTH,
                )  # fmt: skip
                tl.store(place + tap, taken, mask=has_channel)


@triton.jit
def inputs_at(
    x, states, number, first_row, slot, stride, num_channels, channel, has_channel, WIDTH: tl.constexpr
):  # fmt: skip
    """Returns the inputs of rows, float32: a row before `first_row` is in the state that its sequence reads, whose last
    column has the row right before the first one.
    """
    is_before = number < first_row
    of_state = states + (slot.to(tl.int64) * num_channels + channel) * (WIDTH - 1) + (number - first_row + WIDTH - 1)
    before = tl.load(of_state, mask=has_channel & is_before, other=0.0)
    own = tl.load(x + number.to(tl.int64) * stride + channel, mask=has_channel & (number >= first_row), other=0.0)
    return tl.where(is_before, before, own.to(tl.float32))
