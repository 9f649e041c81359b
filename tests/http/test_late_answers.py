"""`/status`, `/metrics` and `/health` while engines, Serve or some of the engines do not answer, as in an update."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from manta.cluster.cli.status import lines
from manta.cluster.config import EngineConfig
from manta.cluster.engine.engine import Engine
from manta.cluster.engine.stats import EngineStats, ServiceStats
from manta.cluster.http.app import HttpApp
from manta.cluster.http.endpoints.status import Status
from manta.cluster.http.exchange.metrics import Metrics
from manta.cluster.http.exchange.state import DeploymentState
from tests.async_tests import async_test
from tests.checkpoints import checkpoint
from tests.http.test_routes import App, RepeatingEngines
from tests.telemetry.test_metrics import series

DEPLOYMENT = DeploymentState(name="engine", status="UNHEALTHY", replicas={"RUNNING": 1, "STARTING": 1}, num_wanted=2)


@pytest.fixture(scope="module")
def stats() -> EngineStats:
    config = EngineConfig(model=str(checkpoint("llama")), kv_cache_bytes=2**20)
    service = ServiceStats(
        replica="SERVE_REPLICA::manta#engine#abc",
        node="192.0.2.1",
        start_seconds={"process": 1.0},
        waiting_tokens=0,
        ttft_s=0.0,
        requests_per_s=0.0,
        config=config,
    )
    return msgspec.structs.replace(Engine(config).stats(), service=service, num_running=3)


class LateEngines(RepeatingEngines):
    """Answer while `is_late` is not set."""

    is_late = False

    async def stats(self) -> list[EngineStats]:
        while self.is_late:
            await asyncio.sleep(0.01)
        return await super().stats()


class LateApp(App):
    """One whose engines and whose Serve may be late, asked within one event loop."""

    def __init__(self, answering: list[EngineStats]) -> None:
        super().__init__()
        self.late_engines = LateEngines()
        self.late_engines.answering = answering
        self.metrics = Metrics("demo")
        self.app = HttpApp(self.config, self.tokenizer, self.late_engines, self.metrics, cluster=self._cluster)

    async def _cluster(self) -> tuple[list[DeploymentState], list[Any]]:
        while self.late_engines.is_late:
            await asyncio.sleep(0.01)
        return [DEPLOYMENT], []

    async def status(self) -> Status:
        return msgspec.json.decode((await self.send("GET", "/status")).content, type=Status)


@async_test
async def test_late_engines_are_shown_as_they_were(stats: EngineStats) -> None:
    app = LateApp([stats])
    now = await app.status()
    assert [engine.num_running for engine in now.engines] == [3]
    assert (now.engines_age_s, now.cluster_age_s, now.problem) == (0, 0, None)
    assert "manta:engines_serving" in (await app.send("GET", "/metrics")).text

    app.late_engines.is_late = True
    late, answer = await asyncio.gather(app.status(), app.send("GET", "/metrics"))
    assert late.engines == now.engines
    assert late.deployments == now.deployments
    assert min(late.engines_age_s, late.cluster_age_s) > 0
    assert answer.status_code == 200
    found = series(answer.text)
    assert found["manta:engines_serving", ()] == found["manta:num_requests_running", ()] == 0
    shown = "\n".join(lines(late, "http://h:1"))
    assert "The engines have not answered for" in shown
    assert "abc" in shown
    assert "Serve has told nothing for" in shown

    app.late_engines.is_late = False
    again = await app.status()
    assert (again.engines_age_s, again.cluster_age_s) == (0, 0)


@async_test
async def test_engines_that_never_answered_are_told_as_such() -> None:
    app = LateApp([])
    app.late_engines.is_late = True
    status = await app.status()
    assert status.engines == []
    assert status.engines_age_s > 0
    shown = "\n".join(lines(status, "http://h:1"))
    assert "The engines have not answered for" in shown
    assert "No engine runs" not in shown
    app.late_engines.is_late = False


@async_test
async def test_metrics_are_there_when_no_engine_answers() -> None:
    app = App()
    answer = await app.send("GET", "/metrics")
    assert answer.status_code == 200
    assert series(answer.text)["manta:engines_serving", ()] == 0


def test_an_engine_that_restarts_its_ranks_does_not_serve(stats: EngineStats, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its streams go on elsewhere, and a probe that found it ready would send it more."""
    app = App(num_engine_replicas=2)
    monkeypatch.setattr(RepeatingEngines, "answering", [stats, msgspec.structs.replace(stats, is_away=True)])
    assert app.ask("GET", "/health").json() == {"status": "degraded", "reason": "1 of 2 engines serve"}
    assert series(app.ask("GET", "/metrics").text)["manta:engines_serving", ()] == 1
    assert [each["state"] for each in app.ask("GET", "/status").json()["engines"]] == ["running", "waits for ranks"]


@pytest.mark.parametrize(("num_standbys", "reason"), [(0, "1 of 2 engines serve"), (1, "1 of 2 engines serve")])
def test_one_engine_of_two_is_degraded(
    num_standbys: int, reason: str, stats: EngineStats, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stats.service is not None
    service = msgspec.structs.replace(stats.service, replica="SERVE_REPLICA::manta#standby#abc")
    standbys = [msgspec.structs.replace(stats, service=service)] * num_standbys
    app = App(num_engine_replicas=2)
    monkeypatch.setattr(RepeatingEngines, "answering", [stats, *standbys])
    assert app.ask("GET", "/health").json() == {"status": "degraded", "reason": reason}
    monkeypatch.setattr(RepeatingEngines, "answering", [stats, stats, *standbys])
    assert app.ask("GET", "/health").json() == {"status": "ok"}


def test_a_deployment_with_one_dead_replica_is_degraded() -> None:
    status = Status(version="1", uptime_s=1, num_held=0, engines=[], deployments=[DEPLOYMENT], nodes=[])
    assert "engine      degraded, 1 of 2  1 running, 1 starting" in "\n".join(lines(status, "http://h:1"))
    status.deployments = [msgspec.structs.replace(DEPLOYMENT, replicas={"STARTING": 2})]
    assert "engine      unhealthy  2 starting" in "\n".join(lines(status, "http://h:1"))
