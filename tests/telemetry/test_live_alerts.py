"""Alerts fire and clear under real faults: Prometheus scrapes a server whose engine is killed, stopped or overrun.

`make prove` writes the seconds down. The rules' windows are `SPEED` times shorter here than in `test_alerts.py`.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
import yaml

from benchmarks.processes import free_port
from tests.patience import PATIENCE_S, wait_until
from tests.processes import running_below
from tests.server import Server
from tests.telemetry.test_alerts import FILE, promtool

SPEED = 6
SCRAPE_S = 2
LEAST_RANGE_S = 4 * SCRAPE_S
"""The shortest range over which a rate is taken: a few scrapes."""
UNIT_S = {"s": 1, "m": 60, "h": 3600}
DISK_BYTES = 128 * 1024


def quick_rules() -> str:
    """The rules with shorter ranges and delays."""

    def shorter(least_s: float) -> Callable[[re.Match[str]], str]:
        return lambda found: f"{found[1]}{max(least_s, int(found[2]) * UNIT_S[found[3]] / SPEED):.0f}s"

    ranges = re.sub(r"(\[)(\d+)([smh])(?=\])", shorter(LEAST_RANGE_S), FILE.read_text())
    return re.sub(r"(?m)(^ *for: )(\d+)([smh])$", shorter(1), ranges)


def test_the_shorter_rules_are_rules(tmp_path: pathlib.Path) -> None:
    (tmp_path / "rules.yml").write_text(quick_rules())
    done = promtool("check", "rules", tmp_path / "rules.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[50s]" in quick_rules()
    assert "ratio_rate5m" in quick_rules()


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
        pytest.skip("no file system can be mounted here")
    return repeated(world.upload)


FAULTS: dict[str, tuple[Callable[[World], contextlib.AbstractContextManager[None]], set[str]]] = {
    "the engine is killed again and again": (kill, {"MantaNoEngine", "MantaEngineMissing"}),
    "the engine is stopped": (stop_engine, {"MantaNoEngine", "MantaEngineMissing"}),
    "a rank hangs again and again": (hang_rank, {"MantaRanksRestart"}),
    "the queue is full": (fill_queue, {"MantaQueueNearlyFull", "MantaRefusesRequests"}),
    "the disk is full": (fill_disk, {"MantaErrorBudgetBurnsFast"}),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed")
    disk = tmp_path_factory.mktemp("disk")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)]
    is_mounted = shutil.which("mount") is not None and subprocess.run(mount, capture_output=True).returncode == 0
    settings = ["tensor_parallel_size=2", "max_num_sequences=4", "max_num_waiting=10"]
    server = Server(*(f"engine.{setting}" for setting in settings), f"batch_storage={disk}")
    prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), server.port)
    made = World(server, prometheus, disk if is_mounted else None)
    with repeated(lambda: made.ask(max_tokens=2), pause_s=0.5):
        yield made
    prometheus.stop()
    server.stop()
    if is_mounted:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.prove
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FAULTS)
def test_alerts_fire_under_a_fault_and_clear_after_it(
    name: str, world: World, record_property: Callable[[str, object], None]
) -> None:
    begin, expected = FAULTS[name]
    wait_until(lambda: world.prometheus.has("manta:engines_serving == manta:engines_wanted"), poll_s=1.0)
    wait_until(lambda: not world.prometheus.firing(), poll_s=1.0)
    fired_s: dict[str, float] = {}

    def have_fired() -> bool:
        for alert in world.prometheus.firing():
            fired_s.setdefault(alert, time.monotonic() - begun)
        return expected <= fired_s.keys()

    begun = time.monotonic()
    with begin(world):
        wait_until(have_fired, poll_s=0.5)
    for process in [*world.processes("ray::ServeReplica:manta:engine"), *world.processes("ray::RankActor")]:
        with contextlib.suppress(psutil.Error):
            process.resume()
    ended, cleared_s = time.monotonic(), dict[str, float]()

    def have_cleared() -> bool:
        firing = world.prometheus.firing()
        for alert in fired_s.keys() - firing:
            cleared_s.setdefault(alert, time.monotonic() - ended)
        return not firing

    wait_until(have_cleared, poll_s=0.5)
    assert world.ask(max_tokens=2) == 200
    for alert, seconds in sorted(fired_s.items()):
        record_property(f"{alert}, s", f"{seconds:.0f}, cleared after {cleared_s.get(alert, 0):.0f}")
