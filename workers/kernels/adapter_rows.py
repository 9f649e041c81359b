"""The rows of a step that have an adapter, grouped by adapter, as plain arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

SEGMENT = np.dtype([("adapter", np.int32), ("first", np.int32), ("count", np.int32), ("scale", np.float32)])
"""Rows of one adapter: its number, the first place in `AdapterRows.rows` and the count of its rows, and the factor on
what it adds. `kernels/native/adapters.cpp` has the same layout.
"""


class RowAdapter(NamedTuple):
    """The adapter of a row."""

    number: int
    scale: float = 1.0


class AdapterRows(NamedTuple):
    """Flat token rows of a step with adapters. A row without an adapter is in none of the segments."""

    segments: np.ndarray
    """`SEGMENT` [num_segments]"""
    rows: np.ndarray
    """int32 [num_adapted_rows], ascending within each segment."""

    @classmethod
    def of_sequences(cls, adapters: Sequence[RowAdapter | None], lens: np.ndarray) -> AdapterRows:
        """Returns the rows of sequences that have `lens` rows each, one after the other. `adapters` has the adapter of
        each sequence, or None.
        """
        ends = np.cumsum(lens)
        of_adapter: dict[RowAdapter, list[np.ndarray]] = {}
        for adapter, end, count in zip(adapters, ends.tolist(), lens.tolist(), strict=True):
            if adapter is not None:
                of_adapter.setdefault(adapter, []).append(np.arange(end - count, end, dtype=np.int32))
        segments, first = [], 0
        for adapter, pieces in of_adapter.items():
            count = sum(map(len, pieces))
            segments.append((adapter.number, first, count, adapter.scale))
            first += count
        rows = [piece for pieces in of_adapter.values() for piece in pieces]
        return cls(np.array(segments, dtype=SEGMENT), np.concatenate(rows))
