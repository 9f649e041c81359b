"""The rows of a step that have adapters, on the device: blocks of rows of one adapter, each the work of a program.

`metadata.py` places them once in each step, and the linears of `adapted_linear.py` read them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from manta.workers.kernels.adapter_rows import AdapterRows
from manta.workers.kernels.triton.launch import place_together

BLOCK_ROWS = (16, 64)
"""Most rows of a block: of decodes, and of steps in which some adapter has more rows."""
BLOCK_COLUMNS = 4
"""Numbers of a block in `AdapterBlocks.table`."""


class AdapterBlocks(NamedTuple):
    """Blocks of rows that have one adapter with one scale."""

    rows: torch.Tensor
    """Flat rows of the step, int32 [num_rows]; those of a block lie together."""
    table: torch.Tensor
    """int32 [num_blocks, 4]: the adapter's number, the first place of the block in `rows`, the place after its last,
    and the bits of a float32 factor on what the adapter adds.
    """
    size: int
    """Most rows of a block, one of `BLOCK_ROWS`."""


def place_blocks(adapters: AdapterRows, device: torch.device) -> AdapterBlocks:
    """Returns the blocks of a step's rows."""
    segments = adapters.segments
    small, large = BLOCK_ROWS
    size = small if segments["count"].max() <= small else large
    num_blocks = -(-segments["count"] // size)
    segment = np.repeat(np.arange(len(segments)), num_blocks)
    number = np.arange(len(segment)) - np.repeat(np.cumsum(num_blocks) - num_blocks, num_blocks)
    table = np.empty((len(segment), BLOCK_COLUMNS), dtype=np.int32)
    table[:, 0] = segments["adapter"][segment]
    table[:, 1] = segments["first"][segment] + number * size
    table[:, 2] = np.minimum(table[:, 1] + size, (segments["first"] + segments["count"])[segment])
    table[:, 3] = segments["scale"][segment].view(np.int32)
    placed = place_together({"rows": adapters.rows, "table": table}, device)
    return AdapterBlocks(placed["rows"], placed["table"].view(-1, BLOCK_COLUMNS), size)
