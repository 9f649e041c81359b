"""Limits the requests and tokens that an API key may use per minute, as OpenAI's API does.

Each limit is a token bucket, which holds at most a minute's worth and refills evenly. A request takes one from the
bucket of requests and its prompt's tokens from the bucket of tokens. Its output tokens are taken when it has ended, and
may leave the bucket in debt. A client therefore never waits for tokens that the model might have generated.

Several ingresses share the limits. Each tells the others what it has taken (`RateLimits.taken`) and takes what they
report (`RateLimits.note_peer`). Between two exchanges, a key may exceed its limit by what the other ingresses admitted
meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from manta.cluster.config import KeyLimits
from manta.cluster.errors import refuse

MINUTE_S = 60.0
FORGET_S = 600.0
"""Seconds without a report after which another ingress counts as gone."""
EVERY_KEY = "*"
"""Name in `key_limits` for all keys that are not named there."""


class Taken(NamedTuple):
    """Requests and tokens that one ingress has taken for a key since it started."""

    requests: float
    tokens: float


class _Bucket:
    """A token bucket that holds and refills `limit` per minute."""

    def __init__(self, limit: float, now: float) -> None:
        self.limit = limit
        self._level = limit
        self._at = now

    def level(self, now: float) -> float:
        """Returns what is left; negative in debt."""
        self._level = min(self.limit, self._level + (now - self._at) * self.limit / MINUTE_S)
        self._at = now
        return self._level

    def take(self, amount: float, now: float) -> None:
        self._level = self.level(now) - amount

    def seconds_until(self, amount: float, now: float) -> float:
        """Returns the seconds until `amount` is left, or until the bucket is full if it never holds as much."""
        return max(0.0, (min(amount, self.limit) - self.level(now)) * MINUTE_S / self.limit)


class KeyUse:
    """The buckets of one key."""

    def __init__(self, name: str, limits: KeyLimits, clock: Callable[[], float]) -> None:
        self.taken = Taken(0.0, 0.0)
        self._name = name
        self._clock = clock
        given = {"requests": limits.requests_per_minute, "tokens": limits.tokens_per_minute}
        self._buckets = {what: _Bucket(limit, clock()) for what, limit in given.items() if limit is not None}

    def admit(self, num_prompt_tokens: int) -> None:
        """Takes one request and the tokens of its prompts. Refuses with 429 if too little is left, and with 400
        prompts that exceed the limit itself.
        """
        now = self._clock()
        for what, amount in (("requests", 1), ("tokens", num_prompt_tokens)):
            bucket = self._buckets.get(what)
            if bucket is None:
                continue
            key = f"the key {self._name!r} (key_limits)"
            if amount > bucket.limit:
                refuse("over_rate_limit", "", amount, bucket.limit, "send less", unit=what, place=key)
            if bucket.level(now) < amount:
                wait_s = bucket.seconds_until(amount, now)
                left, more = max(0, int(bucket.level(now))), {"unit": what, "place": key, "retry_after_s": wait_s}
                refuse("rate_limit", "", left, bucket.limit, f"retry after {wait_s:.1f} s", **more)
        self._take(Taken(1, num_prompt_tokens))
        self.taken = Taken(self.taken.requests + 1, self.taken.tokens + num_prompt_tokens)

    def charge_output(self, num_tokens: int) -> None:
        """Takes the tokens of an output that has ended."""
        self._take(Taken(0, num_tokens))
        self.taken = Taken(self.taken.requests, self.taken.tokens + num_tokens)

    def note_peer(self, taken: Taken) -> None:
        """Takes what another ingress has taken since its last report."""
        self._take(taken)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Returns the `x-ratelimit-*` headers of an answer."""
        now, found = self._clock(), []
        for what, bucket in self._buckets.items():
            values = {
                "limit": f"{bucket.limit:g}",
                "remaining": str(max(0, int(bucket.level(now)))),
                "reset": _duration(bucket.seconds_until(bucket.limit, now)),
            }
            found += [(f"x-ratelimit-{name}-{what}".encode(), value.encode()) for name, value in values.items()]
        return found

    def _take(self, amounts: Taken) -> None:
        now = self._clock()
        for what, bucket in self._buckets.items():
            bucket.take(getattr(amounts, what), now)


class RateLimits:
    """The limits of all keys in this ingress."""

    def __init__(self, limits: Mapping[str, KeyLimits], clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._keys: dict[str, KeyUse] = {}
        self._peers: dict[str, _Peer] = {}
        """Other ingresses, by name."""

    def __bool__(self) -> bool:
        return bool(self._limits)

    def of(self, name: str) -> KeyUse | None:
        """Returns the buckets of a key; None if it has no limits."""
        limits = self._limits.get(name) or self._limits.get(EVERY_KEY)
        if limits is None:
            return None
        if name not in self._keys:
            self._keys[name] = KeyUse(name, limits, self._clock)
        return self._keys[name]

    def taken(self) -> dict[str, Taken]:
        """Returns what this ingress has taken since it started, by key name."""
        return {name: use.taken for name, use in self._keys.items()}

    def note_peer(self, peer: str, taken: Mapping[str, tuple[float, float]]) -> None:
        """Takes what another ingress has taken since its last report. `taken` is the result of its `taken`.

        What it had taken before its first report counts as used in an earlier minute.
        """
        now = {name: Taken(*each) for name, each in taken.items()}
        heard = self._peers.get(peer)
        if heard is not None:
            for name, each in now.items():
                earlier, use = heard.taken.get(name, Taken(0, 0)), self.of(name)
                if use is not None:
                    use.note_peer(Taken(each.requests - earlier.requests, each.tokens - earlier.tokens))
        self._peers[peer] = _Peer(self._clock(), now)
        self._peers = {name: each for name, each in self._peers.items() if self._clock() - each.at < FORGET_S}


class _Peer(NamedTuple):
    """Total that another ingress last reported, at the time `at`."""

    at: float
    taken: dict[str, Taken]


def _duration(seconds: float) -> str:
    """Returns a time as OpenAI writes it, such as `1m30s` or `250ms`."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
