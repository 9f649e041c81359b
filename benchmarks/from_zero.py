"""`manta bench from-zero`: how long a request waits that finds no engine process, because its model was unloaded.

A server of a folder with one model, alone on an own Ray. Each round asks for one token, unloads the model, and waits
until its process is gone. The first round packs weights and fills caches, which its engine gets time to keep, and is
printed by itself. The engine's phases are printed too, their medians and those of the longest wait. `rest` is what is
left of the wait: Serve's part, the request, and the ingress.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import psutil

from benchmarks.checkpoints import benchmark_checkpoint
from benchmarks.processes import ROOT, free_port
from benchmarks.report import machine
from manta.cluster.config import EngineConfig, ServeConfig
from manta.cluster.serve import app
from manta.cluster.serve.starting import warm_process

SHAPES: dict[str, Callable[[], pathlib.Path]] = {
    "demo": lambda: ROOT / "configs" / "demo" / "target",
    "qwen2.5-0.5b": lambda: benchmark_checkpoint("qwen2.5-0.5b"),
}
KV_CACHE_BYTES = 64 << 20
KEEP_S = 15.0
"""Seconds for which the first engine stays, so that it keeps its packed weights."""
PAUSE_S = 2.0
"""Seconds between a model's end and the next request."""
WARM_S = 20.0
"""Seconds for the warm process to import everything after the server's start."""
PATIENCE_S = 120.0


def measure(name: str, rounds: int) -> None:
    """Prints the seconds to the first token of one shape."""
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "model").symlink_to(SHAPES[name]())
        port = free_port()
        engine = EngineConfig(kv_cache_bytes=KV_CACHE_BYTES)
        started = time.perf_counter()
        try:
            app.start(ServeConfig(models_dir=folder, min_loaded_s=0.0, engine=engine, port=port))
            ready_s = time.perf_counter() - started
            time.sleep(WARM_S)
            url = f"http://127.0.0.1:{port}"
            first = _round(url, KEEP_S).seconds
            found = [_round(url) for _ in range(rounds)]
            seconds = [each.seconds for each in found]
            print(
                f"{name:14}first token, {rounds} times: p50 {statistics.median(seconds):.2f} s, "
                f"longest {max(seconds):.2f} s; the first time {first:.2f} s; the server was ready after "
                f"{ready_s:.2f} s; warm process {_warm_bytes() / 2**20:.0f} MiB (PSS)"
            )
            print(f"{name:14}p50 of phases: {_told(_medians(found))}")
            print(f"{name:14}phases of the longest: {_told(max(found, key=lambda each: each.seconds).phases)}")
        finally:
            app.stop()


class Round(NamedTuple):
    seconds: float
    """Seconds to the first token."""
    phases: dict[str, float]
    """Seconds of the engine's start by phase, and the rest."""


def _round(url: str, stays_s: float = 0.0) -> Round:
    body = {"model": "model", "prompt": [5, 9, 17], "max_tokens": 1}
    started = time.perf_counter()
    _ask(f"{url}/v1/completions", body)
    seconds = time.perf_counter() - started
    while not (engines := json.loads(_ask(f"{url}/status"))["engines"]):  # it did not answer in time
        time.sleep(0.1)
    phases: dict[str, float] = engines[0]["start_seconds"]
    time.sleep(stays_s)
    _ask(f"{url}/models/unload", {"model": "model"})
    deadline = time.monotonic() + PATIENCE_S
    while _engines() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(PAUSE_S)
    return Round(seconds, {**phases, "rest": seconds - sum(phases.values())})


def _medians(found: Sequence[Round]) -> dict[str, float]:
    """Returns the median seconds of each phase."""
    return {name: statistics.median(each.phases[name] for each in found) for name in found[0].phases}


def _told(phases: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items())


def _ask(url: str, body: dict[str, Any] | None = None) -> bytes:
    """Returns the answer to a POST request with this body, or to a GET request without one."""
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=PATIENCE_S) as answer:
        found: bytes = answer.read()
    return found


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _engines() -> list[psutil.Process]:
    """Returns the processes of the model's engines."""
    return [each for each in psutil.process_iter() if any("model:engine" in word for word in _words(each))]


def _warm_bytes() -> int:
    """Returns the memory of the warm process: pages that k processes share count as 1/k."""
    found = [each for each in psutil.process_iter() if warm_process.WARM in _words(each)]
    return sum(int(each.memory_full_info().pss) for each in found)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="manta bench from-zero", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"of {', '.join(SHAPES)} (default: all)")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args(arguments)
    names = options.shapes.split(",")
    if unknown := [name for name in names if name not in SHAPES]:
        parser.error(f"--shapes {unknown[0]}: use some of {', '.join(SHAPES)}")
    print(machine(), file=sys.stderr)
    for name in names:
        measure(name, options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
