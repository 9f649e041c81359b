"""`manta bench table`: which cells it measures and what it writes, with engines of known speed, and floors by hand."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from benchmarks import peers, table
from benchmarks.floors import Rates, Shape
from benchmarks.processes import BenchmarkError, Setup, Timing

RATES = Rates(bfloat16=2e12, int8=4e12, bandwidth=1e10)


class KnownEngine:
    """Takes 1 ms a step and for each prompt token, or twice that as a peer; fails under a schema."""

    started: list[str] = []

    def __init__(self, engine: str, model: str, setup: Setup, rows: int) -> None:
        self.engine, self.seconds = engine, 1e-3 if engine == "manta" else 2e-3
        self.started.append(f"{engine} {setup.weights} {rows} {setup.max_model_len}")

    def generate(
        self, prompts: list[list[int]], max_tokens: int, n: int = 1, temperature: float = 0.0, schema: Any = None
    ) -> Timing:
        if schema is not None:
            raise BenchmarkError("a child has died; the end of its output:\n  no schemas here")
        first, rows = self.seconds * sum(map(len, prompts)), len(prompts) * n
        steps = [(first + self.seconds * step, rows) for step in range(max_tokens)]
        return Timing(steps[-1][0], rows * max_tokens, steps)

    def rest(self) -> None: ...
    def wake(self) -> None: ...
    def stop(self) -> None: ...


@pytest.fixture
def sitting(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A place where engines are known, with versions that a test may change."""
    folder = tmp_path / "model"
    write_checkpoint(folder)
    monkeypatch.setattr(table, "EngineProcess", KnownEngine)
    monkeypatch.setattr(table, "benchmark_checkpoint", lambda name: folder)
    monkeypatch.setattr(table, "measure_rates", lambda form: RATES)
    monkeypatch.setattr(table, "version_of", lambda name, python: "1")
    monkeypatch.setattr(table, "commit", lambda: "abc")
    monkeypatch.setattr(peers, "made_once", lambda name, make, has: tmp_path / name)
    monkeypatch.setattr(KnownEngine, "started", [])
    return tmp_path


def write_checkpoint(folder: pathlib.Path) -> None:
    """A mixture of 4 experts, 2 a token, in one layer of width 64; the file has a header alone."""
    shapes = {
        "model.embed_tokens.weight": [500, 64],
        "lm_head.weight": [500, 64],
        "model.layers.0.self_attn.q_proj.weight": [64, 64],
        "model.layers.0.self_attn.k_proj.weight": [32, 64],
        "model.layers.0.self_attn.v_proj.weight": [32, 64],
        "model.layers.0.self_attn.o_proj.weight": [64, 64],
        "model.layers.0.mlp.gate.weight": [4, 64],
        **{f"model.layers.0.mlp.experts.{each}.up_proj.weight": [96, 64] for each in range(4)},
        **{f"model.layers.0.mlp.experts.{each}.down_proj.weight": [64, 96] for each in range(4)},
        "model.norm.weight": [64],
    }
    header = json.dumps({name: {"shape": shape} for name, shape in shapes.items()}).encode()
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    config = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps(config | {"num_experts": 4, "num_experts_per_tok": 2}))


def run(folder: pathlib.Path, cells: str, pairs: int = 5, peer: str = "llamacpp") -> int:
    python = ["--llamacpp-python", str(folder / "model" / "config.json")]  # a file that is there: nothing starts it
    results = ["--results", str(folder / "table.jsonl")]
    return table.main([*results, *python, "--peers", peer, "--cells", cells, "--pairs", str(pairs)])


def lines(folder: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "table.jsonl").read_text().splitlines()]


def test_a_cell_is_a_line_with_both_engines_and_their_ratio(sitting: pathlib.Path) -> None:
    assert run(sitting, "b/qwen2.5-0.5b/int4") == 0
    (line,) = lines(sitting)
    assert KnownEngine.started == ["manta int4 1 640", "llamacpp int4 1 640"]
    assert (line["cell"], line["peer"], line["version"], line["commit"]) == (
        "b/qwen2.5-0.5b/int4",
        "llamacpp",
        "1",
        "abc",
    )
    assert line["bits"] == [[4.5, 8.125], [4.5, 8.5]]
    rows = {row["metric"]: row for row in line["rows"]}
    assert rows["decode step, 1 row"]["ratio"] == pytest.approx(2.0)
    assert rows["decode step, 1 row"]["interval"] == pytest.approx([2.0, 2.0])
    assert rows["decode step, 1 row"]["repetitions"] == 5
    written = (sitting / "table.md").read_text()
    assert (
        "| b/qwen2.5-0.5b/int4 | decode step, 1 row | llama.cpp | 1.00 ms | 2.00 ms | 2.00 [2.00, 2.00] | 5 |"
        in written
    )
    assert "4.5 (8.125) / 4.5 (8.5)" in written
    assert peers.PEERS["llamacpp"].settings in written


def test_a_later_run_measures_what_is_missing(sitting: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(sitting, "b/qwen2.5-0.5b/int4")
    with (sitting / "table.jsonl").open("a") as file:
        file.write('{"cell": "p/gpt')  # where a run was cut off
    KnownEngine.started.clear()
    assert run(sitting, "b/qwen2.5-0.5b/int4,p/gpt-oss*/bfloat16") == 0
    assert KnownEngine.started == ["manta auto 1 640", "llamacpp auto 1 640"]
    assert [line["cell"] for line in lines(sitting)] == ["b/qwen2.5-0.5b/int4", "p/gpt-oss-20b-4-layers/bfloat16"]
    monkeypatch.setattr(table, "version_of", lambda name, python: "2")
    assert run(sitting, "b/qwen2.5-0.5b/int4") == 0
    assert [line["version"] for line in lines(sitting)] == ["1", "1", "2"]
    assert (sitting / "table.md").read_text().count("| b/qwen2.5-0.5b/int4 | output, 1 row |") == 1


def test_a_cell_that_fails_says_why_and_is_tried_again(sitting: pathlib.Path) -> None:
    assert run(sitting, "b/*/bfloat16,e/*") == 1
    assert len(KnownEngine.started) == 6, "two engines for each mixture, and for the shape with both cells"
    failed = [line for line in lines(sitting) if "error" in line]
    assert [(line["cell"], line["error"]) for line in failed] == [("e/qwen2.5-0.5b/bfloat16", "no schemas here")]
    assert "| e/qwen2.5-0.5b/bfloat16 | failed: no schemas here | llama.cpp |" in (sitting / "table.md").read_text()
    KnownEngine.started.clear()
    assert run(sitting, "e/*") == 1
    assert len(KnownEngine.started) == 2


def test_a_peer_without_its_python_is_left_out(sitting: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(sitting, "b/qwen2.5-0.5b/int4", peer="vllm,llamacpp") == 0
    assert "vLLM is left out: its Python was not given" in capsys.readouterr().err
    assert {line["peer"] for line in lines(sitting)} == {"llamacpp"}


def test_floors_count_the_experts_that_are_read(tmp_path: pathlib.Path) -> None:
    """Against sums over the tensors by hand: one row reads two of four experts, many rows read all."""
    write_checkpoint(tmp_path / "model")
    shape = Shape(tmp_path / "model")
    attention, router, expert, head = 64 * (64 + 32 + 32 + 64), 4 * 64, 2 * 96 * 64, 500 * 64
    keys = 80 * 2 * 2 * 16 * 2
    one = shape.step_seconds(1, 80, RATES.bfloat16, RATES.bandwidth)
    assert one == pytest.approx((2 * (attention + router + 2 * expert + head) + keys) / RATES.bandwidth)
    four_bits = shape.step_seconds(1, 80, RATES.int8, RATES.bandwidth, 0.5, 1.0)
    assert four_bits == pytest.approx(((attention + router + 2 * expert) / 2 + head + keys) / RATES.bandwidth)
    assert shape.experts_hit(2) == pytest.approx(3.0), "a second token hits each expert that is left by half"
    assert shape.experts_hit(32) == pytest.approx(4.0)
    products = 512 * (attention + router + 2 * expert) + head + 2 * 64 * 512 * 513 / 2
    assert shape.prefill_seconds(1, 512, RATES.bfloat16) == pytest.approx(2 * products / RATES.bfloat16)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("notes.jsonl", "mine"),
        ("notes.jsonl", '{"cell": "a"}\n'),
        ("lines.jsonl", '{"cell": "p/gpt\n{"mine": 1}\n'),
        ("README.md", "# Mine\n"),
        ("2026.md", "# Figures\n"),
    ],
)
def test_no_file_of_another_program_is_written(name: str, text: str, sitting: pathlib.Path) -> None:
    """Neither the file that is named, nor the table that would lie beside it."""
    (sitting / name).write_text(text)
    with pytest.raises(ValueError, match=r"another file|such as table\.jsonl"):
        table.ResultsFile((sitting / name).with_suffix(".jsonl") if name == "2026.md" else sitting / name)
    assert [each.name for each in sitting.iterdir() if each.is_file()] == [name]
    assert (sitting / name).read_text() == text
