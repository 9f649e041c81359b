"""How long a step may take before a rank is held to hang: a multiple of what steps took lately."""

from __future__ import annotations

from collections import deque

UNKNOWN_S = 600.0
"""For the first step of an engine: a large model prefills 2,048 tokens on a few cores."""
FIRST_STEP_S = 60.0
"""At least for the first step of ranks that were started anew: memory is touched for the first time, threads start."""
SHORTEST_S = 4.0
"""A machine that swaps or is shared may stand still for seconds. A rank that is given up wrongly costs a restart."""
FACTOR = 20.0
"""Times the slowest of the recent steps of about as many tokens."""
NUM_RECENT = 64
"""Steps that are remembered of each size."""


class StepDeadline:
    """Steps are remembered by size: the power of two at or above their number of tokens."""

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}
        self._is_first = False

    def restart(self) -> None:
        """Other processes run the steps from now on."""
        self._is_first = True

    def learn(self, num_tokens: int, seconds: float) -> None:
        self._is_first = False
        self._recent.setdefault(_size(num_tokens), deque(maxlen=NUM_RECENT)).append(seconds)

    def seconds(self, num_tokens: int) -> float:
        """A step takes at most as long as one of more tokens, and as one of fewer tokens for each of its own."""
        if not self._recent:
            return UNKNOWN_S
        size = _size(num_tokens)
        bounds = [max(recent) * max(1.0, size / known) for known, recent in self._recent.items()]
        return max(FIRST_STEP_S if self._is_first else SHORTEST_S, FACTOR * min(bounds))


def _size(num_tokens: int) -> int:
    return 1 << max(0, num_tokens - 1).bit_length()
