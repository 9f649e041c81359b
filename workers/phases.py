"""A stopwatch for the parts of a start, such as weights and KV cache, which come one after the other."""

from __future__ import annotations

import time


class Phases:
    """The first phase begins when this is made. `seconds` has the time of each phase that has ended, in order, after
    those in `before`, which somebody else measured.
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
        """Splits a phase into `parts`; the time that they do not account for stays under `name`."""
        self.seconds[name] = max(0.0, self.seconds[name] - sum(parts.values()))
        self.seconds |= parts
