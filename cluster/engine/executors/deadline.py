"""The deadline of a step, after which it counts as hung: a multiple of recent step times."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

import msgspec

FACTOR = 20.0
"""Multiple of the slowest recent step of about as many tokens."""
LONG_FACTOR = 5.0
"""Multiple of the time that a longer context is expected to add, and of what smaller steps took. It is below `FACTOR`,
because what slows a machine down for some seconds is a small part of a step of minutes.
"""
NUM_RECENT = 64
"""Number of recent steps remembered for each size."""
LATE_SHARE = 0.5
"""Share of a step's deadline after which requests leave for another engine, if there is one. If the step ends after
all, leaving costs less than a restart.
"""

SHORT_CONTEXT = 2048
"""Tokens of context, a power of two, up to which attention takes a small part of a step. Steps over shorter contexts
count as over this one.
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
    rounded up to a power of two. `even_context` is `ModelInfo.even_context`.
    """

    def __init__(self, times: StepTimes = USUAL_TIMES, even_context: int | None = None) -> None:
        self.times = times
        self.even_context = even_context
        self._recent: dict[tuple[int, int], deque[float]] = {}
        """Seconds of recent steps, by size."""
        self._slowest: dict[tuple[int, int], float] = {}
        """The most of them, by size."""
        self._bounds: dict[tuple[int, int], float] = {}
        """Deadlines by size, in seconds, which hold until a slowest step changes."""
        self._is_first = False

    def restart(self) -> None:
        """Notes that new processes run the steps from now on."""
        self._is_first = True

    def learn(self, num_tokens: int, seconds: float, context: int = 0) -> None:
        self._is_first = False
        size = _size_of(num_tokens, context)
        recent = self._recent.get(size)
        if recent is None:
            recent = self._recent[size] = deque(maxlen=NUM_RECENT)
            self._slowest[size] = -1.0
        forgotten = recent[0] if len(recent) == NUM_RECENT else 0.0
        recent.append(seconds)
        if max(seconds, forgotten) >= self._slowest[size]:
            self._slowest[size] = max(recent)
            self._bounds.clear()

    def seconds(self, num_tokens: int, context: int = 0) -> float:
        """Returns the deadline in seconds for a step of `num_tokens`, whose longest context has `context` tokens.

        Assumes that a step takes at most as long as a step of more tokens over longer contexts, and at most as long for
        each token as a smaller step over as long a context. A prompt whose beginning is cached may go from a short
        context to a long one at once. Its attention is then expected to add what `even_context` says, and may take
        `LONG_FACTOR` times as long, but adds at most up to `StepTimes.unknown_s`.
        """
        if not self._slowest:
            return self.times.unknown_s
        size = _size_of(num_tokens, context)
        bound = self._bounds.get(size)
        if bound is None:
            bound = self._bounds[size] = self._bound(*size)
        return max(self.times.first_s if self._is_first else self.times.shortest_s, bound)

    def _bound(self, size: int, length: int) -> float:
        bounds, smaller = [], [0.0]
        for (known, known_length), slowest in self._slowest.items():
            expected = slowest * max(1.0, size / known)
            added = expected * max(0.0, self._growth(known_length, length) - 1)
            bound = FACTOR * expected
            bounds.append(max(bound, min(bound + LONG_FACTOR * added, self.times.unknown_s)))
            if known <= size and known_length <= length:
                smaller.append(slowest)
        return max(LONG_FACTOR * max(smaller), min(bounds))

    def _growth(self, known_length: int, length: int) -> float:
        """Returns how many times as long a token is expected to take over a context of `length` tokens."""
        if self.even_context is None:
            return 1.0
        return (self.even_context + length) / (self.even_context + known_length)


def _size_of(num_tokens: int, context: int) -> tuple[int, int]:
    return _rounded_up(num_tokens), SHORT_CONTEXT if context <= SHORT_CONTEXT else _rounded_up(context)


def _rounded_up(count: int) -> int:
    return 1 << (count - 1).bit_length() if count > 1 else 1


class _StepUnderWay(NamedTuple):
    num_tokens: int
    context: int
    started: float
    """Time on `time.monotonic`'s clock."""
    deadline_s: float


class StepWatch:
    """Watches the steps of this process, in which nothing can end a step that hangs. The thread that runs the steps
    calls `begin`, `end` and `forget`, and any thread may ask. `even_context` is `ModelInfo.even_context`.
    """

    def __init__(self, even_context: int | None = None) -> None:
        self.deadline = StepDeadline(even_context=even_context)
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
