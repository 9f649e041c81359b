"""`GET /health`, `/-/healthz`, `/metrics` and `/openapi.json`: how the server is, what it counted, what it offers."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from cluster.engine.stats import EngineStats
from cluster.http.errors import ApiError
from cluster.http.exchange import Exchange
from cluster.http.state import AppState


class Health(msgspec.Struct, omit_defaults=True, kw_only=True):
    status: Literal["ok", "degraded"]
    reason: str | None = None
    """Why it is degraded."""


async def health(state: AppState, exchange: Exchange, _: None) -> Health:
    """200 while an engine is healthy and can send tokens here, and this replica is to stay."""
    if state.drains:
        raise ApiError(503, "this replica was told to go; ask another one")
    await state.engines.check_reachable()
    return health_of(await state.engines.stats(), state.config.health_bound_s)


def health_of(engines: list[EngineStats], bound_s: float) -> Health:
    """Raises `ApiError` 503 if no engine is healthy: Serve replaces those that say so themselves.

    An engine that cannot compile constraints serves everything else, and tries again by itself: it stays in service, as
    "degraded".
    """
    alive = [stats for stats in engines if stats.alive]
    if not alive:
        raise ApiError(503, "every engine has failed, and is being replaced")
    seconds = min(stats.seconds_since_progress for stats in alive)
    if seconds > bound_s:
        raise ApiError(503, f"no request made progress for {seconds:.0f} s; the bound is {bound_s:.0f} s")
    if all(stats.constraints.can_compile for stats in alive):
        return Health(status="ok")
    reason = "no grammar compiler starts, so requests with a constraint fail; the log says why"
    return Health(status="degraded", reason=reason)


async def ready(state: AppState, exchange: Exchange, _: None) -> None:
    """What Serve's proxies answer here, for load balancers that were set up for those."""
    status, text = (503, b"This node is being drained.") if state.drains else (200, b"success")
    await exchange.send_body(text, "text/plain; charset=utf-8", status)


async def metrics(state: AppState, exchange: Exchange, _: None) -> None:
    text = state.metrics.render(await state.engines.stats(), await state.other_metrics())
    await exchange.send_body(text, "text/plain; version=0.0.4; charset=utf-8")


async def openapi(state: AppState, exchange: Exchange, _: None) -> dict[str, Any]:
    return state.document
