"""The rows of an embedding table for token ids."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from manta.workers.kernels.quantized_weight import QuantizedWeight


def look_up(table: torch.Tensor, dtype: torch.dtype, token_ids: torch.Tensor) -> torch.Tensor:
    """int64 [num_tokens] -> [num_tokens, hidden] in `dtype`; the table may be in another one."""
    return F.embedding(token_ids, table).to(dtype)


def look_up_quantized(table: QuantizedWeight, dtype: torch.dtype, token_ids: torch.Tensor) -> torch.Tensor:
    """int64 [num_tokens] -> [num_tokens, hidden] in `dtype`."""
    offsets = None if table.offsets is None else table.offsets[token_ids]
    rows = QuantizedWeight(table.values[token_ids], table.scales[token_ids], table.bits, offsets)
    return rows.dequantized(dtype)
