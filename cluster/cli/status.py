"""`manta status`: what a running server reports of its engines, its deployments and its nodes.

The command calls `GET /status` of the endpoint, which needs no key; `--json` prints the answer as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import msgspec
from msgspec import UNSET

from manta.cluster.cli.refusal import Refusal
from manta.cluster.cli.server import connect, no_server
from manta.cluster.http.endpoints.status import EngineState, ModelState, Status
from manta.cluster.http.exchange.state import DeploymentState, NodeState
from manta.structured.visible_text import pass_on, say_lines, visible

ANSWER_S = 10.0
"""Seconds to wait for the answer; the server itself waits 2 s for engines and Serve."""
ENGINES = ("engine", "node", "state", "running", "waiting", "KV", "cache hits", "first token", "requests/s", "start")
MAX_CELL = 500
"""Most characters of one text of the status."""
NUM_PHASES = 3
"""Number of phases of a start that are shown, longest first."""


def run_status(url: str, as_json: bool) -> int:
    """Prints the status. Raises `Refusal` if no server answers, or if the answer is not from Manta."""
    client, base = connect(url, read_timeout_s=ANSWER_S)
    with client:
        status, text = read_status(client, base)
    if as_json:
        pass_on(f"{text}\n")
    else:
        say_lines(lines(status, base))
    return 0


def read_status(client: httpx.Client, base: str) -> tuple[Status, str]:
    """Returns the status with all texts in their visible form, and the answer as it came. Raises `Refusal` if no server
    answers, or if the answer is not from Manta.
    """
    try:
        response = client.get("/status")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise no_server(base, error) from error
    try:
        status = msgspec.json.decode(response.content, type=Status)
        return msgspec.convert(_visible(msgspec.to_builtins(status)), Status), response.text
    except msgspec.DecodeError as error:
        raise Refusal(
            f"what answers at {base} (HTTP {response.status_code}) is no Manta that knows /status; say with --url "
            "where it listens"
        ) from error


def _visible(data: Any) -> Any:
    """Returns decoded JSON with every text in its visible form, so that columns are as wide as a terminal shows
    them.
    """
    match data:
        case str():
            return visible(data, MAX_CELL)
        case list() | tuple():
            return [_visible(each) for each in data]
        case dict():
            return {_visible(name): _visible(value) for name, value in data.items()}
    return data


def lines(status: Status, base: str) -> Iterator[str]:
    """Yields the status as readable lines."""
    yield f"Manta {status.version} at {base}, for {duration(status.uptime_s)}"
    if status.num_held:
        yield f"{status.num_held} requests wait here for an engine to start"
    yield ""
    if (trouble := engine_trouble(status)) is not None:
        yield trouble
    elif not status.engines:
        yield "No engine runs; a request starts one."
    if status.engines:
        yield from table([ENGINES, *map(engine_row, status.engines)])
    if status.models is not UNSET:
        yield ""
        yield from table([("model", "state", "also called"), *map(_model, status.models)])
        yield from (f"{each.name}: {each.reason}" for each in status.models if each.reason)
    if status.cluster_age_s:
        yield ""
        yield f"Serve has told nothing for {duration(status.cluster_age_s)}. It told before:"
    if status.deployments:
        yield ""
        yield from table([("deployment", "status", "replicas"), *map(_deployment, status.deployments)])
        yield from (f"{each.name}: {each.note}" for each in status.deployments if each.note)
    if status.nodes:
        yield ""
        yield from table([("node", "", "resources"), *map(_node, status.nodes)])


def engine_trouble(status: Status) -> str | None:
    """Returns a sentence if the engines of a status are not those of now, else None."""
    if status.problem is not None:
        text = f"The engines do not answer: {status.problem}"
    elif status.engines_age_s:
        text = f"The engines have not answered for {duration(status.engines_age_s)}."
    else:
        return None
    return f"{text.rstrip('.')}. As they were {duration(status.engines_age_s)} ago:" if status.engines else text


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def engine_row(engine: EngineState) -> tuple[str, ...]:
    """Returns a cell for each column of `ENGINES`."""
    return (
        engine.replica if engine.model is UNSET else f"{engine.model}: {engine.replica}",
        engine.node,
        engine.state,
        str(engine.num_running),
        f"{engine.num_waiting} ({engine.waiting_tokens} tokens)" if engine.waiting_tokens else str(engine.num_waiting),
        f"{engine.kv_usage:.0%}",
        "-" if engine.cache_hit_rate is None else f"{engine.cache_hit_rate:.0%}",
        f"{engine.ttft_s:.2f} s" if engine.ttft_s else "-",
        f"{engine.requests_per_s:.1f}",
        _start(engine.start_seconds),
    )


def _start(seconds: dict[str, float]) -> str:
    longest = sorted(seconds.items(), key=lambda each: -each[1])[:NUM_PHASES]
    return f"{sum(seconds.values()):.1f} s ({', '.join(f'{name} {each:.1f}' for name, each in longest)})"


def _model(model: ModelState) -> tuple[str, ...]:
    return model.name, model.state, ", ".join(model.aliases)


def _deployment(deployment: DeploymentState) -> tuple[str, ...]:
    replicas = ", ".join(f"{number} {state.lower()}" for state, number in deployment.replicas.items())
    return deployment.name, _state(deployment), replicas or "none"


def _state(deployment: DeploymentState) -> str:
    """Returns Serve's status in words. Serve calls a deployment unhealthy as soon as one of its replicas is."""
    num_running = deployment.replicas.get("RUNNING", 0)
    if deployment.status == "UNHEALTHY" and num_running and deployment.num_wanted is not None:
        return f"degraded, {num_running} of {deployment.num_wanted}"
    return deployment.status.lower()


def _node(node: NodeState) -> tuple[str, ...]:
    resources = (
        f"{amount / 2**30:.1f} GiB memory" if name == "memory" else f"{amount:g} {name}"
        for name, amount in sorted(node.resources.items())
    )
    return node.address, "alive" if node.alive else "gone", ", ".join(resources)


def duration(seconds: float) -> str:
    """Returns for example `1 h 5 min`, `5 min 3 s` or `3 s`."""
    minutes = int(seconds) // 60
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {int(seconds) % 60} s" if minutes else f"{seconds:.0f} s"
