"""An engine that dies or cannot start while `manta serve` starts: before the first answer that ends the start, after it
Serve replaces the engine and nobody's stream ends.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import time
import types
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ray.serve.schema import ApplicationStatusOverview, DeploymentStatusOverview, ReplicaState

from benchmarks.processes import free_port
from manta.cluster.serve.starting.start_watch import Outcome, Start, wait_until_running
from tests.checkpoints import checkpoint
from tests.patience import PATIENCE_S
from tests.serve.fault_streams import Streams
from tests.serve.test_start_failures import serve

GATED_MODULE = """
import contextlib, os, pathlib, time

starts = pathlib.Path(os.environ["STARTS"])
for number in range(1000):
    with contextlib.suppress(FileExistsError), open(starts / str(number), "x") as file:
        file.write(str(os.getpid()))
        break
while number and not (starts / "open").exists():
    time.sleep(0.05)
if number and (starts / "broken").exists():
    raise RuntimeError("engines are sold out")

def processor(*arguments):
    raise AssertionError("nobody asks for it")
"""
"""The first engine that loads it starts at once; others wait until the file `open` is there."""


class Starting:
    """A `manta serve` of two engines, of which the first one answers and the second one waits."""

    def __init__(self, folder: pathlib.Path) -> None:
        (folder / "gated.py").write_text(GATED_MODULE)
        self.starts = folder / "starts"
        self.starts.mkdir()
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = serve(
            f"engine.model={checkpoint('llama')}",
            f"port={port}",
            "engine.dtype=float32",
            "num_engine_replicas=2",
            "engine.logits_processors={gated: gated:processor}",
            PYTHONPATH=os.pathsep.join(paths),
            STARTS=str(self.starts),
        )

    def has_answered(self) -> None:
        self.until(lambda: self.num_starts() == 2 and self._is_healthy())

    def num_starts(self) -> int:
        """Engines that have been started so far, dead ones included."""
        return sum(path.name.isdigit() for path in self.starts.iterdir())

    def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.1)

    def _is_healthy(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=10) as response:
            return response.status == 200
        return False

    def is_ready(self) -> None:
        assert self.process.stdout is not None
        printed = ""
        for line in self.process.stdout:
            printed += line
            if "Ctrl-C stops it." in line:
                return
        pytest.fail(f"it ended: {printed} {self.process.communicate()}")

    def stop(self) -> str:
        """What it wrote to standard error."""
        self.process.send_signal(signal.SIGTERM)
        _, error = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == 0
        return " ".join(error.split())


@pytest.fixture
def starting(tmp_path: pathlib.Path) -> Iterator[Starting]:
    started = Starting(tmp_path)
    try:
        started.has_answered()
        yield started
    finally:
        if started.process.poll() is None:
            started.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.process.communicate(timeout=PATIENCE_S)
            started.process.kill()


@pytest.mark.prove
def test_an_engine_dying_after_its_answer_is_replaced(starting: Starting) -> None:
    body = {"model": checkpoint("llama").name, "prompt": [5, 9, 17], "max_tokens": 380, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    streams = Streams(starting.url, [("/v1/completions", body)] * 8)
    streams.wait_for_events(1)
    os.kill(int((starting.starts / "0").read_text()), signal.SIGKILL)
    starting.until(lambda: starting.num_starts() == 3)  # Serve has noticed, and no engine is ready
    (starting.starts / "open").touch()
    starting.is_ready()
    assert [stream.error for stream in streams.join()] == [None] * 8
    assert "did not start" not in starting.stop()


@pytest.mark.prove
def test_a_failed_start_beside_a_ready_engine_warns(starting: Starting) -> None:
    """`test_a_replica_failure_is_logged_once` looks at the same without engines."""
    (starting.starts / "broken").touch()
    (starting.starts / "open").touch()
    starting.is_ready()
    error = starting.stop()
    assert "a replica of the engine did not start, and Serve tries again: " in error
    assert "RuntimeError: engines are sold out" in error


# ---- what Serve's status means -------------------------------------------------------------------------------------

FIRST_FAILURE = "A replica failed to start with exception. Retrying 2 more time(s). Error:\nValueError: no"
LATER_FAILURE = "A replica failed to start with exception. Retrying. Error:\nValueError: no"
GIVEN_UP = "The deployment failed to start 3 times in a row during a rolling update. Error:\nValueError: no"
DEATH = ("DEPLOY_FAILED", "HEALTH_CHECK_FAILED", "A replica's health check failed.", 0)
STARTING = ("UPDATING", "CONFIG_UPDATE_STARTED", "", 0)
READY = ("HEALTHY", "CONFIG_UPDATE_COMPLETED", "", 1)
CANNOT = ("UPDATING", "CONFIG_UPDATE_STARTED", FIRST_FAILURE, 0)
CANNOT_AGAIN = ("UPDATING", "CONFIG_UPDATE_STARTED", LATER_FAILURE, 1)
STOPPED = ("DEPLOY_FAILED", "REPLICA_STARTUP_FAILED", GIVEN_UP, 1)
WAITS, RUNS, FAILED = Outcome.WAITS, Outcome.RUNS, Outcome.FAILED


def seen(status: str, **deployments: Any) -> ApplicationStatusOverview:
    found = {
        name: DeploymentStatusOverview(each, trigger, {ReplicaState.RUNNING: ready}, message)  # type: ignore[arg-type]
        for name, (each, trigger, message, ready) in deployments.items()
    }
    return ApplicationStatusOverview(status, "", 0.0, found)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("looks", "outcome"),
    [
        ([("DEPLOYING", STARTING, STARTING)], WAITS),
        ([("DEPLOYING", READY, STARTING), ("RUNNING", READY, READY)], RUNS),
        ([("DEPLOYING", CANNOT, STARTING)], FAILED),
        ([("DEPLOYING", READY, CANNOT)], FAILED),
        ([("DEPLOYING", READY, READY), ("DEPLOY_FAILED", DEATH, READY)], WAITS),
        ([("DEPLOY_FAILED", DEATH, STARTING)], WAITS),
        ([("DEPLOYING", READY, READY), ("DEPLOYING", CANNOT, READY)], WAITS),
        ([("DEPLOYING", CANNOT_AGAIN, READY)], RUNS),
        ([("DEPLOYING", CANNOT_AGAIN, STARTING)], WAITS),
    ],
)
def test_a_start_fails_only_before_anything_has_served(looks: list[Any], outcome: Outcome) -> None:
    start = Start()
    for status, engine, ingress in looks:
        found, _ = start.look(seen(status, engine=engine, ingress=ingress))
    assert found == outcome


def test_old_replicas_do_not_hide_a_failed_update() -> None:
    ready_but_failing = (*CANNOT[:3], 1)
    assert Start(updates=True).look(seen("DEPLOYING", engine=ready_but_failing, ingress=READY))[0] == FAILED
    assert Start().look(seen("DEPLOYING", engine=ready_but_failing, ingress=READY))[0] == RUNS
    updated = Start(updates=True)
    assert updated.look(seen("DEPLOY_FAILED", engine=DEATH, ingress=STARTING))[0] == WAITS
    assert updated.look(seen("DEPLOY_FAILED", engine=STOPPED, ingress=READY))[0] == FAILED


def test_a_replica_failure_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The start ends well all the same, once Serve says that it goes on trying."""
    looks = iter([(STARTING, STARTING), (CANNOT_AGAIN, STARTING), (CANNOT_AGAIN, READY)])

    def status() -> types.SimpleNamespace:
        engine, ingress = next(looks)
        return types.SimpleNamespace(applications={"manta": seen("DEPLOYING", engine=engine, ingress=ingress)})

    monkeypatch.setattr("manta.cluster.serve.starting.start_watch.serve.status", status)
    wait_until_running("manta")
    (record,) = caplog.records
    assert "a replica of the engine did not start, and Serve tries again: ValueError: no" in record.getMessage()


def test_engines_alone_have_served_without_an_ingress() -> None:
    start = Start()
    assert start.look(seen("DEPLOYING", engine=READY))[0] == WAITS
    assert start.look(seen("DEPLOYING", engine=CANNOT))[0] == WAITS
