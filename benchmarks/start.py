"""`manta bench start`: the phases of `manta serve`, from the command to the first answer.

    imports       Python, and the command's imports and checks, until Ray's first process begins
    Ray           until the process of Serve's controller begins
    Serve         until the engine's process begins
    process       until the command is ready, less the model: the engine's Python, Ray's worker and torch, and Serve's
                  report that it is healthy
    model         making the engine, loading the model and warming up
    first answer  one token of a completion

Each start is a new process. The first start of each checkout warms the files and is not counted; after it, the two
checkouts take turns. Times come from the system's start times of processes (in hundredths of a second), the engine's
phases in `/status`, and the command's ready line, so older commits are measured the same way. The engine's first phase
is not used, because older commits misstate it by up to a second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import statistics
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import NamedTuple

import psutil

from benchmarks.processes import ROOT, BenchmarkError, Child, free_port
from benchmarks.report import machine, markdown_head, markdown_row, ratio_of, say_failure
from manta.workers.model_options import DEMO_MODEL

HERE, PEER = "here", "peer"
PHASES = ("imports", "Ray", "Serve", "process", "model", "first answer")
AROUND_THE_MODEL = ("process", "imports", "first_health")
"""Phases in `/status` that do not belong to the model."""
FIRST_OF_RAY, CONTROLLER, ENGINE = "gcs_server", "ray::ServeController", "ray::ServeReplica:manta:engine"
READY = "Ctrl-C stops it."


class Start(NamedTuple):
    """Seconds of each of `PHASES`."""

    seconds: tuple[float, ...]

    @property
    def together(self) -> float:
        return sum(self.seconds)


class Serving(Child):
    """`manta serve` of a checkout, ready when constructed."""

    uses_pipe = True

    def __init__(self, checkout: pathlib.Path, model: str, port: int) -> None:
        self.engine, self.port = "manta serve", port
        command = [sys.executable, "-m", "manta.cluster.cli", "serve", "--model", model, "--port", str(port)]
        command += ["--set", "served_model_name=bench"]
        environment = {"PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        super().__init__(command, environment, checkout)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if READY in line:
                break
        else:
            raise self.fail(f"manta serve of {checkout} did not start")
        self.ready_s = time.perf_counter() - self.started

    def stop(self) -> None:
        self.process.terminate()
        super().stop()

    def start(self) -> Start:
        """Raises `BenchmarkError` if a process is not found by its name."""
        answered_s = self._first_answer()
        (engine,) = self._ask("/status")["engines"]
        of_engine: dict[str, float] = engine["start_seconds"]
        ray, controller, engine_process = self._seconds_of(FIRST_OF_RAY, CONTROLLER, ENGINE)
        model = sum(seconds for name, seconds in of_engine.items() if name not in AROUND_THE_MODEL)
        process = self.ready_s - engine_process - model
        return Start((ray, controller - ray, engine_process - controller, process, model, answered_s))

    def _first_answer(self) -> float:
        started = time.perf_counter()
        self._ask("/v1/completions", {"model": "bench", "prompt": "Hi", "max_tokens": 1})
        return time.perf_counter() - started

    def _ask(self, path: str, body: object = None) -> dict:
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", content, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as response:
                return json.load(response)
        except (urllib.error.URLError, OSError) as error:
            raise self.fail(f"{path} was not answered: {error}") from error

    def _seconds_of(self, *names: str) -> list[float]:
        """When the first process with each name began, in seconds after the command."""
        began: dict[str, float] = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                title = process.cmdline()[0]
                name = next((name for name in names if title.startswith(name) or title.endswith(name)), "")
                began[name] = min(began.get(name, float("inf")), process.create_time())
        missing = [name for name in names if name not in began]
        if missing:
            raise self.fail(f"there is no process {missing[0]} below manta serve")
        begun = psutil.Process(self.process.pid).create_time()
        return [began[name] - begun for name in names]


def measure(checkouts: dict[str, pathlib.Path], model: str, num_starts: int) -> dict[str, list[Start]]:
    """The starts of each checkout in turns; prints a row for each as it comes."""
    found: dict[str, list[Start]] = {name: [] for name in checkouts}
    for number in range(num_starts + 1):
        for name in sorted(checkouts, reverse=bool(number % 2)):
            if number == 0:
                print(f"warming the files of {name} by a start that is not counted", file=sys.stderr, flush=True)
            serving = Serving(checkouts[name], model, free_port())
            try:
                start = serving.start()
            finally:
                serving.stop()
            if number > 0:
                found[name].append(start)
                markdown_row(name, number, *(f"{seconds:.2f}" for seconds in (*start.seconds, start.together)))
    return found


def _print_medians(found: dict[str, list[Start]]) -> None:
    """The median of each phase and of the whole, and with a peer the ratios of the two."""
    columns = {
        name: list(zip(*((*each.seconds, each.together) for each in starts), strict=True))
        for name, starts in found.items()
    }
    for name, phases in columns.items():
        markdown_row(name, "median", *(f"{statistics.median(phase):.2f}" for phase in phases))
    if PEER not in found:
        return
    ratios = [ratio_of(peer, here) for here, peer in zip(columns[HERE], columns[PEER], strict=True)]
    markdown_row("peer over here", "median", *(f"{ratio.median:.3f}" for ratio in ratios))
    print(f"\ntogether, peer over here: {ratios[-1]}; above 1, this checkout starts sooner")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="manta bench start", description="What the seconds of `manta serve` go to, as medians of several starts."
    )
    parser.add_argument("--starts", type=int, default=7, metavar="N", help="of each checkout that count (default: 7)")
    parser.add_argument("--model", default=DEMO_MODEL, help=f"a folder, or a hub id (default: {DEMO_MODEL})")
    parser.add_argument("--peer-checkout", metavar="PATH", help="another commit's checkout, to compare with")
    options = parser.parse_args(arguments)
    if options.starts < 1:
        parser.error(f"--starts {options.starts} is less than 1")
    checkouts = {HERE: ROOT}
    if options.peer_checkout:
        checkouts[PEER] = pathlib.Path(options.peer_checkout).expanduser().resolve()
        if not (checkouts[PEER] / "cluster" / "cli").is_dir():
            parser.error(f"--peer-checkout {checkouts[PEER]} has no cluster/cli; give the root of a checkout")
    print(machine(), file=sys.stderr)
    markdown_head("checkout", "start", *(f"{name}, s" for name in (*PHASES, "together")))
    try:
        _print_medians(measure(checkouts, options.model, options.starts))
    except BenchmarkError as error:
        say_failure(f"manta bench start: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
