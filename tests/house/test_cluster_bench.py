"""Each part of `manta bench cluster` at its smallest size: it ends, shows how far it is and prints every row."""

from __future__ import annotations

import functools
import pathlib
import sys
from typing import Any

import pytest

from benchmarks import autoscaling, batch, cluster, own_ray, reconnecting, resume, routing, start, tensor_parallel
from benchmarks.processes import PEER, ROOT, ServerProcess, Setup, free_port
from benchmarks.routing_simulation import Workload


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a benchmark adds to the path of modules ends with its test."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def printed_by(part: str, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[list[str], str]:
    """The first cell of each row of the tables, and what was said on standard error."""
    assert cluster.main(["--parts", part, "--rounds", "1", "--tokens", "8", *flags]) == 0
    printed = capsys.readouterr()
    rows = [line.split(" | ") for line in printed.out.splitlines() if line.startswith("| ")]
    assert all(len(row) > 2 for row in rows)
    return [row[0].removeprefix("| ") for row in rows if row[0] != "| ---"], printed.err


def small(monkeypatch: pytest.MonkeyPatch, module: Any, **values: Any) -> None:
    for name, value in values.items():
        monkeypatch.setattr(module, name, value)


def test_sums_of_two_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small(monkeypatch, tensor_parallel, SUM_ROWS=(1, 3))
    assert tensor_parallel.main(["--parts", "sums", "--turns", "1"]) == 0
    head, line, *rows = capsys.readouterr().out.splitlines()
    assert (head, line) == ("| sum over 2 ranks, bfloat16 | shared memory | gloo |", "| --- | --- | --- |")
    assert [row.split(" | ")[0] for row in rows] == ["| 1 x 896", "| 3 x 896"]


@pytest.mark.prove
def test_sums_and_steps_of_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small(monkeypatch, cluster, TP_SHAPE="tiny-llama")
    small(monkeypatch, tensor_parallel, SUM_ROWS=(1,), STEPS={"decode, 1 row": (1, 1), "prefill": (1, 8)})
    rows, said = printed_by("tp", capsys)
    assert rows == [
        "sum over 2 ranks, bfloat16",
        "1 x 896",
        "step, one core a rank",
        "decode, 1 row",
        "prefill",
    ]
    assert "prefill: 100%" in said


def test_what_resumable_streams_cost_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, resume, NUM_STEPS=3)
    lines = list(resume.table(0.025))
    assert len(lines) == 6
    assert lines[-1].startswith("| together | | ")


def test_routers_of_a_simulated_cluster() -> None:
    lines = list(routing.simulated(Workload(num_replicas=8, num_ingresses=2, seconds=2.0, num_system_prompts=4)))
    routers = [line.split(" | ")[0] for line in lines if line.startswith("| ") and "---" not in line]
    assert routers == ["| router", "| Manta", "| Oracle", "| TwoChoices", "| RoundRobin"]
    assert "an ingress's index" in lines[-1]


@pytest.mark.prove
def test_processes_that_own_ray_leaves_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small(monkeypatch, own_ray, IDLE_S=0.2, SETTLE_S=0.0)
    rows, said = printed_by("own-ray", capsys)
    assert rows[:2] == ["a Ray of our own", "as Manta starts it"]
    assert rows[-1] == "with all"
    assert said.count("round 1 of 1, ") == len(rows) - 1


@pytest.mark.prove
def test_ways_from_clients_to_engines(capsys: pytest.CaptureFixture[str]) -> None:
    rows, said = printed_by("http", capsys, "--starts", "1", "--streams", "1", "--ways", "joined,LLM.generate")
    assert rows == ["model", *["tiny"] * 3, *["demo"] * 3]
    assert "demo, start 1 of 1, 1 streams:" in said


@pytest.mark.prove
def test_ways_of_two_checkouts(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--starts", "1", "--streams", "1", "--ways", "joined", "--peer-checkout", str(ROOT)]
    rows, _ = printed_by("http", capsys, *flags)
    assert rows == ["model", *["tiny"] * 2, *["demo"] * 2]


PEER_CLI = """
import http.server, pathlib, subprocess, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

import_it = "import manta.cluster; print(manta.cluster.__file__)"
child = subprocess.run([sys.executable, "-c", import_it], cwd="/", capture_output=True, text=True, check=True)
pathlib.Path("imported").write_text(child.stdout.strip())
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_a_peers_server_and_its_processes_run_the_peers_code(tmp_path: pathlib.Path) -> None:
    package = tmp_path / "manta" / "cluster"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "cli.py").write_text(PEER_CLI)
    server = ServerProcess(PEER, "a model", Setup(kv_cache_bytes=1, peer_checkout=str(tmp_path)), free_port())
    server.stop()
    assert (tmp_path / "imported").read_text() == str(package / "__init__.py")


@pytest.mark.prove
def test_engines_that_come_and_go(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    small(monkeypatch, autoscaling, HOLD_S=0.5, RESULTS=tmp_path)
    rows, said = printed_by("autoscaling", capsys, "--tokens", "200")  # shorter answers are no load
    assert rows[0] == "at, s"
    assert "none, 0 clients, until 0 engines run" in said
    (plot,) = tmp_path.iterdir()
    assert plot.read_text().startswith("<svg")


@pytest.mark.prove
def test_streams_whose_clients_reconnect(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small(monkeypatch, reconnecting, WARM_UP=4, NUM_PROMPTS=4)
    rows, said = printed_by("reconnecting", capsys, "--kept", "1000")
    assert rows[0] == "1,000 streams of 32 tokens, at most 100/s"
    assert "events lost, twice; streams different" in rows
    assert said.count("1000 of 1000 streams have begun") == 2


@pytest.mark.prove
def test_a_batch_beside_its_engine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small(monkeypatch, batch, MODELS={"tiny": ("tiny-llama", 32)})
    rows, _ = printed_by("batch", capsys)
    assert rows == ["model", "tiny"]


@pytest.mark.prove
def test_routers_of_real_engines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small(monkeypatch, routing.simulation, Workload=functools.partial(Workload, num_replicas=8, seconds=2.0))
    small(monkeypatch, routing, FLOOD=60, NUM_ASKED=2, NUM_ENGINES=2, NUM_CHATS_OF_PROMPT=1, NUM_TURNS=2)
    rows, _ = printed_by("routing", capsys)
    assert rows[:5] == ["router", "Manta", "Oracle", "TwoChoices", "RoundRobin"]
    assert rows[5:] == ["round", "1", "1", "1", "1", "engines", "1", "2"]


@pytest.mark.prove
def test_the_phases_of_a_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert start.main(["--starts", "1", "--peer-checkout", str(ROOT)]) == 0
    printed = capsys.readouterr()
    rows = [line.split(" | ") for line in printed.out.splitlines() if line.startswith("| ")]
    assert [row[:2] for row in rows[2:]] == [
        ["| peer", "1"],
        ["| here", "1"],
        ["| here", "median"],
        ["| peer", "median"],
        ["| peer over here", "median"],
    ]
    seconds = [float(cell) for cell in rows[3][2:-1]]
    assert min(seconds) > 0
    assert sum(seconds) == pytest.approx(float(rows[3][-1].rstrip(" |")), abs=0.05)


def test_a_peer_that_is_no_checkout_is_refused(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        start.main(["--peer-checkout", str(tmp_path)])
    assert f"{tmp_path} has no cluster/cli; give the root of a checkout" in capsys.readouterr().err
