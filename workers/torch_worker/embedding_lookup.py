"""The rows of an embedding table for token ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from manta.workers.kernels.quantized_weight import QuantizedWeight
from manta.workers.kernels.weights import Embedding


def look_up(table: torch.Tensor, dtype: torch.dtype, token_ids: torch.Tensor) -> torch.Tensor:
    """int64 [num_tokens] -> [num_tokens, hidden] in `dtype`; the table may be in another one."""
    return F.embedding(token_ids, table).to(dtype)


def look_up_quantized(table: QuantizedWeight, dtype: torch.dtype, token_ids: torch.Tensor) -> torch.Tensor:
    """int64 [num_tokens] -> [num_tokens, hidden] in `dtype`."""
    offsets = None if table.offsets is None else table.offsets[token_ids]
    rows = QuantizedWeight(table.values[token_ids], table.scales[token_ids], table.bits, offsets)
    return rows.dequantized(dtype)


def look_up_pieces(pieces: Sequence[Embedding], rows_of_piece: int, rows: torch.Tensor) -> torch.Tensor:
    """int64 [n] -> [n, width]: rows of a table in pieces of `rows_of_piece` rows, of which the last may have fewer."""
    of_piece = rows // rows_of_piece
    found: torch.Tensor | None = None
    for number in of_piece.unique().tolist():
        places = of_piece == number
        own = pieces[number](rows[places] - number * rows_of_piece)
        if found is None:
            found = own.new_empty((len(rows), own.shape[-1]))
        found[places] = own
    assert found is not None, "a step has tokens"
    return found
