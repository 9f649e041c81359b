"""How long an idle engine waits for the rest of a burst before it begins with the first request.

The first of 16 requests would be prefilled alone while the others wait (118 ms of 901:
benchmarks/results/2026-11-21.md); but a lone request should not wait in vain. So the wait is learned. Used by the
engine's thread alone.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable

LIMIT_S = 0.05
"""A burst is waited for no longer than this, nor than a step takes, ..."""
LEAST_QUIET_S, MOST_QUIET_S = 0.001, 0.008
QUIET_SHARE = 0.2
"""... and no longer than what is learned between these, nor than this share of a step, once nothing more comes."""


class Burst:
    """One for each engine. A wait in which no other request comes halves the wait; a burst that comes apart doubles
    it.
    """

    def __init__(self) -> None:
        self.quiet_seconds = LEAST_QUIET_S
        self._num_gathered = 0
        self._has_gathered = False

    def gather(self, inbox: queue.SimpleQueue[Callable[[], None]], step_seconds: float) -> None:
        """Takes what comes. `step_seconds` is what the last step took: the wait is worth a part of it at most."""
        deadline = time.monotonic() + min(LIMIT_S, step_seconds)
        quiet = min(self.quiet_seconds, QUIET_SHARE * step_seconds)
        self._num_gathered, self._has_gathered = 0, True
        with contextlib.suppress(queue.Empty):
            while time.monotonic() < deadline:
                inbox.get(timeout=quiet)()
                self._num_gathered += 1

    def learn(self, num_missed: int) -> None:
        """Called after each step with the number of messages that came meanwhile; the first after `gather` counts."""
        if not self._has_gathered:
            return
        self._has_gathered = False
        if num_missed:
            self.quiet_seconds = min(MOST_QUIET_S, 2 * self.quiet_seconds)
        elif not self._num_gathered:
            self.quiet_seconds = max(LEAST_QUIET_S, self.quiet_seconds / 2)
