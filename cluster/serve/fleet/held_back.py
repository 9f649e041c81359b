"""Models that the loader does not start for a while: Serve refused to deploy them, or their engines have failed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

RETRY_FAILED_S = 60.0
"""Seconds after which a request may try again to load a model that has failed. Until then requests are refused with
its reason, because files and memory rarely change within seconds.
"""
RETRY_DEPLOY_S, MAX_RETRY_DEPLOY_S = 2.0, 60.0
"""Backoff in seconds after a deployment that Serve has refused, and its maximum; each further refusal doubles it."""


class _Held(NamedTuple):
    reason: str
    not_before: float
    """Time of the next attempt in seconds, on the loader's clock."""
    num_refusals: int = 0
    """Refusals by Serve in a row."""


class HeldBack:
    """The models that are not started yet, by name. `now` is a clock in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._held: dict[str, _Held] = {}

    def __contains__(self, name: str) -> bool:
        """Returns whether a model was held back by the last attempt to start it, however long ago that was."""
        return name in self._held

    def reason(self, name: str) -> str | None:
        """Returns the reason why a model is not started now; None if it may be."""
        held = self._held.get(name)
        return held.reason if held is not None and self._now() < held.not_before else None

    def refuse(self, name: str, reason: str) -> None:
        """Holds back a model that Serve has refused, longer each time."""
        before = self._held.get(name)
        count = 1 if before is None else before.num_refusals + 1
        pause_s = min(RETRY_DEPLOY_S * 2 ** min(count - 1, 16), MAX_RETRY_DEPLOY_S)
        self._held[name] = _Held(reason, self._now() + pause_s, count)

    def fail(self, name: str, reason: str) -> None:
        """Holds back a model whose engines have failed."""
        self._held[name] = _Held(reason, self._now() + RETRY_FAILED_S)

    def release(self, name: str) -> None:
        """Lets a model be started at once."""
        self._held.pop(name, None)

    def keep(self, names: Collection[str]) -> None:
        """Forgets all models but these."""
        self._held = {name: held for name, held in self._held.items() if name in names}

    def next_due_s(self, names: Collection[str]) -> float | None:
        """Returns the seconds until the first one of these models may be started; None if none is held back."""
        waits = [held.not_before - self._now() for name, held in self._held.items() if name in names]
        return max(0.0, min(waits)) if waits else None
