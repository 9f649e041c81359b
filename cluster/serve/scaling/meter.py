"""What an engine measures of its requests for those who scale it and for clients that must wait: how long first tokens
take, how much waits for one, and how many requests end in a second.

The step thread tells it what happens; other threads ask. Imports neither torch nor ray.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable

TTFT_WINDOW_S = 10.0
"""First tokens that came longer ago say nothing of now."""
TTFT_SHARE = 0.9
"""Of the first tokens in the window, so many came at least as fast as is told."""
RATE_WINDOW_S = 60.0
"""Over which ended requests are counted."""
MAX_RETRY_S = 60.0
"""No client is sent away for longer."""


class LoadMeter:
    """Of one engine. `now` is its clock, in seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._waiting: dict[str, tuple[float, int]] = {}
        """Requests without a first token, oldest first: when they came, and their prompt's tokens."""
        self._first_tokens: collections.deque[tuple[float, float]] = collections.deque(maxlen=1024)
        """When they came, and after how long."""
        self._ended: collections.deque[float] = collections.deque(maxlen=4096)
        """When requests ended."""

    def arrived(self, request_id: str, num_tokens: int) -> None:
        with self._lock:
            self._waiting[request_id] = self._now(), num_tokens

    def has_first_token(self, request_id: str) -> None:
        """May be said again."""
        if request_id not in self._waiting:
            return
        with self._lock:
            now = self._now()
            self._first_tokens.append((now, now - self._waiting.pop(request_id)[0]))

    def ended(self, request_id: str) -> None:
        with self._lock:
            self._waiting.pop(request_id, None)
            self._ended.append(self._now())

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of requests that have no first token yet."""
        with self._lock:
            return sum(num_tokens for _, num_tokens in self._waiting.values())

    @property
    def ttft_s(self) -> float:
        """Lately, or what the oldest request has waited if that is longer; 0 if there was none."""
        with self._lock:
            now = self._now()
            lately = sorted(seconds for at, seconds in self._first_tokens if now - at <= TTFT_WINDOW_S)
            oldest = next((now - at for at, _ in self._waiting.values()), 0.0)
        typical = lately[min(len(lately) - 1, int(TTFT_SHARE * len(lately)))] if lately else 0.0
        return max(typical, oldest)

    @property
    def requests_per_s(self) -> float:
        """Requests that ended, over the last minute or since the first of them; 0 if none did."""
        with self._lock:
            now = self._now()
            recent = [at for at in self._ended if now - at <= RATE_WINDOW_S]
        return len(recent) / max(1.0, now - recent[0]) if recent else 0.0

    def retry_after_s(self, num_waiting: int) -> float | None:
        """When half of those that wait will have been served at the present rate, at most `MAX_RETRY_S`: then there is
        room, and work is left. None if nothing was measured.
        """
        rate = self.requests_per_s
        return min(MAX_RETRY_S, num_waiting / 2 / rate) if rate else None
