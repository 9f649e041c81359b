"""`manta bench schemas` on four schemas whose figures are known beforehand."""

from __future__ import annotations

import json
import os
import pathlib
import signal
from typing import Any

import pytest

from benchmarks import schema_engines, schemas
from tests.patience import PATIENCE_S

UNIQUE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
PLAIN = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FILES: dict[str, tuple[dict[str, Any], list[tuple[Any, bool]]]] = {
    "unique.json": (UNIQUE, [([1, 2], True), ([1, 1], False)]),
    "plain.json": (PLAIN, [({"a": 1}, True), ({}, False)]),
    "wrong.json": ({"type": "integer", "minimum": 5, "maximum": 4}, []),
    "order.json": (PLAIN | {"properties": {"b": {}, "a": {}}, "required": []}, [({"a": 1, "b": 1}, True)]),
}


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """MaskBench's form, all in half 1."""
    for name, (schema, cases) in FILES.items():
        number = next(n for n in range(99) if schemas._parity(f"{n}-{name}") == 1)
        tests = [{"description": "", "data": data, "valid": valid} for data, valid in cases]
        (tmp_path / f"{number}-{name}").write_text(json.dumps({"schema": schema, "tests": tests}))
    (tmp_path / next(f"{n}.json" for n in range(99) if schemas._parity(f"{n}.json") == 0)).write_text("no JSON")
    return tmp_path


@pytest.mark.prove
def test_engines_are_compared_on_one_half(folder: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
    rows = folder / "rows.jsonl"
    names = ",".join(schema_engines.ENGINES)
    found = schemas.main(["--data", str(folder), "--engines", names, "--json", str(rows), "--sample", "0"])
    assert found == 0
    printed = capsys.readouterr()
    results = {row["engine"]: row for row in map(json.loads, rows.read_text().splitlines())}
    assert len(printed.out.splitlines()) == 4 + len(results)
    assert "manta: 100%" in printed.err
    counts = {
        name: (row["accepted"], row["refused"], row["wrong"], row["forbidden"], row["out_of_order"])
        for name, row in results.items()
    }
    assert counts["manta"] == (3, 1, 0, 0, 1)
    assert counts["llguidance"] == (2, 2, 0, 0, 1)
    assert counts["xgrammar"][2] == 1
    assert any("unique" in name for name in results["xgrammar"]["wrong_files"])
    assert results["manta"]["rows_struck"] > 0
    assert results["manta"]["failed"] == 0
    assert results["manta"]["mask_us_p99"] > 0
    assert "wrong.json" in "".join(results["manta"]["refused_files"])


def test_a_sample_of_a_half_is_deterministic(folder: pathlib.Path) -> None:
    assert len(schemas.files_of(folder, 1, 0)) == 4
    assert schemas.files_of(folder, 1, 2) == schemas.files_of(folder, 1, 2)
    assert len(schemas.files_of(folder, 2, 0)) == 1


@pytest.mark.prove
def test_a_slow_engine_loses_one_schema(folder: pathlib.Path) -> None:
    options = schemas.argparse.Namespace(tokenizer=str(schemas.DEMO), vocab_size=4160, eos=2, seconds=PATIENCE_S)
    job = {"file": str(schemas.files_of(folder, 1, 0)[0]), "tests": 1, "walks": 0}
    child = schemas.Child("llguidance", options)
    try:
        assert "refused" not in child.ask(job)
        assert child.process is not None
        os.kill(child.process.pid, signal.SIGSTOP)
        child.seconds = 0.1
        assert child.ask(job) == {"refused": "it took more than 0.1 s"}
        child.seconds = PATIENCE_S
        assert "refused" not in child.ask(job)
    finally:
        child.close()


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(SystemExit):
        schemas.main(["--data", ".", "--engines", "unheard"])
