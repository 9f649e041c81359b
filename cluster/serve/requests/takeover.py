"""The way of a request from one engine to another: why it left the first one, and how long each part of the way took.

`prompt_run.py` notes the times. `/metrics` shows them by phase, and the request log has those of each request.
"""

from __future__ import annotations

import time
from typing import Literal

import msgspec

from manta.cluster.engine.request import Waits
from manta.cluster.http.exchange.metrics import TAKEOVER_PHASES
from manta.cluster.serve.channel.token_channel import BEAT_S

Cause = Literal["connection", "away", "silent", "ending", "unreached", "full", "ingress"]
"""Reason why a request leaves an engine:

- `connection`: the connection to the engine broke, as when its process dies.
- `away`: the engine said that it restarts its ranks, or that a rank is late.
- `silent`: the engine missed heartbeats.
- `ending`: Serve has told the engine to end.
- `unreached`: the call reached no engine.
- `full`: the engine to which the request moved had no room in its queue.
- `ingress`: the ingress that ran the request is lost, and another one continues it.
"""


class TakeoverTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Times of an ingress that looks for lost engines, in seconds. A broken connection waits for none of them."""

    look_s: float = BEAT_S
    """Time between two looks for engines that are silent or were told to end."""
    retry_s: float = 0.1
    """Pause before a call that reached no engine is repeated, unless another engine can take it. It doubles with each
    further call in a row.
    """
    most_retry_s: float = 2.0
    """Longest such pause. Serve's router learns within about a second which replicas are dead."""


USUAL_TIMES = TakeoverTimes()


class Takeover(msgspec.Struct):
    """A takeover under way. Times are on `time.monotonic`'s clock."""

    cause: Cause
    """Why the first engine was left; further ones may be lost on the way."""
    heard: float
    """Time of the last output before it, or of the request's begin."""
    noticed: float
    taken: float = 0.0
    """Time at which the present engine acknowledged the request."""
    num_calls: int = 1
    """Calls of engines so far."""

    def seconds(self, waits: Waits | None) -> dict[str, float]:
        """Returns the seconds of each phase of a takeover that ends now. `waits` is what the engine has measured; None
        from an engine of an earlier version, whose part counts as `compute`.
        """
        left_s = time.monotonic() - self.taken
        told = (0.0, 0.0, left_s) if waits is None else (waits.prepare_s, waits.queue_s, waits.compute_s)
        in_engine: list[float] = []
        for each in told:  # the engine's clock began when the call arrived, a moment before the ingress knew of it
            in_engine.append(min(each, left_s))
            left_s -= in_engine[-1]
        seconds = self.noticed - self.heard, self.taken - self.noticed, *in_engine, left_s
        return dict(zip(TAKEOVER_PHASES, seconds, strict=True))
