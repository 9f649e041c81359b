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

SHORT_CONTEXT = 2048
"""Tokens of context up to which attention takes a small part of a step. Steps over shorter contexts count as over this
one.
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
    """Derives deadlines from recent steps, grouped by size: their number of tokens and their longest context, both
    rounded up to a power of two.
    """

    def __init__(self, times: StepTimes = USUAL_TIMES) -> None:
        self.times = times
        self._recent: dict[tuple[int, int], deque[float]] = {}
        self._is_first = False

    def restart(self) -> None:
        """Notes that new processes run the steps from now on."""
        self._is_first = True

    def learn(self, num_tokens: int, seconds: float, context: int = 0) -> None:
        self._is_first = False
        size = _size(num_tokens), _size(max(context, SHORT_CONTEXT))
        self._recent.setdefault(size, deque(maxlen=NUM_RECENT)).append(seconds)

    def seconds(self, num_tokens: int, context: int = 0) -> float:
        """Returns the deadline in seconds for a step of `num_tokens`, whose longest context has `context` tokens.

        Assumes that a step takes at most as long as a step of more tokens over longer contexts, at most as long for
        each token as a smaller step, and at most as long for each token of context as one over a shorter context. A
        prompt whose beginning is cached may go from a short context to a long one at once; for the context alone the
        deadline does not exceed `StepTimes.unknown_s`.
        """
        if not self._recent:
            return self.times.unknown_s
        size, length = _size(num_tokens), _size(max(context, SHORT_CONTEXT))
        bounds = []
        for (known, known_length), recent in self._recent.items():
            bound = FACTOR * max(recent) * max(1.0, size / known)
            bounds.append(max(bound, min(bound * length / known_length, self.times.unknown_s)))
        return max(self.times.first_s if self._is_first else self.times.shortest_s, min(bounds))


def _size(num_tokens: int) -> int:
    return 1 << max(0, num_tokens - 1).bit_length()


class _StepUnderWay(NamedTuple):
    num_tokens: int
    context: int
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

    def begin(self, num_tokens: int, context: int = 0) -> None:
        """Notes the begin of a step of `num_tokens`, whose longest context has `context` tokens."""
        deadline_s = self.deadline.seconds(num_tokens, context)
        self._under_way.append(_StepUnderWay(num_tokens, context, time.monotonic(), deadline_s))
        self._oldest = self._under_way[0]

    def end(self) -> None:
        """Notes the end of the oldest step."""
        step = self._under_way.popleft()
        if step.num_tokens:
            self.deadline.learn(step.num_tokens, time.monotonic() - step.started, step.context)
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
