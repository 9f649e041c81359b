"""The rows of a step that have an adapter, grouped by adapter, as plain arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class AdapterRows(NamedTuple):
    """Flat token rows of a step with adapters. A row without an adapter is in none of the segments."""

    segments: np.ndarray
    """int32 [num_segments, 3]: the number of an adapter, and the first place in `rows` and the count of its rows."""
    rows: np.ndarray
    """int32 [num_adapted_rows], ascending within each segment."""

    @classmethod
    def of_sequences(cls, adapters: Sequence[int | None], lens: np.ndarray) -> AdapterRows:
        """Returns the rows of sequences that have `lens` rows each, one after the other. `adapters` has the number of
        each sequence's adapter, or None.
        """
        ends = np.cumsum(lens)
        of_adapter: dict[int, list[np.ndarray]] = {}
        for adapter, end, count in zip(adapters, ends.tolist(), lens.tolist(), strict=True):
            if adapter is not None:
                of_adapter.setdefault(adapter, []).append(np.arange(end - count, end, dtype=np.int32))
        segments, first = [], 0
        for adapter, pieces in of_adapter.items():
            count = sum(map(len, pieces))
            segments.append((adapter, first, count))
            first += count
        rows = [piece for pieces in of_adapter.values() for piece in pieces]
        return cls(np.array(segments, dtype=np.int32), np.concatenate(rows))
