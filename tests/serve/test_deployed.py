"""A command overwrites and deletes no application but its own. Serve and Ray's key-value store are stand-ins here;
`tests/serve/test_two_applications.py` runs whole commands on one cluster.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.schema import ApplicationStatus

from manta.cluster.serve.starting import deployed
from manta.cluster.serve.starting.start_failure import StartFailed


class Cluster:
    """Serve's applications, and the notes of the commands that deployed them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.running: dict[str, Any] = {}
        self.sources: dict[str, str] = {}
        self.deleted: list[str] = []
        self.notes: dict[bytes, bytes] = {}
        self.job = "one"
        monkeypatch.setattr(deployed, "_own", {})
        monkeypatch.setattr(deployed, "get_client", lambda **_: self)
        monkeypatch.setattr(deployed.serve, "status", lambda: SimpleNamespace(applications=self.running))
        monkeypatch.setattr(deployed.serve, "run_many", lambda targets, **_: self.run(targets[0].name))
        monkeypatch.setattr(deployed.serve, "delete", self.delete)
        monkeypatch.setattr(deployed, "jobs", lambda: [{"JobID": self.job, "IsDead": False}])
        # By the module's own name, since Ray's filter of log records asks `ray.get_runtime_context` too.
        context = SimpleNamespace(get_job_id=lambda: self.job)
        monkeypatch.setattr(deployed, "get_runtime_context", lambda: context)
        monkeypatch.setattr(
            deployed,
            "internal_kv",
            SimpleNamespace(
                _internal_kv_put=lambda name, value, *_, **__: self.notes.__setitem__(name, value),
                _internal_kv_get=lambda name, **_: self.notes.get(name),
            ),
        )

    def get_serve_details(self) -> dict[str, Any]:
        details = {name: {"source": self.sources.get(name, "imperative"), "route_prefix": "/"} for name in self.running}
        return {"applications": details}

    def run(self, name: str) -> None:
        replicas = SimpleNamespace(replica_states={"RUNNING": 2})
        self.running[name] = SimpleNamespace(status=ApplicationStatus.RUNNING, deployments={"engine": replicas})

    def delete(self, name: str) -> None:
        self.deleted.append(name)
        del self.running[name]

    def another_command(self) -> None:
        """From now on this process stands for another command."""
        deployed._own.clear()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def deploy(name: str = "manta") -> bool:
    return deployed.deploy(None, name, "/", None, "llama on port 8000")  # type: ignore[arg-type]


def test_a_taken_name_is_refused_without_deletion(cluster: Cluster) -> None:
    deploy()
    cluster.another_command()
    with pytest.raises(StartFailed) as refusal:
        deployed.check_name("manta", replace=False)
    message = str(refusal.value)
    assert "'manta' runs on this cluster already (llama on port 8000, from the command with process id " in message
    assert "RUNNING, replicas: 2 engine)" in message
    assert "--replace" in message
    assert "--name NAME" in message
    deployed.delete_own()
    assert not cluster.deleted
    deployed.check_name("manta", replace=True)
    deployed.check_name("second", replace=False)


def test_a_command_deletes_what_it_deployed(cluster: Cluster) -> None:
    assert not deploy()
    cluster.run("another")
    deployed.delete_own()
    assert cluster.deleted == ["manta"]
    assert set(cluster.running) == {"another"}


@pytest.mark.parametrize("how", ["another command", "serve deploy"])
def test_another_applications_replacement_is_not_deleted(
    cluster: Cluster, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    deploy()
    if how == "serve deploy":
        cluster.sources["manta"] = "declarative"
    else:
        own = dict(deployed._own)
        cluster.another_command()
        assert deploy()
        deployed._own.clear()
        deployed._own.update(own)
    with caplog.at_level(logging.WARNING):
        deployed.delete_own()
    assert not cluster.deleted
    assert "goes on: another command has replaced it since" in caplog.text


@pytest.mark.parametrize("runs", [False, True])
def test_a_failed_update_keeps_the_old_application(
    cluster: Cluster, runs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    deploy()
    cluster.another_command()
    assert deploy(), "it updates one that runs"
    if runs:
        deployed.note_running("manta")
    deployed.delete_own()
    assert cluster.deleted == (["manta"] if runs else [])
    assert ("stays as it is" in caplog.text) is not runs


def test_a_prefix_belongs_to_one_application(cluster: Cluster) -> None:
    deploy()
    deployed.check_prefix("manta", "/")
    with pytest.raises(StartFailed, match=r"requests below / to the application 'manta' already"):
        deployed.check_prefix("second", "/")
