"""The numbers of engines and ingresses to run: pure functions of what these report, called by Serve.

Serve copies this module to its controller, which may run where Manta is not installed, so it imports only the standard
library. Serve itself applies the delays, the bounds and the first step from zero (`ray.serve.config.AutoscalingConfig`,
made in `autoscaling.py`). Engines report through `EngineReplica.record_autoscaling_stats`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

HEADROOM = 0.8
"""Largest fill of the replicas that are left when one is stopped, as a share of the targets. At a higher fill the
stopped replica would soon be started again.
"""
FORGET_S = 3600.0
"""Seconds after which a learned limit of a replica is tried again, because requests change."""
ROUNDING = 1e-6
"""Share of a replica that rounding ignores, because means over time are not exact."""


class Targets(NamedTuple):
    """Upper targets for one replica; `manta.cluster.config.AutoscalingOptions` explains each."""

    ongoing_requests: float
    kv_usage: float
    waiting_tokens: float
    ttft_s: float


class Load(NamedTuple):
    """Load of all replicas together, averaged over the look-back period."""

    num_running: int
    """Replicas that serve."""
    num_target: int
    """Replicas that will serve once those that are starting have started."""
    ongoing_requests: float
    """Sequences that run or wait in engines, and requests that wait for an engine."""
    kv_usage: float
    """Sum over replicas of the share of KV blocks that running sequences hold, each in [0, 1]."""
    waiting_tokens: float
    """Prompt tokens of requests that have no first token yet."""
    ttft_s: float
    """Seconds to the first token at the replica where they are longest; 0 if nothing waited."""


class Lesson(NamedTuple):
    """A load at which replicas were overloaded."""

    ongoing_requests: float
    """Fewest requests per replica at which the replicas were overloaded."""
    learnt_at: float
    """Time of the last overload in seconds, on the clock of `learn`'s caller."""


def is_overloaded(load: Load, targets: Targets) -> bool:
    """Returns whether requests wait longer than the targets allow."""
    return load.num_running > 0 and (
        load.ttft_s > targets.ttft_s or load.waiting_tokens > targets.waiting_tokens * load.num_running
    )


def learn(load: Load, targets: Targets, known: Lesson | None, now: float) -> Lesson | None:
    """Returns the lesson after this load. Delays show that replicas are too few, but not that fewer would do, so the
    load at which they were too few is remembered. A lesson is forgotten `FORGET_S` after the last overload.
    """
    if known is not None and now - known.learnt_at > FORGET_S:
        known = None
    if not is_overloaded(load, targets):
        return known
    each = load.ongoing_requests / load.num_running
    return Lesson(each if known is None else min(each, known.ongoing_requests), now)


def desired_replicas(load: Load, targets: Targets, lesson: Lesson | None = None) -> int:
    """Returns the number of replicas for a load: more as soon as the load needs them, fewer only if the rest keeps
    `HEADROOM`. Serve applies the bounds.

    The number grows with each figure of the load and settles under a constant load. Requests and their KV blocks spread
    over the replicas, so their sums give the number needed. Nobody knows beforehand how much another replica shortens
    the time to first token; on overload, one replica is added at a time, after the previous one has started.
    """
    full = max(load.ongoing_requests / targets.ongoing_requests, load.kv_usage / targets.kv_usage)
    needed = _whole(full)
    if is_overloaded(load, targets):
        needed = max(needed, load.num_target + (load.num_running >= load.num_target))
    if load.num_running == 0:
        needed = max(needed, min(1, load.num_target))  # one that was asked for starts, even if its request has left
    if needed >= load.num_target:
        return needed
    left = full / HEADROOM
    if lesson is not None and lesson.ongoing_requests > 0:
        left = max(left, load.ongoing_requests / (HEADROOM * lesson.ongoing_requests))
    return min(load.num_target, max(needed, _whole(left)))


def _whole(replicas: float) -> int:
    return math.ceil(replicas - ROUNDING)


class EnginePolicy:
    """The policy that Serve creates with `Targets` as `policy_kwargs`, and calls several times a second with an
    `AutoscalingContext`. It is stateless: Serve keeps the state that it returns.
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
    """Returns the load in an `AutoscalingContext`: the requests that Serve counts and the figures that engines
    report.
    """
    sequences = _told(context, "num_sequences")
    # Serve counts queries for statistics as requests too, so a scraper would keep the last engine awake.
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
    """Returns the number of ingresses: one per node with engines, as ingresses report
    (`ListeningIngress.record_autoscaling_stats`). An ingress's load grows with the engines, and so with their nodes.
    Serve applies the bounds.
    """
    nodes = _told(context, "engine_nodes")
    return _whole(max(nodes, default=context.target_num_replicas)), {}


def _told(context: Any, name: str) -> list[float]:
    """Returns one figure of each replica that reported it."""
    metrics = context.aggregated_metrics or {}
    return [value for value in metrics.get(name, {}).values() if value is not None]
