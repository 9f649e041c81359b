"""The time that an idle engine waits for the rest of a burst of requests before it prefills the first one.

Without a wait, the first request of a burst is prefilled alone while the others queue. A lone request should not wait
in vain, so the wait is learned. Only the engine's thread uses this module.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable

LIMIT_S = 0.05
"""Longest wait for a burst, in seconds. A burst is also waited for no longer than a step takes."""
LEAST_QUIET_S, MOST_QUIET_S = 0.001, 0.008
"""Bounds, in seconds, of the learned quiet time: the wait ends once no message has arrived for that long."""
QUIET_SHARE = 0.2
"""Largest share of a step that the quiet time may take."""


class Burst:
    """Waits for bursts of one engine, and learns how long. A wait in which nothing else arrives halves the quiet time;
    a burst of which a part arrives after the wait doubles it.
    """

    def __init__(self) -> None:
        self.quiet_seconds = LEAST_QUIET_S
        self._num_gathered = 0
        self._has_gathered = False

    def gather(self, inbox: queue.SimpleQueue[Callable[[], None]], step_seconds: float) -> None:
        """Takes messages from the inbox until none comes. `step_seconds`, the last step's duration, bounds the wait."""
        deadline = time.monotonic() + min(LIMIT_S, step_seconds)
        quiet = min(self.quiet_seconds, QUIET_SHARE * step_seconds)
        self._num_gathered, self._has_gathered = 0, True
        with contextlib.suppress(queue.Empty):
            while time.monotonic() < deadline:
                inbox.get(timeout=quiet)()
                self._num_gathered += 1

    def learn(self, num_missed: int) -> None:
        """Adapts the quiet time to `num_missed`, the messages that arrived during the first step after `gather`."""
        if not self._has_gathered:
            return
        self._has_gathered = False
        if num_missed:
            self.quiet_seconds = min(MOST_QUIET_S, 2 * self.quiet_seconds)
        elif not self._num_gathered:
            self.quiet_seconds = max(LEAST_QUIET_S, self.quiet_seconds / 2)
