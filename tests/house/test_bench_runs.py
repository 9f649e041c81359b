"""Each benchmark at its smallest size: it ends, shows how far it is and prints every row."""

from __future__ import annotations

import copy
import importlib
import pathlib
import signal
import subprocess
import sys
from typing import Any

import pytest

from benchmarks import batch, cluster_http, constraints, same_tokens, speculative, start
from benchmarks.checkpoints import benchmark_checkpoint
from benchmarks.processes import ROOT
from tests.checkpoints import checkpoint
from tests.patience import PATIENCE_S

PROVE = pytest.mark.prove


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a benchmark adds to the path of modules ends with its test."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def small(monkeypatch: pytest.MonkeyPatch, module: Any, **values: Any) -> None:
    for name, value in values.items():
        monkeypatch.setattr(module, name, value)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        pytest.param(
            "host",
            ["--parts", "step,admission", "--rows", "1", "--arrivals", "1", "--steps", "1"],
            "| arrivals |",
            marks=PROVE,
        ),
        pytest.param("host", ["--parts", "loops", "--steps", "2"], "| two ranks | 256 |", marks=PROVE),
        pytest.param(
            "kernel_times", ["--parts", "caches", "--seconds", "0.01"], "int4 cache, decode 32 x 4096", marks=PROVE
        ),
        pytest.param(
            "long_contexts",
            ["--contexts", "64,128", "--chunk", "32", "--turns", "1", "--steps", "2", "--model", "tiny-llama"],
            "| 128 tokens |",
            marks=PROVE,
        ),
        pytest.param(
            "same_tokens",
            ["--peer-checkout", str(ROOT), "--families", "llama", "--settings", "plain"],
            "all tokens are the same",
            marks=PROVE,
        ),
        pytest.param(
            "faults",
            ["--tokens", "8", "--rounds", "1", "--forms", "threads", "--model", "llama"],
            "| threads | all |",
            marks=PROVE,
        ),
        pytest.param(
            "prefixes",
            ["--tokens", "40", "--kills", "1", "--model", "tiny-llama"],
            "| 32 |",
            marks=PROVE,
        ),
        pytest.param(
            "several_models",
            ["--shapes", "tiny-llama,one-layer-llama", "--turns", "2", "--streams", "1", "--tokens", "4"],
            "| one-layer-llama | ",
            marks=PROVE,
        ),
        pytest.param(
            "embeddings",
            ["--shapes", "tiny", "--texts", "6", "--turns", "2", "--singles", "5", "--batch", "20"],
            "| tiny | 20 texts |",
            marks=PROVE,
        ),
        pytest.param(
            "forms",
            ["--formats", "bfloat16,int8,int8 exact,int4", "--turns", "2", "--model", "tiny-llama"],
            "prefill, 16 x 128                              int4",
            marks=PROVE,
        ),
    ],
)
def test_a_benchmark_runs_at_its_smallest_size(
    name: str, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = {"llama": checkpoint, "tiny-llama": benchmark_checkpoint}
    if "--model" in arguments:
        *arguments, model = arguments
        arguments.append(str(folders[model](model)))
    assert importlib.import_module(f"benchmarks.{name}").main(arguments) == 0
    assert words in capsys.readouterr().out


@PROVE
def test_a_token_difference_between_checkouts_is_found() -> None:
    ours = same_tokens.generate({"model": str(checkpoint("llama"))})
    assert all(len(prompts) == 8 for prompts in ours.values())
    assert {len(choices) for choices in ours["choices"]} == {3}
    theirs = copy.deepcopy(ours)
    assert same_tokens.differences(ours, theirs) == []
    theirs["choices"][2][1][5] += 1
    theirs["greedy"][4][0].pop()
    expected = ["greedy, prompt 4, choice 0, token 23", "choices, prompt 2, choice 1, token 5"]
    assert same_tokens.differences(ours, theirs) == expected


@PROVE
def test_each_part_of_what_constraints_cost_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small(monkeypatch, constraints, ROWS=2, OUTPUT=8)
    model = str(checkpoint("llama", max_position_embeddings=512))
    assert constraints.main(["--forms", "threads", "--pairs", "1", "--model", model]) == 0
    printed = capsys.readouterr()
    assert all(f"\n{part} " in printed.out for part in constraints.PARTS)
    assert "e, 2 rows under a cached schema, threads: 100%" in printed.err


@PROVE
def test_each_part_of_what_drafts_save_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small(monkeypatch, speculative, OUTPUT=8, REPEATS=2, DEMO_REQUESTS=4)
    assert speculative.main(["--rows", "1", "--pairs", "1", "--model", str(checkpoint("llama"))]) == 0
    printed = capsys.readouterr()
    assert all(f"\n{part}" in printed.out for part in ("demo", "h ", "json"))
    assert "json, 1 rows: 100%" in printed.err


@PROVE
@pytest.mark.parametrize(
    "flags", [["--ways", "joined,LLM.generate"], ["--ways", "joined", "--peer-checkout", str(ROOT)]]
)
def test_ways_from_clients_to_engines(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    small_run = ["--starts", "1", "--rounds", "1", "--streams", "1", "--tokens", "8"]
    assert cluster_http.main([*small_run, *flags]) == 0
    printed = capsys.readouterr()
    ways = 2 if "--peer-checkout" in flags else 3
    rows = [line.split(" | ")[0] for line in printed.out.splitlines()]
    assert rows == ["| model", "| ---", *["| tiny"] * ways, *["| demo"] * ways]
    assert "demo, start 1 of 1, 1 streams:" in printed.err


@PROVE
def test_a_batch_beside_its_engine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small(monkeypatch, batch, MODELS={"tiny": ("tiny-llama", 32)})
    assert batch.main(["--rounds", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("| tiny | 32 | ")


@PROVE
@PROVE
def test_a_terminated_benchmark_with_actors_prints_no_stack() -> None:
    command = [sys.executable, "-m", "manta.cluster.cli", "bench", "constraints", "--parts", "e", "--forms", "actors"]
    command += ["--model", str(checkpoint("llama", max_position_embeddings=512)), "--pairs", "100000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as benchmark:
        assert benchmark.stderr is not None
        printed = b""
        while b"turn" not in printed:
            piece = benchmark.stderr.read1(4096)  # type: ignore[attr-defined]
            assert piece, printed
            printed += piece
        benchmark.send_signal(signal.SIGTERM)
        printed += benchmark.stderr.read()
        assert benchmark.wait(PATIENCE_S) == 130
    assert b"***" not in printed
    assert printed.decode().rstrip().endswith("manta bench: interrupted")


@PROVE
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
