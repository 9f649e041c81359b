"""A stopwatch for the consecutive phases of a start, such as weights and KV cache."""

from __future__ import annotations

import time


class Phases:
    """Measures consecutive phases, the first of which begins at construction. `seconds` has the time of each ended
    phase in order, after the phases in `before`, which another process measured.
    """

    def __init__(self, **before: float) -> None:
        self.seconds = before
        self._last = time.perf_counter()

    def end(self, name: str) -> None:
        """Ends the phase `name`, which began when the one before it ended."""
        now = time.perf_counter()
        self.seconds[name] = now - self._last
        self._last = now

    def split(self, name: str, parts: dict[str, float]) -> None:
        """Splits a phase into `parts`, in seconds. The time that the parts leave over stays under `name`."""
        self.seconds[name] = max(0.0, self.seconds[name] - sum(parts.values()))
        self.seconds |= parts
