"""The rows of an embedding table for token ids: of a tensor, of integers, or of a GGUF file's blocks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from manta.workers.checkpoints.linear_reader import LinearReader
from manta.workers.kernels.quantized_weight import QuantizedWeight
from manta.workers.kernels.weights import Embedding
from manta.workers.models.weight_specs import WeightPart
from manta.workers.torch_worker.weight_platform import WeightPlatform

LARGE_TABLE = 1 << 28
"""Numbers of a table from which on it is not kept as integers. To unpack a row takes half a millisecond a step."""


def load_lookup(
    reader: LinearReader, platform: WeightPlatform, part: WeightPart, width: int, dtype: torch.dtype
) -> tuple[Embedding, torch.Tensor | None]:
    """Returns the lookup of a table [num_rows, width], whose rows it gives in `dtype`, and the table as the platform
    has it; None for integers.

    Integers are kept as such. A large table of them is unpacked row by row from the file, where the platform reads
    tables there.
    """
    if (
        is_large(part, width)
        and platform.reads_tables_in_files
        and (unpack := reader.unpack_rows(part, width)) is not None
    ):
        return functools.partial(look_up_packed, unpack, dtype), None
    read = reader.read_table(part, width)
    if not isinstance(read, QuantizedWeight):
        table = platform.place_embedding(read, dtype)
        return functools.partial(look_up, table, dtype), table
    kept = dataclasses.replace(
        read,
        values=platform.place_weight(read.values, torch.int8),
        scales=platform.place_weight(read.scales, torch.float32),
        offsets=None if read.offsets is None else platform.place_weight(read.offsets, torch.float32),
    )
    reader.checkpoint.release()
    return functools.partial(look_up_quantized, kept, dtype), None


def is_large(part: WeightPart, width: int) -> bool:
    """Returns whether a table of integers is too large to be kept beside the file."""
    return part.out_features * width >= LARGE_TABLE


def look_up(table: torch.Tensor, dtype: torch.dtype, token_ids: torch.Tensor) -> torch.Tensor:
    """int64 [num_tokens] -> [num_tokens, hidden] in `dtype`; the table may be in another one."""
    return F.embedding(token_ids, table).to(dtype)


def look_up_quantized(table: QuantizedWeight, dtype: torch.dtype, token_ids: torch.Tensor) -> torch.Tensor:
    """int64 [num_tokens] -> [num_tokens, hidden] in `dtype`."""
    offsets = None if table.offsets is None else table.offsets[token_ids]
    rows = QuantizedWeight(table.values[token_ids], table.scales[token_ids], table.bits, offsets)
    return rows.dequantized(dtype)


def look_up_packed(
    unpack: Callable[[torch.Tensor], QuantizedWeight], dtype: torch.dtype, token_ids: torch.Tensor
) -> torch.Tensor:
    """int64 [num_tokens] -> [num_tokens, hidden] in `dtype`; `unpack` reads these rows of a file."""
    return unpack(token_ids).dequantized(dtype)


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
