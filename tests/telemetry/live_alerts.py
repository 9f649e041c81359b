"""`make alerts`: which alerts fire and clear under real faults, and when. Prometheus scrapes a server whose engine is
killed or stopped, whose rank hangs, whose queue is full, or whose disk is.

The rules' windows are `SPEED` times shorter here than in `configs/prometheus/rules.yml`. The table goes to
`benchmarks/results/`; an alert that does not fire or clear in time is a row of it too.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import httpx
import psutil
import yaml

from benchmarks.processes import ROOT, free_port, interrupted_once
from benchmarks.report import machine
from tests.patience import PATIENCE_S, wait_until
from tests.processes import running_below
from tests.server import Server
from tests.telemetry.test_alerts import FILE

RESULTS = ROOT / "benchmarks" / "results"
SPEED = 6
SCRAPE_S = 2
LEAST_RANGE_S = 4 * SCRAPE_S
"""The shortest range over which a rate is taken: a few scrapes."""
UNIT_S = {"s": 1, "m": 60, "h": 3600}
DISK_BYTES = 128 * 1024
POLL_S = 0.5
"""Seconds between two looks at the alerts."""


def quick_rules() -> str:
    """The rules with shorter ranges and delays."""

    def shorter(least_s: float) -> Callable[[re.Match[str]], str]:
        return lambda found: f"{found[1]}{max(least_s, int(found[2]) * UNIT_S[found[3]] / SPEED):.0f}s"

    ranges = re.sub(r"(\[)(\d+)([smh])(?=\])", shorter(LEAST_RANGE_S), FILE.read_text())
    return re.sub(r"(?m)(^ *for: )(\d+)([smh])$", shorter(1), ranges)


class Prometheus:
    """Scrapes one server and evaluates the shorter rules."""

    def __init__(self, folder: pathlib.Path, target: int) -> None:
        (folder / "rules.yml").write_text(quick_rules())
        every = {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": f"{SCRAPE_S}s", "evaluation_interval": "1s"}
        job = {"job_name": "manta", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}
        configuration = {"global": every, "rule_files": ["rules.yml"], "scrape_configs": [job]}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
        command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
        self._process = subprocess.Popen(command)
        wait_until(self._is_ready, poll_s=0.1)

    def _is_ready(self) -> bool:
        assert self._process.poll() is None
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self._url}/-/ready", timeout=PATIENCE_S):
            return True
        return False

    def has(self, query: str) -> bool:
        """Returns whether a query finds any series."""
        url = f"{self._url}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
            return bool(json.load(response)["data"]["result"])

    def firing(self) -> set[str]:
        """Names of the alerts that fire."""
        with urllib.request.urlopen(f"{self._url}/api/v1/alerts", timeout=PATIENCE_S) as response:
            alerts = json.load(response)["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE_S)


class Impossible(Exception):
    """A fault that cannot be done on this machine; the message says why."""


class World(NamedTuple):
    server: Server
    prometheus: Prometheus
    disk: pathlib.Path | None
    """A file system of `DISK_BYTES`; None where nothing can be mounted."""

    def processes(self, title: str) -> list[psutil.Process]:
        return running_below(self.server.process.pid, title)

    def ask(self, **fields: Any) -> int:
        """Returns the status of a completion."""
        body = {"model": self.server.model, "prompt": [5, 9, 17], "ignore_eos": True, **fields}
        return httpx.post(
            f"{self.server.url}/v1/completions", json=body, timeout=PATIENCE_S, trust_env=False
        ).status_code

    def upload(self) -> int:
        """Returns the status of an upload that the disk has no room for."""
        return httpx.post(
            f"{self.server.url}/v1/files",
            files={"file": ("a.jsonl", b"x" * (2 * DISK_BYTES))},
            data={"purpose": "batch"},
            timeout=PATIENCE_S,
            trust_env=False,
        ).status_code


@contextlib.contextmanager
def repeated(act: Callable[[], object], pause_s: float = 0.1, times: int = 1) -> Iterator[None]:
    """Does something again and again in so many threads, whatever comes of it."""
    ended = threading.Event()

    def go_on() -> None:
        while not ended.wait(pause_s):
            with contextlib.suppress(httpx.HTTPError, psutil.Error):
                act()

    threads = [threading.Thread(target=go_on) for _ in range(times)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def kill(world: World) -> contextlib.AbstractContextManager[None]:
    return repeated(lambda: [each.kill() for each in world.processes("ray::ServeReplica:manta:engine")])


def stop_engine(world: World) -> contextlib.AbstractContextManager[None]:
    return repeated(lambda: [each.suspend() for each in world.processes("ray::ServeReplica:manta:engine")])


@contextlib.contextmanager
def hang_rank(world: World) -> Iterator[None]:
    """Stops the younger rank under streams, and again whenever the ranks that replace it have answered. Every stream
    ends well.
    """
    statuses: list[int] = []

    def stop_one() -> None:
        statuses.append(world.ask(max_tokens=2))  # waits for the ranks that replace a hanging one
        for rank in world.processes("ray::RankActor")[1:]:
            rank.suspend()

    with repeated(stop_one), repeated(lambda: statuses.append(world.ask(max_tokens=100)), times=2):
        yield
    assert set(statuses) == {200}


def fill_queue(world: World) -> contextlib.AbstractContextManager[None]:
    return repeated(lambda: world.ask(max_tokens=300), times=40)


def fill_disk(world: World) -> contextlib.AbstractContextManager[None]:
    if world.disk is None:
        raise Impossible("no file system can be mounted here")
    return repeated(world.upload)


FAULTS: dict[str, tuple[Callable[[World], contextlib.AbstractContextManager[None]], set[str]]] = {
    "the engine is killed again and again": (kill, {"MantaNoEngine", "MantaEngineMissing"}),
    "the engine is stopped": (stop_engine, {"MantaNoEngine", "MantaEngineMissing"}),
    "a rank hangs again and again": (hang_rank, {"MantaRanksRestart"}),
    "the queue is full": (fill_queue, {"MantaQueueNearlyFull", "MantaRefusesRequests"}),
    "the disk is full": (fill_disk, {"MantaErrorBudgetBurnsFast"}),
}


@contextlib.contextmanager
def served() -> Iterator[World]:
    """Yields a server under a little load, and Prometheus that watches it. Raises `Impossible` without Prometheus."""
    if shutil.which("prometheus") is None:
        raise Impossible("prometheus is not installed (Debian: apt-get install prometheus)")
    settings = ["tensor_parallel_size=2", "max_num_sequences=4", "max_num_waiting=10"]
    with tempfile.TemporaryDirectory() as folder, _small_disk() as (disk, is_small):
        server = Server(*(f"engine.{setting}" for setting in settings), f"batch_storage={disk}")
        prometheus = Prometheus(pathlib.Path(folder), server.port)
        world = World(server, prometheus, disk if is_small else None)
        try:
            with repeated(lambda: world.ask(max_tokens=2), pause_s=0.5):
                yield world
        finally:
            prometheus.stop()
            server.stop()


@contextlib.contextmanager
def _small_disk() -> Iterator[tuple[pathlib.Path, bool]]:
    """Yields a folder, and whether it is a file system of `DISK_BYTES`, which not everybody may mount."""
    with tempfile.TemporaryDirectory() as folder:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", folder]
        is_small = shutil.which("mount") is not None and subprocess.run(mount, capture_output=True).returncode == 0
        try:
            yield pathlib.Path(folder), is_small
        finally:
            if is_small:
                subprocess.run(["umount", folder], check=True)


# ---- what is seen --------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """An alert under a fault."""

    fault: str
    alert: str
    is_expected: bool
    fired_s: float | None
    """Seconds from the begin of the fault until it fired; None if it did not."""
    cleared_s: float | None
    """Seconds from the end of the fault until it did not fire any more; None if it still did."""

    @property
    def is_good(self) -> bool:
        return self.fired_s is not None and self.cleared_s is not None


def observe(name: str, world: World, patience_s: float = PATIENCE_S) -> list[Row]:
    """Does a fault until the alerts that it must raise fire, at most `patience_s`, and then waits as long until none
    fires. Returns a row for each alert that had to fire or did. Raises `Impossible` if the fault cannot be done.
    """
    begin, expected = FAULTS[name]
    wait_until(lambda: world.prometheus.has("manta:engines_serving == manta:engines_wanted"), poll_s=1.0)
    wait_until(lambda: not world.prometheus.firing(), poll_s=1.0)
    fired_s, cleared_s = dict[str, float](), dict[str, float]()
    begun = time.monotonic()
    with begin(world):
        while not expected <= fired_s.keys() and time.monotonic() < begun + patience_s:
            time.sleep(POLL_S)
            for alert in world.prometheus.firing():
                fired_s.setdefault(alert, time.monotonic() - begun)
    for process in [*world.processes("ray::ServeReplica:manta:engine"), *world.processes("ray::RankActor")]:
        with contextlib.suppress(psutil.Error):
            process.resume()
    ended = time.monotonic()
    while (firing := world.prometheus.firing()) or fired_s.keys() - cleared_s.keys():
        for alert in firing:  # another one may fire late, by what happened during the fault
            fired_s.setdefault(alert, time.monotonic() - begun)
            cleared_s.pop(alert, None)
        for alert in fired_s.keys() - firing:
            cleared_s.setdefault(alert, time.monotonic() - ended)
        if time.monotonic() > ended + patience_s:
            break
        time.sleep(POLL_S)
    return [
        Row(name, alert, alert in expected, fired_s.get(alert), cleared_s.get(alert))
        for alert in sorted(expected | fired_s.keys())
    ]


def table(rows: Sequence[Row], patience_s: float) -> str:
    """Returns the rows in Markdown."""
    late = f"not within {patience_s:.0f} s"

    def shown(seconds: float | None) -> str:
        return late if seconds is None else f"{seconds:.0f}"

    lines = [
        "| fault | alert | fires, s after the fault's begin | clears, s after its end |",
        "| --- | --- | ---: | ---: |",
    ]
    for row in rows:
        alert = row.alert if row.is_expected else f"{row.alert}, too"
        lines.append(f"| {row.fault} | {alert} | {shown(row.fired_s)} | {shown(row.cleared_s)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """1 where an alert that a fault must raise did not fire or did not clear."""
    parser = argparse.ArgumentParser(prog="make alerts", description="Which alerts fire and clear under faults.")
    parser.add_argument("--fault", action="append", choices=list(FAULTS), help="only this one; may be repeated")
    parser.add_argument("--patience", type=float, default=PATIENCE_S, help="seconds for which an alert is awaited")
    parser.add_argument("--folder", type=pathlib.Path, default=RESULTS, help="where the table goes")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    notes: list[str] = []
    try:
        with interrupted_once(), served() as world:
            for name in options.fault or FAULTS:
                try:
                    rows += observe(name, world, options.patience)
                except Impossible as error:
                    notes.append(f"- {name}: not tried, because {error}.")
                print(table(rows, options.patience), file=sys.stderr, flush=True)
    except Impossible as error:
        print(f"make alerts: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    today = datetime.date.today().isoformat()
    about = (
        f"The windows of the rules are {SPEED} times shorter here than in `configs/prometheus/rules.yml`. Prometheus "
        f"scrapes every {SCRAPE_S} s. Load at the end: {os.getloadavg()[1]:.1f}."
    )
    parts = [f"# {today}, alerts under faults", machine(), about, table(rows, options.patience), *notes]
    path = options.folder / f"alerts-{today}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(parts).rstrip() + "\n")
    print(f"{path.read_text()}\nwritten: {path}")
    return int(not all(row.is_good for row in rows if row.is_expected))


if __name__ == "__main__":
    sys.exit(main())
