"""The deadline of a step, after which a rank counts as hung: a multiple of recent step times."""

from __future__ import annotations

from collections import deque

import msgspec

FACTOR = 20.0
"""Multiple of the slowest recent step of about as many tokens."""
NUM_RECENT = 64
"""Number of recent steps remembered for each size."""


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a step's deadline, in seconds."""

    unknown_s: float = 600.0
    """Deadline of an engine's first step: a large model may prefill 2,048 tokens on a few cores."""
    first_s: float = 60.0
    """Shortest deadline of the first step after ranks restart: memory is first touched and threads start."""
    shortest_s: float = 4.0
    """Shortest deadline of other steps: a machine that swaps or is shared may stall for seconds, and a rank that is
    given up wrongly costs a restart.
    """


USUAL_TIMES = StepTimes()


class StepDeadline:
    """Derives deadlines from recent steps, grouped by size: their number of tokens rounded up to a power of two."""

    def __init__(self, times: StepTimes = USUAL_TIMES) -> None:
        self.times = times
        self._recent: dict[int, deque[float]] = {}
        self._is_first = False

    def restart(self) -> None:
        """Notes that new processes run the steps from now on."""
        self._is_first = True

    def learn(self, num_tokens: int, seconds: float) -> None:
        self._is_first = False
        self._recent.setdefault(_size(num_tokens), deque(maxlen=NUM_RECENT)).append(seconds)

    def seconds(self, num_tokens: int) -> float:
        """Returns the deadline in seconds for a step of `num_tokens`.

        Assumes that a step takes at most as long as a step of more tokens, and at most as long for each token as a
        smaller step.
        """
        if not self._recent:
            return self.times.unknown_s
        size = _size(num_tokens)
        bounds = [max(recent) * max(1.0, size / known) for known, recent in self._recent.items()]
        return max(self.times.first_s if self._is_first else self.times.shortest_s, FACTOR * min(bounds))


def _size(num_tokens: int) -> int:
    return 1 << max(0, num_tokens - 1).bit_length()
