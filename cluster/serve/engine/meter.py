"""Measurements of one engine's requests, for autoscaling and for clients that are asked to retry: time to first token,
prompt tokens that wait, and requests that end per second.

The step thread records events; other threads read. Imports neither torch nor ray.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable

import msgspec

from manta.cluster.config import EngineConfig
from manta.cluster.engine.stats import EngineStats, ServiceStats
from manta.structured.refusals import Refusal

TTFT_WINDOW_S = 10.0
"""Seconds over which times to first token are considered."""
TTFT_SHARE = 0.9
"""Quantile of the times to first token in the window that `ttft_s` reports."""
RATE_WINDOW_S = 60.0
"""Seconds over which ended requests are counted."""
MAX_RETRY_S = 60.0
"""Longest time, in seconds, after which a client is told to retry."""


class LoadMeter:
    """The measurements of one engine. `now` is its clock, in seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._waiting: dict[str, tuple[float, int]] = {}
        """Requests without a first token, oldest first, each with its arrival time and number of prompt tokens."""
        self._first_tokens: collections.deque[tuple[float, float]] = collections.deque(maxlen=1024)
        """Arrival time of each first token, and its time to first token in seconds."""
        self._ended: collections.deque[float] = collections.deque(maxlen=4096)
        """Times at which requests ended."""

    def arrived(self, request_id: str, num_tokens: int) -> None:
        with self._lock:
            self._waiting[request_id] = self._now(), num_tokens

    def has_first_token(self, request_id: str) -> None:
        """Records a request's first token; later calls for the same request do nothing."""
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
        """Recent time to first token (`TTFT_SHARE` quantile), or the wait of the oldest request if that is longer; 0
        without requests.
        """
        with self._lock:
            now = self._now()
            lately = sorted(seconds for at, seconds in self._first_tokens if now - at <= TTFT_WINDOW_S)
            oldest = next((now - at for at, _ in self._waiting.values()), 0.0)
        typical = lately[min(len(lately) - 1, int(TTFT_SHARE * len(lately)))] if lately else 0.0
        return max(typical, oldest)

    @property
    def requests_per_s(self) -> float:
        """Requests that ended per second, over the last minute or since the first of them; 0 if none did."""
        with self._lock:
            now = self._now()
            recent = [at for at in self._ended if now - at <= RATE_WINDOW_S]
        return len(recent) / max(1.0, now - recent[0]) if recent else 0.0

    def service(self, replica: str, node: str, start_seconds: dict[str, float], config: EngineConfig) -> ServiceStats:
        """Returns what a replica of this name on a node adds to its engine's statistics."""
        return ServiceStats(
            replica=replica,
            node=node,
            start_seconds=start_seconds,
            waiting_tokens=self.waiting_tokens,
            ttft_s=self.ttft_s,
            requests_per_s=self.requests_per_s,
            config=config,
        )

    def load(self, stats: EngineStats) -> dict[str, float]:
        """Returns the load that `cluster/serve/scaling/decision.py` reads."""
        return {
            "num_sequences": stats.num_running + stats.num_waiting,
            "kv_usage": stats.kv_usage,
            "waiting_tokens": self.waiting_tokens,
            "ttft_s": self.ttft_s,
        }

    def with_retry(self, refusal: Refusal, num_waiting: int) -> Refusal:
        """Returns the refusal of a full queue with the time after which the client may retry."""
        return msgspec.structs.replace(refusal, retry_after_s=self.retry_after_s(num_waiting))

    def retry_after_s(self, num_waiting: int) -> float | None:
        """Returns the seconds until half of the waiting requests will have been served at the present rate, at most
        `MAX_RETRY_S`. At that point there is room in the queue and still work. Returns None if no request has ended
        recently.
        """
        rate = self.requests_per_s
        return min(MAX_RETRY_S, num_waiting / 2 / rate) if rate else None
