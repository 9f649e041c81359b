"""`GET /health`, `/ping`, `/-/healthz`, `/status`, `/version`, `/metrics` and `/openapi.json`: the state of the server,
what runs where, its metrics and its endpoints.
"""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec

from manta.cluster.config import ServeConfig
from manta.cluster.engine.stats import EngineStats
from manta.cluster.errors import ServingError, refuse
from manta.cluster.http.exchange.exchange import Exchange
from manta.cluster.http.exchange.state import AppState, DeploymentState, NodeState
from manta.cluster.version import version


class Health(msgspec.Struct, omit_defaults=True, kw_only=True):
    status: Literal["ok", "degraded"]
    reason: str | None = None
    """Reason why it is degraded, or ok without an engine."""


async def health(state: AppState, exchange: Exchange, _: None) -> Health:
    """Returns 200 if this replica is not draining and a healthy engine can send it tokens. Also returns 200 while all
    engines are stopped because there are no requests.
    """
    if state.drains:
        refuse("unavailable", remedy="ask another one", cause="this replica was told to go")
    await state.engines.check_reachable()
    engines = await state.engines.stats()
    if not engines and may_stop_all(state.config):
        return Health(status="ok", reason="no engine runs; the next request starts one")
    knew_engines, state.knows_engines = state.knows_engines, state.knows_engines or bool(engines)
    return health_of(engines, state.config.health_bound_s, knew_engines)


def may_stop_all(config: ServeConfig) -> bool:
    return config.autoscaling is not None and config.autoscaling.min_replicas == 0


def health_of(engines: list[EngineStats], bound_s: float, knew_engines: bool = False) -> Health:
    """Returns the health of the engines. Refuses with 503 if none is healthy; Serve replaces engines that have
    failed. `engines` are those that answer. `knew_engines` says whether any answered this ingress before.

    An engine that cannot compile constraints serves all other requests, and retries by itself. It stays in service and
    counts as "degraded".
    """
    if not engines:
        if knew_engines:
            refuse(
                "unavailable",
                cause="no engine answers any more: those that ran have ended, and Serve starts another one",
            )
        refuse("unavailable", cause="no engine has answered this server yet: Serve starts one")
    alive = [stats for stats in engines if stats.alive]
    if not alive:
        refuse("unavailable", cause="every engine that answers has failed, and Serve replaces it")
    seconds = min(stats.seconds_since_progress for stats in alive)
    if seconds > bound_s:
        cause = f"no request made progress for {seconds:.0f} s; the bound is {bound_s:.0f} s"
        refuse("unavailable", "", round(seconds), bound_s, cause=cause)
    if all(stats.constraints.can_compile for stats in alive):
        return Health(status="ok")
    reason = "no grammar compiler starts, so requests with a constraint fail; the log says why"
    return Health(status="degraded", reason=reason)


async def ready(state: AppState, exchange: Exchange, _: None) -> None:
    """Answers as Serve's proxies do, for load balancers that were set up for them."""
    status, text = (503, b"This node is being drained.") if state.drains else (200, b"success")
    await exchange.reply.send_body(text, "text/plain; charset=utf-8", status)


class Version(msgspec.Struct):
    version: str


async def server_version(state: AppState, exchange: Exchange, _: None) -> Version:
    return Version(version())


class EngineState(msgspec.Struct, kw_only=True):
    """One engine that answers."""

    replica: str
    """Last part of the engine's name in Serve."""
    node: str
    state: Literal["idle", "running", "stands still", "failed"]
    num_running: int
    """Sequences in the engine's batch."""
    num_waiting: int
    waiting_tokens: int
    """Prompt tokens of requests without a first token."""
    kv_usage: float
    """Share of the engine's KV blocks that running sequences hold."""
    cache_hit_rate: float | None
    """Share of all prompt tokens so far that the prefix cache held; None before the first."""
    ttft_s: float
    requests_per_s: float
    start_seconds: dict[str, float]
    """Seconds of each phase of the engine's start, in order."""


class Status(msgspec.Struct, kw_only=True):
    """All that `manta status` shows."""

    version: str
    uptime_s: float
    """Seconds since the answering ingress started."""
    num_held: int
    """Requests that wait at this ingress for an engine to start."""
    engines: list[EngineState]
    deployments: list[DeploymentState]
    nodes: list[NodeState]
    problem: str | None = None
    """Reason why the engines do not answer."""


async def status(state: AppState, exchange: Exchange, _: None) -> Status:
    """Returns the status, whatever state the engines are in."""
    problem, stats = None, []
    try:
        stats = await state.engines.stats()
    except ServingError as error:
        problem = str(error)
    deployments, nodes = await state.cluster()
    return Status(
        version=version(),
        uptime_s=time.time() - state.created,
        num_held=state.engines.num_held,
        engines=[_engine_state(each, state.config.health_bound_s) for each in stats],
        deployments=deployments,
        nodes=nodes,
        problem=problem,
    )


def _engine_state(stats: EngineStats, bound_s: float) -> EngineState:
    service = stats.service
    assert service is not None, "replicas say it"
    return EngineState(
        replica=service.replica.rpartition("#")[2],
        node=service.node,
        state=_word(stats, bound_s),
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        waiting_tokens=service.waiting_tokens,
        kv_usage=stats.kv_usage,
        cache_hit_rate=stats.prefix_cache_hits / stats.prefix_cache_queries if stats.prefix_cache_queries else None,
        ttft_s=service.ttft_s,
        requests_per_s=service.requests_per_s,
        start_seconds=service.start_seconds,
    )


def _word(stats: EngineStats, bound_s: float) -> Literal["idle", "running", "stands still", "failed"]:
    if not stats.alive:
        return "failed"
    if stats.seconds_since_progress > bound_s:
        return "stands still"
    return "running" if stats.num_running + stats.num_waiting else "idle"


async def metrics(state: AppState, exchange: Exchange, _: None) -> None:
    text = state.metrics.render(await state.engines.stats(), await state.other_metrics())
    await exchange.reply.send_body(text, "text/plain; version=0.0.4; charset=utf-8")


async def openapi(state: AppState, exchange: Exchange, _: None) -> dict[str, Any]:
    if not exchange.incoming.root_path:
        return state.document
    return {**state.document, "servers": [{"url": exchange.incoming.root_path}]}
