"""`GET /status` and `manta status`: of a live server, of one without engines, and where nobody answers."""

from __future__ import annotations

import http.server
import json
import subprocess
import threading
import time
from collections.abc import Iterator

import msgspec
import psutil
import pytest
from ray.serve._private.common import DeploymentStatus, DeploymentStatusTrigger
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatusOverview

from manta.cluster.cli import __main__ as command_line
from manta.cluster.cli.status import lines
from manta.cluster.http.endpoints.status import EngineState, Status
from manta.cluster.http.exchange.state import DeploymentState, NodeState
from manta.cluster.serve.scaling.cluster_state import deployment_state
from manta.cluster.serve.starting.replica_process import process_age_s
from tests.server import Server, shared_server

PHASES = {"process", "imports", "config", "weights", "kv_cache", "runner", "engine", "warm_up", "first_health"}


@pytest.fixture(scope="module")
def server() -> Server:
    return shared_server()


def test_a_live_server_says_what_runs_where(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    body = {"model": server.model, "prompt": [5] * 40, "max_tokens": 4, "temperature": 0}
    for _ in range(2):
        assert server.post("/v1/completions", body)[0] == 200
    server.until_idle()
    assert command_line.main(["status", "--url", server.url, "--json"]) == 0
    status = msgspec.json.decode(capsys.readouterr().out, type=Status)
    (engine,) = status.engines
    assert json.loads(server.get("/version")) == {"version": status.version}
    assert server.get("/ping") == server.get("/health") == '{"status":"ok"}'
    assert status.problem is None
    assert status.num_held == 0
    assert engine.state == "idle"
    assert engine.kv_usage == 0
    assert engine.waiting_tokens == 0
    assert engine.cache_hit_rate is not None
    assert engine.cache_hit_rate > 0
    assert engine.requests_per_s > 0
    assert set(engine.start_seconds) == PHASES
    assert all(seconds >= 0 for seconds in engine.start_seconds.values())
    assert {each.name: each.replicas for each in status.deployments} == {
        "engine": {"RUNNING": 1},
        "ingress": {"RUNNING": 1},
    }
    assert all(each.note is None for each in status.deployments)
    (node,) = status.nodes
    assert node.alive
    assert node.address == engine.node
    assert node.resources["CPU"] > 0
    metrics = server.get("/metrics")
    for phase in engine.start_seconds:
        assert f'phase="{phase}"' in metrics

    assert command_line.main(["status", "--url", server.url]) == 0
    shown = capsys.readouterr().out
    assert engine.replica in shown
    assert "1 running" in shown
    assert "process" in shown


def test_a_processs_age_is_exact_to_hundredths() -> None:
    """Linux says in whole seconds only when it booted; the start of an engine was told by up to that too long."""
    before = time.monotonic()
    process = subprocess.Popen(["sleep", "600"])
    after = time.monotonic()
    try:
        asked = time.monotonic()
        age = process_age_s(psutil.Process(process.pid))
        answered = time.monotonic()
    finally:
        process.kill()
        process.wait()
    tick_s = 0.01
    assert asked - after - tick_s <= age <= answered - before + tick_s


def test_what_does_not_start_is_told_in_words() -> None:
    engine = EngineState(
        replica="abc",
        node="10.0.0.1",
        state="running",
        num_running=4,
        num_waiting=7,
        waiting_tokens=900,
        kv_usage=0.5,
        cache_hit_rate=None,
        ttft_s=1.25,
        requests_per_s=3.0,
        start_seconds={"process": 1.0, "imports": 2.0, "weights": 4.0, "engine": 0.5},
    )
    waits = DeploymentState(name="engine", status="UPSCALING", replicas={"RUNNING": 1, "STARTING": 2}, note="no room")
    node = NodeState(address="10.0.0.1", alive=False, resources={"CPU": 8.0, "memory": 2.0**34})
    status = Status(
        version="1", uptime_s=3700, num_held=3, engines=[engine], deployments=[waits], nodes=[node], problem=None
    )
    text = "\n".join(lines(status, "http://h:1"))
    for words in (
        "for 1 h 1 min",
        "3 requests wait here for an engine to start",
        "7 (900 tokens)",
        "1.25 s",
        "7.5 s (weights 4.0, imports 2.0, process 1.0)",
        "1 running, 2 starting",
        "engine: no room",
        "gone",
        "8 CPU, 16.0 GiB memory",
    ):
        assert words in text
    asleep = "\n".join(lines(msgspec.structs.replace(status, engines=[]), "http://h:1"))
    assert "No engine runs; a request starts one." in asleep
    failed = msgspec.structs.replace(status, engines=[], problem="no engine answers: there is none")
    assert "The engines do not answer: no engine answers" in "\n".join(lines(failed, "http://h:1"))


def test_serves_messages_in_words() -> None:
    def note(message: str, status: str = "UPSCALING", trigger: str = "AUTOSCALING") -> str | None:
        overview = DeploymentStatusOverview(
            status=DeploymentStatus(status),
            status_trigger=DeploymentStatusTrigger(trigger),
            replica_states={"RUNNING": 1, "STARTING": 0},  # type: ignore[dict-item]
            message=message,
        )
        application = ApplicationStatusOverview(ApplicationStatus.RUNNING, "", 0.0, {"engine": overview})
        state = deployment_state(application, "engine")
        assert state.replicas == {"RUNNING": 1}
        return state.note

    assert note("", "HEALTHY") is None
    assert note("Upscaling from 1 to 3 replicas.") == "Upscaling from 1 to 3 replicas."
    slow = (
        "Deployment 'engine' in application 'manta' has 2 replicas that have taken more than 30s to initialize.\nThis"
    )
    assert note(slow) == "2 have been starting for more than 30 s; their logs say what they do"
    room = (
        "Deployment 'engine' in application 'manta' has 2 replicas that have taken more than 30s to be scheduled. "
        'Resources required for each replica: {"CPU": 8}, total resources available: {"CPU": 1}. Use `ray status`.'
    )
    assert 'each of its replicas claims {"CPU": 8}' in (note(room) or "")
    slow_process = room.replace('{"CPU": 1}', '{"CPU": 8.0, "GPU": 1}')
    assert note(slow_process) == "2 have been starting for more than 30 s; their logs say what they do"
    failed = "The deployment failed to start 1 times\nTraceback (most recent call last):\n  a\ncluster.InWords: no room"
    assert note(failed, "UNHEALTHY") == "no room"
    died = note("A replica's health check failed. It will be UNHEALTHY.", "UNHEALTHY", "HEALTH_CHECK_FAILED")
    assert died == "a replica died or failed its health check, and Serve starts another one"


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_without_a_server_it_says_so(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["status", "--url", "http://127.0.0.1:9", *flags]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "no server answers at http://127.0.0.1:9" in printed.err


@pytest.fixture
def another_program() -> Iterator[str]:
    """Its URL."""

    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"hello": "world"}).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_another_program_is_no_manta(capsys: pytest.CaptureFixture[str], another_program: str) -> None:
    assert command_line.main(["status", "--url", another_program]) == 2
    assert "is no Manta" in capsys.readouterr().err
