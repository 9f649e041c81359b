"""`python -m tests.telemetry.pictures`: draws the dashboards in `docs/` from a Prometheus that scrapes two servers.

One generates: it has two engines, clients with keys, drafts and constraints, and under load one engine is killed. The
other one makes embeddings.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import httpx
import psutil

from benchmarks.processes import ROOT
from tests.patience import PATIENCE_S, wait_until
from tests.pooled_checkpoints import embedder
from tests.processes import running_below
from tests.server import Server
from tests.telemetry.alert_faults import ENGINE, Impossible, repeated
from tests.telemetry.panels import DASHBOARDS, Line, Span, draw, filled, legend
from tests.telemetry.prometheus import Prometheus

DOCS = ROOT / "docs"
SCRAPE_S = 2
RATE_INTERVAL = f"{4 * SCRAPE_S}s"
"""Range of a rate, by Grafana's rule: four scrapes."""
KEYS = {"ann": "ann:0123456789abcdef", "bob": "bob:fedcba9876543210"}
OF_POOLING = "pooling"
"""Name of the dashboard that shows a server of another model."""


class Watched(NamedTuple):
    """Two servers, one of a model that generates and one that pools, and the Prometheus that scrapes both."""

    server: Server
    pooling: Server
    prometheus: Prometheus

    def ask(self, client: str, **fields: Any) -> int:
        """Returns the status of a completion."""
        body = {"model": self.server.model, "prompt": [5, 9, 17] * 16, "ignore_eos": True, **fields}
        return _post(f"{self.server.url}/v1/completions", body, KEYS[client])

    def embed(self) -> int:
        body = {"model": self.pooling.model, "input": ["a b c", "d e"]}
        return _post(f"{self.pooling.url}/v1/embeddings", body)

    def lines(self, name: str, span: Span) -> dict[int, list[Line]]:
        """Returns what each panel of a dashboard shows of a range of time, by the panel's `id`."""
        model = (self.pooling if name == OF_POOLING else self.server).model
        found: dict[int, list[Line]] = {}
        for panel in DASHBOARDS[name]["panels"]:
            found[panel["id"]] = [
                Line(legend(target["legendFormat"], series["metric"]), _points(series["values"]))
                for target in panel["targets"]
                for series in self.prometheus.query_range(
                    filled(target["expr"], model, RATE_INTERVAL), span.begin, span.end, SCRAPE_S
                )
            ]
        return found


def _post(url: str, body: dict[str, Any], key: str = "") -> int:
    headers = {"Authorization": f"Bearer {key.partition(':')[2]}"} if key else {}
    return httpx.post(url, json=body, headers=headers, timeout=PATIENCE_S, trust_env=False).status_code


def _points(values: list[list[Any]]) -> list[tuple[float, float]]:
    return [(float(at), float(value)) for at, value in values]


@contextlib.contextmanager
def watched() -> Iterator[Watched]:
    """Raises `Impossible` without Prometheus."""
    if shutil.which("prometheus") is None:
        raise Impossible("prometheus is not installed (Debian: apt-get install prometheus)")
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "keys").write_text("\n".join(KEYS.values()))
        settings = ["num_engine_replicas=2", f"api_keys_file={folder / 'keys'}"]
        options = {"max_num_sequences": 8, "max_num_waiting": 24, "speculative.proposers": "[ngram]"}
        options |= {"speculative.ngram_min": 1, "speculative.adaptive": "false"}
        server = Server(*settings, *(f"engine.{name}={value}" for name, value in options.items()))
        stack.callback(server.stop)
        pooling = Server(folder=embedder("bert_mean"))
        stack.callback(pooling.stop)
        every = {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": f"{SCRAPE_S}s"}
        targets = [f"127.0.0.1:{each.port}" for each in (server, pooling)]
        job = {"job_name": "manta", "static_configs": [{"targets": targets}]}
        prometheus = Prometheus(folder, {"global": every, "scrape_configs": [job]})
        stack.callback(prometheus.stop)
        yield Watched(server, pooling, prometheus)


@contextlib.contextmanager
def loaded(world: Watched) -> Iterator[None]:
    """Both servers have clients meanwhile: short and long answers, constraints, embeddings, and mistakes."""
    numbers = itertools.count()
    url = world.server.url
    with contextlib.ExitStack() as stack:
        stack.enter_context(repeated(lambda: world.ask("ann", max_tokens=60), pause_s=0.2, times=2))
        stack.enter_context(repeated(lambda: world.ask("bob", max_tokens=400, stream=True), pause_s=0.2, times=6))
        stack.enter_context(
            repeated(
                lambda: world.ask(
                    "bob",
                    max_tokens=80,
                    ignore_eos=False,
                    structured_outputs={"regex": f"(ab|ba){{2,{20 + next(numbers) % 40}}}"},
                ),
                pause_s=0.3,
                times=2,
            )
        )
        stack.enter_context(repeated(world.embed, pause_s=0.3))
        stack.enter_context(repeated(lambda: httpx.get(f"{url}/nothing", trust_env=False), pause_s=2.0))
        stack.enter_context(repeated(lambda: world.ask("ann", max_tokens=2, service_tier="auto"), pause_s=2.0))
        yield


def show(world: Watched, seconds: float) -> Span:
    """Loads the servers for a while, in the middle of which an engine is killed. Returns the time that it took."""
    begin = time.time()
    with loaded(world):
        time.sleep(seconds / 2)
        with contextlib.suppress(psutil.NoSuchProcess):
            running_below(world.server.process.pid, ENGINE)[0].kill()
        time.sleep(seconds / 2)
        serving = f'manta:engines_serving{{model_name="{world.server.model}"}} == manta:engines_wanted'
        wait_until(lambda: bool(world.prometheus.query(serving)), poll_s=1.0)
    return Span(begin, time.time())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draws the dashboards from what a Prometheus scrapes of a server.")
    parser.add_argument("--seconds", type=float, default=90.0, help="how long the server is under load (default: 90)")
    parser.add_argument("--folder", type=pathlib.Path, default=DOCS, help="where the pictures go")
    options = parser.parse_args(arguments)
    try:
        with watched() as world:
            span = show(world, options.seconds)
            for name, dashboard in DASHBOARDS.items():
                path = options.folder / f"dashboard-{name}.svg"
                path.write_text(draw(dashboard, world.lines(name, span), span))
                print(f"written: {path}")
    except Impossible as error:
        print(f"pictures: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
