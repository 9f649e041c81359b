"""The deadline of a step, after which it counts as hung: a multiple of recent step times."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

import msgspec

FACTOR = 20.0
"""Multiple of the slowest recent step of about as many tokens."""
NUM_RECENT = 64
"""Number of recent steps remembered for each size."""
LATE_SHARE = 0.5
"""Share of a step's deadline after which requests leave for another engine, if there is one. If the step ends after
all, leaving costs less than a restart.
"""

STEP_HANGS = "a step of the engine hangs: it takes far longer than those before it"
"""The error by which a replica tells Serve that a step hangs, so that Serve ends the process."""


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


class _StepUnderWay(NamedTuple):
    num_tokens: int
    started: float
    """Time on `time.monotonic`'s clock."""
    deadline_s: float


class StepWatch:
    """Watches the steps of this process, in which nothing can end a step that hangs. The thread that runs the steps
    calls `begin`, `end` and `forget`, and any thread may ask.
    """

    def __init__(self) -> None:
        self.deadline = StepDeadline()
        self._under_way: deque[_StepUnderWay] = deque()
        """Steps that have begun, oldest first."""
        self._oldest: _StepUnderWay | None = None
        """The first of them, for other threads."""

    def begin(self, num_tokens: int) -> None:
        self._under_way.append(_StepUnderWay(num_tokens, time.monotonic(), self.deadline.seconds(num_tokens)))
        self._oldest = self._under_way[0]

    def end(self) -> None:
        """Notes the end of the oldest step."""
        step = self._under_way.popleft()
        if step.num_tokens:
            self.deadline.learn(step.num_tokens, time.monotonic() - step.started)
        self._oldest = self._under_way[0] if self._under_way else None

    def forget(self) -> None:
        """Notes that no step is under way any more, because one has failed."""
        self._under_way.clear()
        self._oldest = None

    def is_late(self) -> bool:
        """Returns whether the oldest step has used so much of its deadline that it may hang."""
        step = self._oldest
        return step is not None and time.monotonic() - step.started > LATE_SHARE * step.deadline_s

    def is_hung(self) -> bool:
        """Returns whether the oldest step is so late that a new process serves sooner. That bound is never below
        `StepTimes.first_s`, because a start takes long too.
        """
        step = self._oldest
        if step is None:
            return False
        return time.monotonic() - step.started > max(self.deadline.times.first_s, step.deadline_s)
