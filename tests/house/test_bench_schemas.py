"""`manta bench schemas` on a few schemas whose figures are known beforehand."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import signal
from typing import Any

import pytest

from benchmarks import objects, schema_engines, schemas
from benchmarks.property_order import in_order
from tests.patience import PATIENCE_S

UNIQUE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
PLAIN = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FILES: dict[str, tuple[dict[str, Any], list[tuple[Any, bool]]]] = {
    "unique.json": (UNIQUE, [([1, 2], True), ([1, 1], False)]),
    "plain.json": (PLAIN, [({"a": 1}, True), ({}, False)]),
    "nothing.json": ({"type": "integer", "minimum": 5, "maximum": 4}, []),
    "order.json": (PLAIN | {"properties": {"b": {}, "a": {}}, "required": []}, [({"a": 1, "b": 1}, True)]),
    "label.json": ({"type": "integer"}, [("a", True)]),
    "exponent.json": ({"type": "number", "minimum": 0}, [(1e-7, True)]),
}


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder of files in MaskBench's form."""
    found = tmp_path / "data"
    found.mkdir()
    for name, (schema, cases) in FILES.items():
        tests = [{"description": "", "data": data, "valid": valid} for data, valid in cases]
        (found / name).write_text(json.dumps({"schema": schema, "tests": tests}))
    return found


@pytest.mark.prove
def test_manta_is_measured_and_an_interrupted_run_goes_on(
    folder: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["--data", str(folder), "--engines", "manta", "--results", str(tmp_path / "rows"), "--sample"]
    assert schemas.main([*command, "2"]) == 0
    before = (tmp_path / "rows").read_text()
    assert schemas.main([*command, "0"]) == 0
    lines = (tmp_path / "rows").read_text()
    assert lines.startswith(before)
    rows = {row["file"]: row for row in map(json.loads, lines.splitlines()[1:])}
    assert set(rows) == set(FILES)
    assert len(lines.splitlines()) == 1 + len(FILES)
    assert rows["nothing.json"]["refused"]
    assert rows["unique.json"]["guarded"]
    assert rows["unique.json"]["invalid_accepted_by_grammar"] == 1
    assert "invalid_accepted" not in rows["unique.json"]
    assert (rows["order.json"]["valid_rejected"], rows["order.json"]["valid_rejected_for_order"]) == (1, 1)
    assert rows["label.json"]["valid_rejected_as_jsonschema_does"] == 1
    passing = {name for name, row in rows.items() if schemas.passes(row)}
    assert passing == {"unique.json", "plain.json", "nothing.json"}, (
        "that nothing satisfies a schema is the right answer"
    )
    assert [schemas.passes_in_order(rows[f"{name}.json"]) for name in ("order", "exponent", "label")] == [
        True,
        True,
        False,
    ]
    table = capsys.readouterr().out.splitlines()[-3:]
    assert [line.split("|")[1].strip() for line in table] == ["manta", "manta, grammar alone", "manta, with a guard"]
    monkeypatch.setattr(schemas.Child, "ask", lambda *_: pytest.fail("it is measured already"))
    assert schemas.main([*command, "0"]) == 0
    with pytest.raises(SystemExit):
        schemas.main([*command, "0", "--walks", "2"])
    assert "name another file" in capsys.readouterr().err


@pytest.mark.prove
def test_engines_are_compared(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    rows = tmp_path / "rows"
    assert schemas.main(["--data", str(folder), "--sample", "0", "--results", str(rows)]) == 0
    results = {(row["engine"], row["file"]): row for row in map(json.loads, rows.read_text().splitlines()[1:])}
    assert len(results) == len(schema_engines.ENGINES) * len(FILES)
    assert "refused" in results["llguidance", "unique.json"]
    assert results["xgrammar", "unique.json"]["invalid_accepted"] == 1
    assert results["llguidance", "order.json"]["valid_rejected_for_order"] == 1


def test_a_sample_is_the_beginning_of_one_random_order(folder: pathlib.Path) -> None:
    every = schemas.files_of(folder, 0)
    assert {file.name for file in every} == set(FILES)
    assert every != sorted(every)
    assert schemas.files_of(folder, 2) == every[:2]


@pytest.mark.prove
def test_a_slow_engine_loses_one_schema(folder: pathlib.Path) -> None:
    options = {"tokenizer": str(schemas.DEMO), "vocab_size": 4160, "eos": 2, "tests": 1, "walks": 0, "seconds": 60}
    child, file = schemas.Child("llguidance", argparse.Namespace(**options)), str(folder / "plain.json")
    try:
        assert "refused" not in child.ask(file)
        for sent, answer in ((signal.SIGSTOP, True), (signal.SIGSEGV, None)):  # one hangs, one dies between two schemas
            assert child.process is not None
            os.kill(child.process.pid, sent)
            child.wall_seconds = 0.1 if answer else PATIENCE_S
            assert child.ask(file).get("timed_out") is answer
            child.wall_seconds = PATIENCE_S
            assert "refused" not in child.ask(file)
    finally:
        child.close()


@pytest.mark.prove
def test_a_schema_that_costs_too_much_processor_time_is_timed_out(folder: pathlib.Path) -> None:
    options = {"tokenizer": str(schemas.DEMO), "vocab_size": 4160, "eos": 2, "tests": 0, "walks": 1000, "seconds": 0.1}
    child = schemas.Child("manta", argparse.Namespace(**options))
    child.wall_seconds = PATIENCE_S
    try:
        assert child.ask(str(folder / "unique.json")) == {"timed_out": True}
    finally:
        child.close()


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(SystemExit):
        schemas.main(["--data", ".", "--engines", "unheard"])


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ({"properties": {"a": {}}, "allOf": [{"properties": {"b": {}}}]}, "abc"),
        ({"allOf": [{"properties": {"b": {}}}], "properties": {"a": {}}}, "bac"),
        ({"oneOf": [{"properties": {"c": {"type": "string"}}}, {"properties": {"b": {}, "a": {}}}]}, "bac"),
        ({"$ref": "#/$defs/d", "$defs": {"d": {"properties": {"c": {}, "b": {}}}}}, "cba"),
    ],
)
def test_properties_follow_the_schemas_that_apply(schema: Any, names: str) -> None:
    def takes(schema: Any, value: Any) -> bool:
        return "c" not in schema.get("properties", {}) or "type" not in schema["properties"]["c"]

    assert "".join(in_order({"c": 1, "b": 2, "a": 3}, schema, takes)) == names


def test_instances_that_closed_objects_exclude_are_counted(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture
) -> None:
    open_object = {"type": "object", "properties": {"a": {}}}
    cases: dict[str, tuple[dict[str, Any], list[tuple[Any, bool]]]] = {
        "Open_1": (open_object, [({"a": 1}, True), ({"b": 1}, True), ({"a": 1, "c": 1}, True), ([], False)]),
        "Open_2": (open_object | {"additionalProperties": True}, [({"b": 1}, True)]),
        "Unlisted_1": ({"type": "object"}, [({"b": 1}, True), ("mislabelled", True)]),
    }
    for name, (schema, instances) in cases.items():
        tests = [{"data": data, "valid": valid} for data, valid in instances]
        (tmp_path / f"{name}.json").write_text(json.dumps({"schema": schema, "tests": tests}))
    assert objects.main(["--data", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| Open | 4 | 2 | 1 |",
        "| Unlisted | 1 | 0 | 0 |",
        "| all | 5 | 2 | 1 |",
    ]
