"""How long each part of a start took: weights, KV cache and so on, one after the other."""

from __future__ import annotations

import time


class Phases:
    """Begins when it is made. `seconds` of each phase that has ended, in order; `before` are those that others saw."""

    def __init__(self, **before: float) -> None:
        self.seconds = before
        self._last = time.perf_counter()

    def end(self, name: str) -> None:
        """What happened since the last end, or the beginning, was this."""
        now = time.perf_counter()
        self.seconds[name] = now - self._last
        self._last = now

    def split(self, name: str, parts: dict[str, float]) -> None:
        """A phase had `parts`; what they do not tell of it stays under its name."""
        self.seconds[name] = max(0.0, self.seconds[name] - sum(parts.values()))
        self.seconds |= parts
