"""The published suites of JSON Schema, if they are there: schemas are enforced or refused, and figures only improve.

`MANTA_SCHEMA_SUITE` names a checkout of github.com/json-schema-org/JSON-Schema-Test-Suite, and `MANTA_MASKBENCH` a
directory with the files of `maskbench/data` from github.com/guidance-ai/jsonschemabench. Without them these tests are
skipped.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from manta.structured.backend import DeadEnd, Grammar
from manta.structured.constraint import ConstraintError
from manta.structured.schemas.documents import DRAFTS
from tests.conftest import PROVE
from tests.structured.test_schema_conformance import accepts, grammar_of, wild_output

SUITE = os.environ.get("MANTA_SCHEMA_SUITE")
MASKBENCH = os.environ.get("MANTA_MASKBENCH")

MOST_REFUSED = {"draft4": 2, "draft6": 13, "draft7": 13, "draft2019-09": 27, "draft2020-12": 35}
"""Schemas of the suite that may be refused: those that nothing satisfies, `$dynamicRef` and `$recursiveRef` across
resources, and references to files that are not there.
"""
MOST_FORBIDDEN = {"draft4": 20, "draft6": 29, "draft7": 89, "draft2019-09": 89, "draft2020-12": 112}
"""Valid instances of the suite that may not be writable: another order of properties, 1.0 for 1, leap seconds, encoded
host names, and formats as assertions where the suite has them as annotations.
"""
SHARE_FORBIDDEN = {"as_schema": 0.05, "closed": 0.12}
"""Largest share of MaskBench's valid instances that may not be writable, by `additional_properties`: those in
another order than the schema's, and those whose objects have more than the listed properties.
"""
SHARE_REFUSED = 0.005
"""Largest share of MaskBench's schemas that may be refused; most of them nothing satisfies."""
NUM_FILES = 12_000 if PROVE else 300
readings = pytest.mark.parametrize("additional", SHARE_FORBIDDEN)
"""The suites run as their schemas say, and with the server's default."""


def _groups(draft: str) -> Iterator[dict[str, Any]]:
    folder = pathlib.Path(str(SUITE)) / "tests" / draft
    for file in [*sorted(folder.glob("*.json")), *sorted(folder.glob("optional/format/*.json"))]:
        if file.name != "refRemote.json":  # what it refers to lies on a server
            yield from json.loads(file.read_text())


def _uri(draft: str) -> str:
    number = int(draft.removeprefix("draft").partition("-")[0])
    return next(uri for uri, known in DRAFTS.items() if known == number)


@pytest.mark.skipif(SUITE is None, reason="MANTA_SCHEMA_SUITE names no checkout of JSON-Schema-Test-Suite")
@readings
@pytest.mark.parametrize("draft", MOST_REFUSED)
def test_the_reference_suite_is_enforced_or_refused(draft: str, additional: Any, record_property: Any) -> None:
    counts: Counter[str] = Counter()
    for group in _groups(draft):
        schema = group["schema"]
        if isinstance(schema, dict):
            schema = {"$schema": _uri(draft), **schema}
        counts["schemas"] += 1
        try:
            grammar = grammar_of(schema, additional_properties=additional)
        except ConstraintError:
            counts["refused"] += 1
            continue
        for case in group["tests"]:
            accepted = accepts(grammar, case["data"])
            assert case["valid"] or not accepted, (schema, case)
            counts["forbidden"] += case["valid"] and not accepted
    for name, value in counts.items():
        record_property(name, value)
    assert counts["refused"] <= MOST_REFUSED[draft]
    assert additional == "closed" or counts["forbidden"] <= MOST_FORBIDDEN[draft]


def _check_instances(grammar: Grammar, schema: Any, cases: list[dict[str, Any]], counts: Counter[str]) -> None:
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    judge = kind(schema, format_checker=kind.FORMAT_CHECKER)
    for case in cases:
        accepted = accepts(grammar, case["data"])
        if case["valid"]:
            counts["valid"] += 1
            counts["forbidden"] += not accepted
        else:
            assert not accepted or judge.is_valid(case["data"]), (schema, case["data"])
    try:
        text = wild_output(grammar.session(), random.Random(json.dumps(schema)))
    except DeadEnd:
        counts["dead ends"] += 1
        return
    assert text is None or judge.is_valid(json.loads(text)), (schema, text)


@pytest.mark.skipif(MASKBENCH is None, reason="MANTA_MASKBENCH names no directory with MaskBench's data")
@readings
def test_maskbench_is_enforced_and_seldom_refused(additional: Any, record_property: Any) -> None:
    files = sorted(pathlib.Path(str(MASKBENCH)).glob("*.json"))
    random.Random(0).shuffle(files)
    counts: Counter[str] = Counter()
    for file in files[:NUM_FILES]:
        data = json.loads(file.read_text())
        counts["schemas"] += 1
        try:
            grammar = grammar_of(data["schema"], additional_properties=additional)
        except ConstraintError:
            counts["refused"] += 1
            continue
        short = [case for case in data["tests"] if len(json.dumps(case["data"])) < 5000]
        _check_instances(grammar, data["schema"], short[:6], counts)
    for name, value in counts.items():
        record_property(name, value)
    assert counts["refused"] <= SHARE_REFUSED * counts["schemas"] + 2
    assert counts["forbidden"] <= SHARE_FORBIDDEN[additional] * counts["valid"]
