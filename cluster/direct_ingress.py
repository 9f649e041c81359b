"""Lets the ingress replica take HTTP connections itself, without Serve's proxy in between; used on one machine.

The proxy pulls every streamed event over as a Ray object of its own: at 20 steps a second that costs 0.8 ms of CPU an
event in the two processes, half a core at 32 streams, against 0.1 ms without it. Serve keeps its counts, limits and
health checks. `cluster/serve_app.py` decides when.
"""

from __future__ import annotations

from typing import Any

from ray.serve._private import replica


def environment(port: int) -> dict[str, str]:
    """What Serve's processes must find in their environment for the only ingress replica to listen on `port`."""
    return {
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(port + 1),
        "RAY_SERVE_PORT_QUARANTINE_S": "0",  # the replica that replaces one that died needs the same port
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",  # there is no load balancer that has to notice
    }


def reuse_address() -> None:
    """Called in the replica before it listens, so that a server can start again right after it was stopped.

    Serve binds a replica's port without SO_REUSEADDR, so connections that the last server closed would keep the port
    taken for a minute.
    """
    start = replica.start_asgi_http_server

    async def start_reusing(app: Any, options: Any, **arguments: Any) -> Any:
        return await start(app, options, **{**arguments, "enable_so_reuseport": True})

    replica.start_asgi_http_server = start_reusing  # type: ignore[assignment]
