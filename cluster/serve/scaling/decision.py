"""How many engines and ingresses there should be: pure functions of what they tell, as Serve asks them.

Serve copies this module to its controller, which may run where Manta is not installed: only the standard library is
imported here. Serve applies the delays, the bounds and the first step from zero (`ray.serve.config.AutoscalingConfig`,
made in `autoscaling.py`); what an engine reports is `EngineReplica.record_autoscaling_stats`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

HEADROOM = 0.8
"""So full may the replicas be that are left when one is stopped: else it would soon be started again."""
FORGET_S = 3600.0
"""Requests change: what was learnt of a replica's limit is tried anew after so long."""
ROUNDING = 1e-6
"""Means over time are not exact: so much above a whole number of replicas is none more."""


class Targets(NamedTuple):
    """What one replica should have, at most; `cluster.config.AutoscalingOptions` says more of each."""

    ongoing_requests: float
    kv_usage: float
    waiting_tokens: float
    ttft_s: float


class Load(NamedTuple):
    """Of all replicas together, as means over the look-back period."""

    num_running: int
    """Replicas that serve."""
    num_target: int
    """Replicas that there will be when those that start have started."""
    ongoing_requests: float
    """Sequences that run or wait in engines, and requests that wait for an engine."""
    kv_usage: float
    """The sum of the shares of KV blocks that the replicas' running sequences hold, each in [0, 1]."""
    waiting_tokens: float
    """Prompt tokens of requests that have no first token yet."""
    ttft_s: float
    """Seconds to the first token at the replica where they are longest; 0 if nobody waited."""


class Lesson(NamedTuple):
    """That replicas with so many requests each let them wait too long."""

    ongoing_requests: float
    """Of each replica; the fewest since `learnt_at`."""
    learnt_at: float
    """Seconds, of the clock by which `learn` is called."""


def is_overloaded(load: Load, targets: Targets) -> bool:
    """Whether requests wait longer than they should."""
    return load.num_running > 0 and (
        load.ttft_s > targets.ttft_s or load.waiting_tokens > targets.waiting_tokens * load.num_running
    )


def learn(load: Load, targets: Targets, known: Lesson | None, now: float) -> Lesson | None:
    """Delays tell when replicas are too few, and not when fewer would do: so the load at which they were is kept."""
    if known is not None and now - known.learnt_at > FORGET_S:
        known = None
    if not is_overloaded(load, targets):
        return known
    each = load.ongoing_requests / load.num_running
    return Lesson(each if known is None else min(each, known.ongoing_requests), now)


def desired_replicas(load: Load, targets: Targets, lesson: Lesson | None = None) -> int:
    """More as soon as the load asks for them; fewer only if they would have `HEADROOM`. Bounds are Serve's business.

    Grows with each number of the load, and comes to rest under a constant one. Requests, and the KV blocks that they
    hold, are spread over the replicas, so their sums say how many are needed. By how much another replica shortens the
    wait for a first token is not known beforehand: then it is one more at a time, once those that start have started.
    """
    full = max(load.ongoing_requests / targets.ongoing_requests, load.kv_usage / targets.kv_usage)
    needed = _whole(full)
    if is_overloaded(load, targets):
        needed = max(needed, load.num_target + (load.num_running >= load.num_target))
    if load.num_running == 0:
        needed = max(needed, min(1, load.num_target))  # one that was asked for starts, though whoever asked may be gone
    if needed >= load.num_target:
        return needed
    left = full / HEADROOM
    if lesson is not None and lesson.ongoing_requests > 0:
        left = max(left, load.ongoing_requests / (HEADROOM * lesson.ongoing_requests))
    return min(load.num_target, max(needed, _whole(left)))


def _whole(replicas: float) -> int:
    return math.ceil(replicas - ROUNDING)


class EnginePolicy:
    """Serve makes one from its `policy_kwargs`, which are `Targets`, and calls it several times a second with an
    `AutoscalingContext`. It keeps nothing: Serve keeps the state that it returns.
    """

    def __init__(self, **targets: float) -> None:
        self._targets = Targets(**targets)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        load = load_of(context)
        known = context.policy_state.get("lesson")
        lesson = learn(load, self._targets, None if known is None else Lesson(*known), context.current_time)
        state = {} if lesson is None else {"lesson": tuple(lesson)}
        return desired_replicas(load, self._targets, lesson), state


def load_of(context: Any) -> Load:
    """Of an `AutoscalingContext`: what Serve counted of calls, and what the engines told of themselves."""
    sequences = _told(context, "num_sequences")
    # Serve counts questions for statistics as requests too, so that a scraper would keep the last engine awake.
    ongoing = sum(sequences) + (context.total_queued_requests or 0.0) if sequences else context.total_num_requests
    return Load(
        num_running=context.current_num_replicas,
        num_target=context.target_num_replicas,
        ongoing_requests=ongoing,
        kv_usage=sum(_told(context, "kv_usage")),
        waiting_tokens=sum(_told(context, "waiting_tokens")),
        ttft_s=max(_told(context, "ttft_s"), default=0.0),
    )


def desired_ingresses(context: Any) -> tuple[int, dict[str, Any]]:
    """As many as nodes on which engines run, as ingresses tell (`ListeningIngress.record_autoscaling_stats`); Serve
    keeps to the bounds. What an ingress has to carry grows with the engines, and so with these nodes.
    """
    nodes = _told(context, "engine_nodes")
    return _whole(max(nodes, default=context.target_num_replicas)), {}


def _told(context: Any, name: str) -> list[float]:
    """One number of all replicas that told it."""
    metrics = context.aggregated_metrics or {}
    return [value for value in metrics.get(name, {}).values() if value is not None]
