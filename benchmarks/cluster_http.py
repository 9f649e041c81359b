"""`manta bench cluster-http`: HTTP on a cluster.

The same requests go in turns to `LLM.generate` and to one server for each way from a connection to an engine:

    own Ray       `manta serve` on a Ray of its own: its ingress listens
    joined        on a running cluster: an ingress on each node listens
    2 ingresses   the same, two at one port
    proxy         the same cluster, through Serve's proxies (`http_server: proxy`)
    HAProxy       through Serve's HAProxy, which connects to the ingress directly
    TLS           as own Ray, over HTTPS

The clusters run here and start as a person would start them (`ray start --head`). Only their workers' niceness differs,
because the clients run here too and would come before the engines. A ratio is to own Ray in the same round, or with
`--peer-checkout` to the same way with the code of that checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import pathlib
import shutil
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import psutil

from benchmarks.checkpoints import benchmark_checkpoint
from benchmarks.http_load import run_load
from benchmarks.processes import (
    PEER,
    Child,
    EngineProcess,
    ServerProcess,
    Setup,
    checkout_of,
    environment_of,
    free_port,
    interrupted_once,
)
from benchmarks.report import machine, markdown_head, markdown_row, ratio_of
from benchmarks.workloads import Prompts, PromptSource, alternate
from manta.workers.model_options import DEMO_MODEL

STREAMS = (1, 16, 64, 256)
PROMPT = 32
BAR = 0.95
"""Least ratio of the joined cluster's events a second to own Ray's."""
PEER_BAR = 0.98
"""Least ratio of a way's events a second to those of the same way with another commit's code."""
OWN, JOINED, OFFLINE = "own Ray", "joined", "LLM.generate"
START_S = 60.0
SETTLE_S = 1.0
"""Seconds after a server's rest, in which Ray and Serve do what they have deferred."""

RATIO = "over own Ray"
COLUMNS = (
    "model",
    "streams",
    "way",
    "events/s",
    RATIO,
    "95% interval",
    "inter-token p50, ms",
    "TTFT p50, ms",
    "client, cores",
)

HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
"""HAProxy's switches, as in Ray's documentation."""


class Way(NamedTuple):
    """Of connections to an engine."""

    joins: bool
    options: Mapping[str, Any] = {}
    environment: dict[str, str] = {}
    is_secured: bool = False


WAYS = {
    OWN: Way(joins=False),
    JOINED: Way(joins=True),
    "2 ingresses": Way(joins=True, options={"num_ingress_replicas": 2}),
    "proxy": Way(joins=True, options={"http_server": "proxy"}),
    "HAProxy": Way(joins=True, options={"http_server": "proxy"}, environment=HAPROXY),
    "TLS": Way(joins=False, is_secured=True),
}
ALL_WAYS = (*WAYS, OFFLINE)


class Figures(NamedTuple):
    """Of one turn."""

    events_per_s: float
    gap_p50_s: float
    """Not a number if every reply came in one event."""
    ttft_p50_s: float
    client_cores: float


class Head(Child):
    """A cluster of one node, which runs the code of `checkout`."""

    def __init__(self, environment: dict[str, str], checkout: pathlib.Path) -> None:
        self.engine = "ray start"
        # Ray's sockets lie in its folder, and their paths may have 107 bytes.
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        command = [str(pathlib.Path(sys.executable).parent / "ray"), "start", "--head", "--block", f"--port={port}"]
        command += [f"--ray-client-server-port={free_port()}", "--include-dashboard=false"]
        super().__init__([*command, f"--temp-dir={self._folder}"], environment, checkout)
        self.wait_until_printed("Ray runtime started", START_S)

    def stop(self) -> None:
        """Not politely: told to end, Serve starts its HAProxy once more, which nobody ends then."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        super().stop()
        shutil.rmtree(self._folder, ignore_errors=True)


class Server(ServerProcess):
    """`manta serve`, and the cluster that it joins if it joins one. `engine` is "manta" or `PEER`."""

    def __init__(self, name: str, model: str, setup: Setup, engine: str = "manta") -> None:
        self.way, way = _label(name, engine), WAYS[name]
        self._head: Head | None = None
        environment = {"RAY_worker_niceness": "0", "RAY_ADDRESS": "", **way.environment}
        if way.joins:
            self._head = Head({**environment_of(engine, setup), **environment}, checkout_of(engine, setup))
            environment["RAY_ADDRESS"] = self._head.address
        setup = msgspec.structs.replace(setup, environment=environment)
        options = dict(way.options)
        if way.is_secured:
            self._folder = tempfile.TemporaryDirectory()
            certificate, key = make_certificate(pathlib.Path(self._folder.name))
            options |= {"tls_certificate": str(certificate), "tls_key": str(key)}
            self.tls = ssl.create_default_context(cafile=certificate)
        super().__init__(engine, model, setup, free_port(), options)
        # An ingress answers before `manta serve` has asked all that it asks; paused in between, that would fail.
        self.wait_until_printed("Ctrl-C stops it.", START_S)

    def processes(self) -> list[psutil.Process]:
        return super().processes() + (self._head.processes() if self._head is not None else [])

    def stop(self) -> None:
        head, self._head = self._head, None  # what starts there until the application has gone must end too
        super().stop()
        if head is not None:
            head.stop()

    def turn(self, prompts: Prompts, num_tokens: int) -> Figures:
        self.wait_until_healthy()  # HAProxy sends nothing to an ingress that was paused until it has answered again
        time.sleep(SETTLE_S)
        load = run_load(self.port, self.model_name, prompts, num_tokens, len(prompts), self.tls)
        num_events = len(load.ttft) + len(load.gaps)
        gap = statistics.median(load.gaps) if load.gaps else math.nan
        return Figures(num_events / load.seconds, gap, statistics.median(load.ttft), load.generator_cores)


def make_certificate(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Makes a certificate of 127.0.0.1 that signs itself, and its key, by the program `openssl`."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-out", str(certificate)]
    subprocess.run([*command, "-keyout", str(key)], check=True, capture_output=True)
    return certificate, key


class Offline(EngineProcess):
    """Without HTTP: each token of a step counts as an event."""

    def __init__(self, name: str, model: str, setup: Setup, engine: str = "manta") -> None:
        self.way = _label(name, engine)
        super().__init__(engine, model, setup)

    def turn(self, prompts: Prompts, num_tokens: int) -> Figures:
        timing = self.generate(prompts, num_tokens)
        moments = [moment for moment, _ in timing.steps]
        gaps = [after - before for before, after in itertools.pairwise(moments)]
        return Figures(timing.num_tokens / timing.seconds, statistics.median(gaps), moments[0], 0.0)


def http(
    num_starts: int,
    num_rounds: int,
    num_tokens: int,
    streams: Sequence[int],
    ways: Sequence[str],
    peer_checkout: str | None = None,
) -> None:
    """Prints a row for each model, number of streams and way; `num_tokens` for each stream a round, and `num_rounds`
    after each of `num_starts`.

    Own Ray is always one of the ways, except with a `peer_checkout`; then each way runs with both checkouts.
    """
    markdown_head(*(f"over {PEER}" if column == RATIO and peer_checkout else column for column in COLUMNS))
    setup = Setup(kv_cache_bytes=1 << 28, max_model_len=1024, peer_checkout=peer_checkout)
    if peer_checkout is None:
        bases = dict.fromkeys([OWN, *ways], OWN)
    else:
        bases = {way: _label(way, PEER) for way in ways} | {_label(way, PEER): _label(way, PEER) for way in ways}
    for name, model, token_limit in (
        ("tiny", str(benchmark_checkpoint("tiny-llama")), 30_000),
        (DEMO_MODEL, DEMO_MODEL, 2_000),
    ):
        prompts = PromptSource(token_limit)
        measured: dict[tuple[int, str], list[Figures]] = {(count, way): [] for count in streams for way in bases}
        for start in range(num_starts):
            with interrupted_once(), contextlib.ExitStack() as stack:
                children = _children(model, [*bases][::-1] if start % 2 else [*bases], setup, stack)
                for count in streams:
                    print(f"{name}, start {start + 1} of {num_starts}, {count} streams:", file=sys.stderr, end=" ")
                    for way, rounds in _turns(children, prompts, count, num_rounds, num_tokens).items():
                        measured[count, way] += rounds
                    if start + 1 == num_starts:
                        for way, base in bases.items():
                            bar = _bar(way, base)
                            _print_row(name, count, way, measured[count, way], measured[count, base], bar)


def _bar(way: str, base: str) -> float | None:
    if base == OWN:
        return BAR if way == JOINED else None
    return PEER_BAR if way != base else None


def _label(way: str, engine: str) -> str:
    return f"{way}, {PEER}" if engine == PEER else way


def _children(model: str, labels: Sequence[str], setup: Setup, stack: contextlib.ExitStack) -> list[Server | Offline]:
    children: list[Server | Offline] = []
    for label in labels:
        way = label.removesuffix(f", {PEER}")
        engine = "manta" if way == label else PEER
        make = Server if way in WAYS else Offline
        children.append(make(way, model, setup, engine))
        stack.callback(children[-1].stop)
        children[-1].rest()  # so that the next one starts in peace
    return children


def _turns(
    children: list[Server | Offline], prompts: PromptSource, num_streams: int, num_rounds: int, num_tokens: int
) -> dict[str, list[Figures]]:
    def run(child: Server | Offline, block: Prompts) -> Figures:
        return child.turn(block, num_tokens)

    def hear(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    turns = alternate(children, num_rounds, lambda: [prompts(num_streams, PROMPT)], run, hear)
    return {child.way: [figures for (figures,) in rounds] for child, rounds in zip(children, turns, strict=True)}


def _print_row(
    model: str, num_streams: int, way: str, rounds: list[Figures], base: list[Figures], bar: float | None
) -> None:
    events, gap, ttft, cores = map(statistics.median, zip(*rounds, strict=True))
    ratio = ratio_of([each.events_per_s for each in rounds], [each.events_per_s for each in base])
    verdict = "" if bar is None else f" (bar {bar} {'met' if ratio.median >= bar else 'not met'})"
    cells = [f"{events:,.0f}", f"{ratio.median:.3f}{verdict}", f"{ratio.low:.3f} to {ratio.high:.3f}"]
    cells += [f"{gap * 1e3:.2f}", f"{ttft * 1e3:.1f}", f"{cores:.2f}"]
    markdown_row(model, num_streams, way, *cells)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="manta bench cluster-http", description="HTTP on a cluster.")
    parser.add_argument("--starts", type=int, default=3, help="times that all servers start anew (default: 3)")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each server after a start (default: 10)")
    parser.add_argument("--tokens", type=int, default=100, help="of each stream (default: 100)")
    parser.add_argument("--streams", default=",".join(map(str, STREAMS)), help="how many at a time")
    parser.add_argument("--ways", default=",".join(ALL_WAYS), help="some of these, compared with own Ray")
    parser.add_argument("--peer-checkout", metavar="PATH", help="compare each way with another commit's checkout")
    options = parser.parse_args(arguments)
    for way in options.ways.split(","):
        if way not in ALL_WAYS:
            parser.error(f"--ways {way}: use some of {', '.join(ALL_WAYS)}")
    print(machine(), file=sys.stderr)
    streams = [int(count) for count in options.streams.split(",")]
    http(options.starts, options.rounds, options.tokens, streams, options.ways.split(","), options.peer_checkout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
