"""Limits the requests and tokens that an API key may use per minute, as OpenAI's API does.

Each limit is a token bucket, which holds at most a minute's worth and refills evenly. A request takes one from the
bucket of requests and its prompt's tokens from the bucket of tokens. Its output tokens are taken as they are generated,
however the request ends, and may leave the bucket in debt. No running request is cut.

While a request runs, tokens that it has not generated yet are reserved: as many as it asks for, but at most
`RESERVED_SHARE` of the limit. So requests that begin together cannot all count on the same tokens. The rest of the
reserve is free again when the request ends.

Several ingresses share the limits. Each tells the others what it has taken (`RateLimits.taken`) and takes what they
report (`RateLimits.note_peer`). Between two exchanges, a key may exceed its limit by what the other ingresses admitted
meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from manta.cluster.errors import refuse
from manta.cluster.serve_limits import KeyLimits

MINUTE_S = 60.0
FORGET_S = 600.0
"""Seconds without a report after which another ingress counts as gone."""
RESERVED_SHARE = 1 / 8
"""Largest share of the limit that is reserved for one request's output. Many clients leave `max_tokens` out, which asks
for all that the model's length leaves. Eight such requests of one key may run at a time under any limit.
"""
EVERY_KEY = "*"
"""Name in `key_limits` for all keys that are not named there."""


class Taken(NamedTuple):
    """Requests and tokens that one ingress has taken for a key since it started. The tokens include those that it
    reserves now.
    """

    requests: float
    tokens: float


class _Bucket:
    """A token bucket that holds and refills `limit` per minute."""

    def __init__(self, limit: float, now: float) -> None:
        self.limit = limit
        self.reserved = 0.0
        """Tokens that running requests may still take."""
        self._level = limit
        self._at = now

    def left(self, now: float) -> float:
        """Returns what is neither taken nor reserved; negative in debt."""
        self._refill(now)
        return self._level - self.reserved

    def take(self, amount: float, now: float) -> None:
        self._refill(now)
        self._level -= amount

    def seconds_until(self, amount: float, now: float) -> float:
        """Returns the seconds until `amount` is left, or until the bucket is full if it never holds as much."""
        return max(0.0, (min(amount, self.limit) - self.left(now)) * MINUTE_S / self.limit)

    def _refill(self, now: float) -> None:
        self._level = min(self.limit, self._level + (now - self._at) * self.limit / MINUTE_S)
        self._at = now


class Reservation:
    """The output tokens of one admitted request, of which `left` are reserved. Implements
    `manta.cluster.http.exchange.engines.Meter`.
    """

    def __init__(self, use: KeyUse, left: float) -> None:
        self._use = use
        self._left = left

    def spend(self, num_tokens: int) -> None:
        """Takes tokens that were generated. A negative number gives back those that do not count."""
        from_reserve = max(0, min(num_tokens, self._left))
        self._left -= from_reserve
        self._use.charge(num_tokens, from_reserve)

    def end(self) -> None:
        """Frees the rest of the reserve. Later calls do nothing."""
        self._use.charge(0, self._left)
        self._left = 0


class KeyUse:
    """The buckets of one key."""

    def __init__(self, name: str, limits: KeyLimits, clock: Callable[[], float]) -> None:
        self._taken = Taken(0.0, 0.0)
        self._name = name
        self._clock = clock
        given = {"requests": limits.requests_per_minute, "tokens": limits.tokens_per_minute}
        self._buckets = {what: _Bucket(limit, clock()) for what, limit in given.items() if limit is not None}

    @property
    def taken(self) -> Taken:
        """Amount that was taken here, with what is reserved now."""
        tokens = self._buckets.get("tokens")
        return self._taken if tokens is None else Taken(self._taken.requests, self._taken.tokens + tokens.reserved)

    def admit(self, num_prompt_tokens: int, max_output_tokens: int = 0) -> Reservation:
        """Takes one request and the tokens of its prompts, and reserves tokens for its output of at most
        `max_output_tokens`. Refuses with 429 if too little is left, and with 400 prompts that exceed the limit itself.
        """
        reserved = self._reserve(num_prompt_tokens, max_output_tokens)
        self._check("requests", 1, 0)
        self._check("tokens", num_prompt_tokens, reserved)
        self._take(Taken(1, num_prompt_tokens))
        self._taken = Taken(self._taken.requests + 1, self._taken.tokens + num_prompt_tokens)
        if "tokens" in self._buckets:
            self._buckets["tokens"].reserved += reserved
        return Reservation(self, reserved)

    def give_back(self, num_prompt_tokens: int) -> None:
        """Undoes the admission of a request that no engine took and that is tried again."""
        self._take(Taken(-1, -num_prompt_tokens))
        self._taken = Taken(self._taken.requests - 1, self._taken.tokens - num_prompt_tokens)

    def seconds_until_room(self) -> float:
        """Returns the seconds until there is room for a request that waits behind others of its key: as much as it may
        take, and as much again as others may reserve.
        """
        now, most = self._clock(), {what: bucket.limit * RESERVED_SHARE for what, bucket in self._buckets.items()}
        waits = (bucket.seconds_until(max(1.0, most[what]) + most[what], now) for what, bucket in self._buckets.items())
        return max(waits, default=0.0)

    def resume(self) -> Reservation:
        """Returns the reservation of a request that another ingress admitted; nothing is reserved for it here."""
        return Reservation(self, 0)

    def charge(self, num_tokens: float, from_reserve: float) -> None:
        """Takes output tokens, and frees reserved ones."""
        if "tokens" in self._buckets:
            self._buckets["tokens"].reserved -= from_reserve
        self._take(Taken(0, num_tokens))
        self._taken = Taken(self._taken.requests, self._taken.tokens + num_tokens)

    def _reserve(self, num_prompt_tokens: int, max_output_tokens: int) -> int:
        """Returns the tokens that are reserved for an output. With the prompt, they fit a full bucket."""
        bucket = self._buckets.get("tokens")
        if bucket is None:
            return 0
        most = min(bucket.limit * RESERVED_SHARE, bucket.limit - num_prompt_tokens)
        return max(0, min(max_output_tokens, int(most)))

    def _check(self, what: str, amount: int, reserved: int) -> None:
        """Refuses a request that takes `amount` and reserves `reserved`, if its bucket has too little."""
        bucket, now = self._buckets.get(what), self._clock()
        if bucket is None:
            return
        key = f"the key {self._name!r} (key_limits)"
        if amount > bucket.limit:
            refuse("over_rate_limit", "", amount, bucket.limit, "send less", unit=what, place=key)
        if bucket.left(now) < amount + reserved:
            wait_s = bucket.seconds_until(amount + reserved, now)
            left, more = max(0, int(bucket.left(now))), {"unit": what, "place": key, "retry_after_s": wait_s}
            cause = f"this request takes {amount} and reserves {reserved} for its output" if reserved else ""
            refuse("rate_limit", "", left, bucket.limit, f"retry after {wait_s:.1f} s", cause=cause, **more)

    def note_peer(self, taken: Taken) -> None:
        """Takes what another ingress has taken since its last report."""
        self._take(taken)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Returns the `x-ratelimit-*` headers of an answer."""
        now, found = self._clock(), []
        for what, bucket in self._buckets.items():
            values = {
                "limit": f"{bucket.limit:g}",
                "remaining": str(max(0, int(bucket.left(now)))),
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

    def models_of(self, name: str) -> tuple[str, ...] | None:
        """Returns the names of the models that a key may use; None if it may use all."""
        limits = self._limits.get(name) or self._limits.get(EVERY_KEY)
        return None if limits is None else limits.models

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
