"""`GET /health`, `/ping`, `/-/healthz`, `/status`, `/version`, `/metrics` and `/openapi.json`: the state of the server,
what runs where, its metrics and its endpoints.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from manta.cluster.config import ServeConfig
from manta.cluster.engine.stats import EngineStats
from manta.cluster.errors import ServingError, refuse
from manta.cluster.http.exchange.all_engines import stats_by_model
from manta.cluster.http.exchange.condition import Stage
from manta.cluster.http.exchange.exchange import Exchange
from manta.cluster.http.exchange.last_answer import Known
from manta.cluster.http.exchange.metrics import render
from manta.cluster.http.exchange.state import AppState, DeploymentState, NodeState
from manta.cluster.version import version

PATIENCE_S = 2.0
"""Seconds that `/status` and `/metrics` wait for answers of engines, of Serve and of other ingresses. All are asked at
once, and then the last known answers are shown with their age. Programs that ask wait for 5 s or longer.
"""


class Health(msgspec.Struct, omit_defaults=True, kw_only=True):
    status: Literal["ok", "degraded"]
    reason: str | None = None
    """Reason why it is degraded, or ok without an engine."""


async def health(state: AppState, exchange: Exchange, _: None) -> Health:
    """Returns 200 if this replica is not draining and a healthy engine can send it tokens. Also returns 200 while all
    engines are stopped because there are no requests.
    """
    if state.server.drains:
        refuse("unavailable", remedy="ask another one", cause="this replica was told to go")
    await state.engines.check_reachable()
    if state.models.are_several:
        return health_of_models(await stats_by_model(state.models), state.config.health_bound_s)
    engines = await state.engines.stats()
    if not engines and may_stop_all(state.config):
        return Health(status="ok", reason="no engine runs; the next request starts one")
    server = state.server
    knew_engines, server.knows_engines = server.knows_engines, server.knows_engines or bool(engines)
    return health_of(engines, state.config.health_bound_s, knew_engines, state.config.num_engines_wanted)


def may_stop_all(config: ServeConfig) -> bool:
    return config.autoscaling is not None and config.autoscaling.min_replicas == 0


def health_of_models(models: list[tuple[AppState, list[EngineStats]]], bound_s: float) -> Health:
    """Returns the health of several models. One that is not healthy takes no other one out of service: the server
    counts as "degraded". Refuses with 503 if none is healthy, because none has loaded or all stand still.
    """
    faults, num_healthy = [], 0
    for state, engines in models:
        assert state.condition is not None, "it is one of several"
        fault = None
        try:
            state.condition.check(state.model_name)
            if state.condition.stage != "unloaded" and not (state.is_on_demand and state.condition.stage == "loading"):
                fault = health_of(engines, bound_s, num_wanted=state.config.num_engines_wanted).reason
            num_healthy += 1
        except ServingError as error:
            fault = error.refusal.cause
        if fault:
            faults.append(f"{state.model_name}: {fault}")
    if not num_healthy:
        refuse("unavailable", cause="; ".join(faults) or "no model is served here yet")
    return Health(status="degraded", reason="; ".join(faults)) if faults else Health(status="ok")


def health_of(engines: list[EngineStats], bound_s: float, knew_engines: bool = False, num_wanted: int = 1) -> Health:
    """Returns the health of the engines. Refuses with 503 if none is healthy; Serve replaces engines that have
    failed. `engines` are those that answer. `knew_engines` says whether any answered this ingress before. With fewer
    than `num_wanted` the health is "degraded", because the others serve all requests.

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
    if not all(stats.constraints.can_compile for stats in alive):
        reason = "no grammar compiler starts, so requests with a constraint fail; the log says why"
        return Health(status="degraded", reason=reason)
    num_serving = sum(stats.is_serving for stats in engines)
    if num_serving < num_wanted:
        return Health(status="degraded", reason=f"{num_serving} of {num_wanted} engines serve")
    return Health(status="ok")


async def ready(state: AppState, exchange: Exchange, _: None) -> None:
    """Answers as Serve's proxies do, for load balancers that were set up for them. It also fails until the first engine
    has loaded, because a load balancer in front of two clusters would send requests to one that still loads.
    """
    status, text = 200, b"success"
    if state.server.drains:
        status, text = 503, b"This node is being drained."
    elif not await _has_met_engines(state):
        status, text = 503, b"No engine has loaded yet."
    await exchange.reply.send_body(text, "text/plain; charset=utf-8", status)


async def _has_met_engines(state: AppState) -> bool:
    """Returns whether an engine has answered this ingress at any time, or none need run. Later deaths do not count,
    because requests wait here for the next engine.
    """
    server = state.server
    if server.knows_engines or state.models.are_several or may_stop_all(state.config):
        return True
    with contextlib.suppress(ServingError):
        server.knows_engines = bool(await state.engines.stats())
    return server.knows_engines


class Version(msgspec.Struct):
    version: str


async def server_version(state: AppState, exchange: Exchange, _: None) -> Version:
    return Version(version())


Activity = Literal["idle", "running", "waits for ranks", "stands still", "failed"]
"""The states of an engine. An engine waits for ranks while it restarts them, and while a step is late."""


class EngineState(msgspec.Struct, kw_only=True):
    """One engine that answers."""

    model: str | UnsetType = UNSET
    """Name of the engine's model, if the server has several."""
    replica: str
    """Last part of the engine's name in Serve."""
    node: str
    state: Activity
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


class ModelState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One of several models."""

    name: str
    state: Stage
    reason: str = ""
    """Reason why it is not loaded."""
    aliases: list[str] = []


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
    models: list[ModelState] | UnsetType = UNSET
    """The models, if the server may have several."""
    engines_age_s: float = 0.0
    """Seconds since `engines` were heard; 0 if they have answered now. Without any answer so far it counts from the
    ingress's start. Of several models those that do not answer are left out.
    """
    cluster_age_s: float = 0.0
    """Seconds since Serve and Ray told `deployments` and `nodes`, likewise."""


async def status(state: AppState, exchange: Exchange, _: None) -> Status:
    """Returns the status within `PATIENCE_S`, whatever state the engines are in."""
    heard, cluster = await asyncio.gather(_engines_heard(state), state.server.cluster.read(PATIENCE_S))
    bound_s, are_several = state.config.health_bound_s, state.models.are_several
    alone = None if are_several else heard[0][1]
    deployments, nodes = cluster.value
    return Status(
        version=version(),
        uptime_s=time.monotonic() - state.server.started,
        num_held=state.engines.num_held,
        engines=[
            _engine_state(each, bound_s, served.model_name if are_several else UNSET)
            for served, known in heard
            for each in (known.value if known.age_s == 0 or not are_several else ())
        ],
        deployments=deployments,
        nodes=nodes,
        problem=None if alone is None or alone.problem is None else str(alone.problem),
        models=[*map(_model_state, state.models)] if are_several else UNSET,
        engines_age_s=0.0 if alone is None else alone.age_s,
        cluster_age_s=cluster.age_s,
    )


async def _engines_heard(state: AppState) -> list[tuple[AppState, Known[list[EngineStats]]]]:
    """Returns each model with what its engines have told within `PATIENCE_S`."""
    states = list(state.models)
    heard = await asyncio.gather(*(each.engine_stats.read(PATIENCE_S) for each in states))
    return list(zip(states, heard, strict=True))


def _model_state(state: AppState) -> ModelState:
    assert state.condition is not None, "it is one of several"
    condition = state.condition
    return ModelState(
        name=state.model_name,
        state=condition.stage,
        reason=condition.reason,
        aliases=[*state.config.model_aliases],
    )


def _engine_state(stats: EngineStats, bound_s: float, model: str | UnsetType = UNSET) -> EngineState:
    service = stats.service
    assert service is not None, "replicas say it"
    return EngineState(
        model=model,
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


def _word(stats: EngineStats, bound_s: float) -> Activity:
    if not stats.alive:
        return "failed"
    if stats.is_away:
        return "waits for ranks"
    if stats.seconds_since_progress > bound_s:
        return "stands still"
    return "running" if stats.num_running + stats.num_waiting else "idle"


async def metrics(state: AppState, exchange: Exchange, _: None) -> None:
    """Sends the metrics within `PATIENCE_S`. Engines that do not answer by then have no part in them: their gauges
    are missing, and `manta:engines_serving` does not count them.
    """
    heard, others = await asyncio.gather(_engines_heard(state), state.server.other_metrics.read(PATIENCE_S))
    models = [(served.metrics, [] if known.age_s else known.value) for served, known in heard]
    of_server = [state.metrics.own()] if state.models.are_several else []
    text = render(models, [*of_server, *others.value])
    await exchange.reply.send_body(text, "text/plain; version=0.0.4; charset=utf-8")


async def openapi(state: AppState, exchange: Exchange, _: None) -> dict[str, Any]:
    if not exchange.incoming.root_path:
        return state.server.document
    return {**state.server.document, "servers": [{"url": exchange.incoming.root_path}]}
