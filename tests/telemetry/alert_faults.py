"""What is done to a live server so that its alerts fire, and the server with the Prometheus that watches it.

The rules' windows are `SPEED` times shorter here than in `configs/prometheus/rules.yml`.
"""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import psutil

from tests.patience import PATIENCE_S
from tests.processes import running_below
from tests.server import Server
from tests.small_disk import small_disk
from tests.telemetry.prometheus import Prometheus
from tests.telemetry.test_alerts import FILE

SPEED = 20
"""Factor by which every range and delay of the rules is divided, so that all faults together take minutes."""
SCRAPE_S = 2
LEAST_RANGE_S = 4 * SCRAPE_S
"""Shortest range over which a rate is taken: a few scrapes."""
UNIT_S = {"s": 1, "m": 60, "h": 3600}
DISK_BYTES = 128 * 1024
HEALTH_BOUND_S = 5
"""Seconds without progress that the server takes for a standstill: less than a hanging rank costs."""
ENGINE, INGRESS = "ray::ServeReplica:manta:engine", "ray::ServeReplica:manta:ingress"
RANK, GRAMMAR_ACTOR = "ray::RankActor", "ray::GrammarActor"
COMPILER = "manta.structured.compiling.compile_process"
"""Beginnings of the processes' titles, and a word of the command of compile processes."""
KNOWN_STEPS = 100
"""Steps of restarted ranks before one hangs again. The deadline of a step follows the last 64 ones, so that a slow
first step makes it no longer.
"""


def quick_rules() -> str:
    """The rules with shorter ranges and delays."""

    def shorter(least_s: float) -> Callable[[re.Match[str]], str]:
        return lambda found: f"{found[1]}{max(least_s, int(found[2]) * UNIT_S[found[3]] / SPEED):.0f}s"

    ranges = re.sub(r"(\[)(\d+)([smh])(?=\])", shorter(LEAST_RANGE_S), FILE.read_text())
    return re.sub(r"(?m)(^ *for: )(\d+)([smh])$", shorter(1), ranges)


class Impossible(Exception):
    """A fault that cannot be done on this machine; the message says why."""


class StreamsLost(Exception):
    """A fault broke what it must not break; the message says what."""


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
        return self._post("completions", json=body)

    def ask_with_a_constraint(self, regex: str) -> int:
        """Returns the status of a completion that a regular expression holds."""
        return self.ask(max_tokens=8, ignore_eos=False, structured_outputs={"regex": regex})

    def upload(self) -> int:
        """Returns the status of an upload that the disk has no room for."""
        return self._post("files", files={"file": ("a.jsonl", b"x" * (2 * DISK_BYTES))}, data={"purpose": "batch"})

    def _post(self, path: str, **options: Any) -> int:
        url = f"{self.server.url}/v1/{path}"
        return httpx.post(url, timeout=PATIENCE_S, trust_env=False, **options).status_code

    def is_well(self) -> bool:
        """Whether every engine serves, as Prometheus knows it."""
        return bool(self.prometheus.query("manta:engines_serving == manta:engines_wanted"))

    def resume(self) -> None:
        """Lets every process go on that a fault has stopped."""
        for title in (ENGINE, INGRESS, RANK):
            for process in self.processes(title):
                with contextlib.suppress(psutil.Error):
                    process.resume()


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


# ---- the faults ----------------------------------------------------------------------------------------------------


def check(statuses: list[int]) -> None:
    """Raises `StreamsLost` unless every stream has ended well."""
    if lost := sorted({*statuses} - {200}):
        raise StreamsLost(f"streams ended with {', '.join(map(str, lost))}")


def kill_engine(world: World) -> contextlib.AbstractContextManager[None]:
    return repeated(lambda: [each.kill() for each in world.processes(ENGINE)])


def stop_engine(world: World) -> contextlib.AbstractContextManager[None]:
    return repeated(lambda: [each.suspend() for each in world.processes(ENGINE)])


@contextlib.contextmanager
def stop_ingress(world: World) -> Iterator[None]:
    """Requests wait in its socket meanwhile."""
    for process in world.processes(INGRESS):
        process.suspend()
    try:
        yield
    finally:
        world.resume()


@contextlib.contextmanager
def hang_rank(world: World) -> Iterator[None]:
    """Stops the younger rank under streams, and again whenever the ranks that replace it have worked. Every stream ends
    well.
    """
    statuses: list[int] = []

    def stop_one() -> None:
        statuses.append(world.ask(max_tokens=KNOWN_STEPS))  # waits for the ranks that replace a hanging one
        for rank in world.processes(RANK)[1:]:
            rank.suspend()

    with repeated(stop_one), repeated(lambda: statuses.append(world.ask(max_tokens=100)), times=2):
        yield
    check(statuses)


def fill_queue(world: World) -> contextlib.AbstractContextManager[None]:
    return repeated(lambda: world.ask(max_tokens=300), pause_s=0.3, times=40)


@contextlib.contextmanager
def kill_grammar_actors(world: World) -> Iterator[None]:
    """Kills the worker of streams with constraints, and again whenever a new one has worked. Every stream ends well."""
    statuses: list[int] = []

    def kill_one() -> None:
        statuses.append(world.ask_with_a_constraint("(ab|ba){2,4}"))
        for actor in world.processes(GRAMMAR_ACTOR)[:1]:
            actor.kill()

    with repeated(kill_one):
        yield
    check(statuses)


@contextlib.contextmanager
def kill_compilers(world: World) -> Iterator[None]:
    """Kills compile processes while they start, and asks for constraints that nobody has compiled yet."""
    numbers = itertools.count(1)
    with (
        repeated(lambda: [each.kill() for each in world.processes(COMPILER)]),
        repeated(lambda: world.ask_with_a_constraint(f"(ab){{1,{next(numbers)}}}c"), times=4),
    ):
        yield


def fill_disk(world: World) -> contextlib.AbstractContextManager[None]:
    if world.disk is None:
        raise Impossible("no file system can be mounted here")
    return repeated(world.upload)


class Fault(NamedTuple):
    """What is done, until the context ends, and the alerts that it must raise."""

    begin: Callable[[World], contextlib.AbstractContextManager[None]]
    expected: set[str]


FAULTS = {
    "the engine is killed again and again": Fault(kill_engine, {"MantaNoEngine", "MantaEngineMissing"}),
    "the engine is stopped": Fault(stop_engine, {"MantaNoEngine", "MantaEngineMissing"}),
    "the ingress is stopped": Fault(stop_ingress, {"MantaDown"}),
    "a rank hangs again and again": Fault(hang_rank, {"MantaRanksRestart", "MantaNoProgress"}),
    "the queue is full": Fault(fill_queue, {"MantaQueueNearlyFull", "MantaRefusesRequests"}),
    "grammar actors are killed again and again": Fault(kill_grammar_actors, {"MantaGrammarTimeouts"}),
    "compile processes are killed as they start": Fault(kill_compilers, {"MantaNoGrammarCompiler"}),
    "the disk is full": Fault(fill_disk, {"MantaErrorBudgetBurnsFast"}),
}


# ---- the server ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def served() -> Iterator[World]:
    """Yields a server under a little load, and Prometheus that watches it. Raises `Impossible` without Prometheus."""
    if shutil.which("prometheus") is None:
        raise Impossible("prometheus is not installed (Debian: apt-get install prometheus)")
    options = {"tensor_parallel_size": 2, "max_num_sequences": 4, "max_num_waiting": 10, "grammar_pool.form": "actors"}
    settings = [f"engine.{name}={value}" for name, value in options.items()]
    with contextlib.ExitStack() as stack:
        disk, is_small = stack.enter_context(small_disk(DISK_BYTES))
        server = Server(*settings, f"batch_storage={disk}", f"health_bound_s={HEALTH_BOUND_S}")
        stack.callback(server.stop)
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        prometheus = Prometheus(folder, _configuration(folder, server.port))
        stack.callback(prometheus.stop)
        world = World(server, prometheus, disk if is_small else None)
        stack.enter_context(repeated(lambda: world.ask(max_tokens=2), pause_s=0.5))
        stack.callback(world.resume)  # before anybody waits for the last of these requests
        yield world


def _configuration(folder: pathlib.Path, port: int) -> dict[str, Any]:
    """Writes the shorter rules, and returns a configuration that has them and scrapes a server at a port."""
    (folder / "rules.yml").write_text(quick_rules())
    every = {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": f"{SCRAPE_S}s", "evaluation_interval": "1s"}
    job = {"job_name": "manta", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
    return {"global": every, "rule_files": ["rules.yml"], "scrape_configs": [job]}
