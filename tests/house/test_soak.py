"""The soak: its bars on series that are known, a few seconds of it on the shared server, and half an hour to prove."""

from __future__ import annotations

import csv
import pathlib
import random
from typing import Any

import pytest

from benchmarks.processes import ROOT
from benchmarks.soak import SoakServer, soak
from benchmarks.soak_load import Gap, Observed
from benchmarks.soak_report import MIB, Sample, Soak, sparkline
from tests.server import shared_server

MINUTES = 30


def made(growth: float = 0.0, slower: float = 1.0, status: int = 200, step: float = 0.0) -> Soak:
    """Half an hour with noise: an engine that fills its caches in four minutes and then grows by `growth` of it a
    minute, or by `step` once, and gaps that are `slower` times as long in the end.
    """
    generator = random.Random(1)
    samples = []
    for at in range(0, 1800, 5):
        filled = min(1.0, 0.3 + at / 240) + growth * max(0, at - 240) / 60 + step * (at > 1100)
        noise = generator.gauss(1, 0.01)
        samples.append(Sample(float(at), {"engine": int(400 * MIB * filled * noise), "ingress": 90 * MIB}))
    observed = Observed()
    for number in range(18_000):
        at = number / 10
        seconds = generator.expovariate(50) * (slower if at > 1200 else 1.0)
        observed.gaps.append(Gap(at, seconds))
    observed.count("plain", 200)
    observed.count("tools", status, b"what came")
    return Soak(1800.0, samples, observed)


@pytest.mark.prove
def test_a_server_that_stays_as_it_is_passes() -> None:
    steady = made()
    assert steady.problems() == []
    assert "Every bar is met." in steady.markdown()
    (everything, engine, ingress) = steady.memories()
    assert (everything.role, engine.role, ingress.role) == ("all", "engine", "ingress")
    assert everything.plateau == pytest.approx(490 * MIB, rel=0.01)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"growth": 0.02}, ["engine grows", "all grows"]),
        ({"slower": 2.0}, ["p99 between tokens"]),
        ({"status": 503}, ["1 answers were not 200", "503 what came"]),
        ({"status": 0}, ["1 answers were not 200"]),
    ],
    ids=["leak", "slower", "503", "no answer"],
)
def test_what_is_wrong_is_not_passed(wrong: dict[str, Any], words: list[str]) -> None:
    soak = made(**wrong)
    problems = "\n".join(soak.problems())
    for word in words:
        assert word in problems
        assert f"- not met: {soak.problems()[0]}" in soak.markdown()


@pytest.mark.prove
def test_growth_ignores_warm_up_and_one_jump() -> None:
    assert abs(made().memories()[1].growth) < 0.001
    assert made(growth=0.005).problems() == []
    assert made(step=0.05).problems() == []


@pytest.mark.prove
def test_a_small_processs_leak_is_found() -> None:
    samples = [Sample(at, {"engine": 400 * MIB, "raylet": int((16 + 0.3 * at / 60) * MIB)}) for at in range(0, 1800, 5)]
    assert [problem.split(" ")[0] for problem in Soak(1800.0, samples, made().observed).problems()] == ["raylet"]


@pytest.mark.prove
def test_the_files_have_every_sample(tmp_path: pathlib.Path) -> None:
    steady = made()
    markdown, table = steady.write(tmp_path, "soak")
    rows = list(csv.reader(table.open()))
    assert rows[0] == ["seconds", "engine", "ingress"]
    assert len(rows) == 1 + len(steady.samples)
    assert markdown.read_text().startswith("# Soak\n")
    assert sparkline([0, 5, 10]) == "▁▅█"


@pytest.mark.prove
def test_a_short_soak_sees_every_process_and_client() -> None:
    server = shared_server()
    found = soak(server.port, server.model, server.process.pid, seconds=6.0, sample_every_s=1.0)
    assert found.num_bad_answers() == 0, found.observed.complaints
    assert {"serve", "ingress", "engine", "raylet", "gcs_server", "compile processes"} <= set(found.samples[-1].by_role)
    assert {kind for kind, _ in found.observed.statuses} >= {"plain", "parallel", "constrained", "tools", "prefixed"}
    assert len(found.observed.gaps) > 0
    assert "| engine |" in found.markdown()


@pytest.mark.prove
@pytest.mark.timeout(60 * MINUTES + 600)
def test_half_an_hour_of_mixed_load(record_property) -> None:
    server = SoakServer()
    try:
        found = soak(server.port, server.model_name, server.process.pid, 60.0 * MINUTES)
    finally:
        server.stop()
    found.write(ROOT / "benchmarks" / "results", "soak")
    for memory in found.memories():
        record_property(memory.role, f"{memory.plateau / MIB:.0f} MiB {memory.growth:+.2%} a minute")
    record_property("answers", sum(found.observed.statuses.values()))
    record_property("p99 between tokens, last third over first", round(found.gap_ratio(), 2))
    assert found.problems() == []
