"""A schema without an exact grammar is loosened, and the guard keeps it whole: nothing wrong passes, nothing right is
lost.
"""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import jsonschema
import pytest

from manta.structured.backend import DeadEnd, Grammar
from manta.structured.backends.guarded import GuardedSession
from manta.structured.backends.llguidance_grammar import Way
from manta.structured.constraint import ConstraintError, ConstraintSpec
from manta.structured.schemas.documents import read
from manta.structured.schemas.loosening import loosened
from tests.pairs import in_turns
from tests.schema_cases import CASES, Case
from tests.structured.grammar_walk import text_of, walk
from tests.structured.session_checks import check_mask_byte_by_byte
from tests.structured.test_schema_conformance import (
    accepts,
    grammar_of,
    make_backend_once,
    validator,
    vocabulary,
)

_INT = {"type": "integer"}
_NODE = {"type": "object", "properties": {"v": _INT, "next": {"$ref": "#/$defs/n"}}, "required": ["v"]}

REFUSED_BEFORE: list[tuple[Any, list[Any], list[Any]]] = [
    (
        {"$defs": {"n": _NODE}, "allOf": [{"$ref": "#/$defs/n"}, {"not": {"required": ["w"]}}]}
        | {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}], "properties": {"next": {"minProperties": 2}}},
        [{"v": 1}, {"next": {"v": 2, "next": {"v": 3}}, "v": 1}],
        [{"v": "1"}, {"v": 1, "next": {"v": 2}}, {"v": 1, "next": {"v": 2, "next": {}}}],
    ),
    (
        {"type": "object", "patternProperties": {"a": _INT}, "not": {"patternProperties": {"^.{1,3}$": _INT}}}
        | {"additionalProperties": {"type": "string"}},
        [{"b": "x"}, {"abcd": 1, "b": "x"}],
        [{"abcd": 1}, {"a": "x"}, {"a": 1}, {"b": 1}],
    ),
    (
        {"type": "object", "patternProperties": {"^a(?=b)": _INT, "b$": {"minimum": 3}, "cc": False}},
        [{"ab": 3, "x": None}, {"abc": 1}, {"b": "x"}],
        [{"ab": 2}, {"ab": "x"}, {"cc": 1}, {"abc": "x"}],
    ),
    ({"type": "integer", "minimum": 5, "maximum": 2**60}, [5, 2**60, 2**53 + 1], [4, 2**60 + 1, 2**70, -1]),
    ({"type": "array", "items": {"type": "number", "maximum": 2**60}}, [[2**60, 1]], [[2**60 + 1]]),
    ({"enum": [2**60 + 1, "x"]}, ["x", 2**60 + 1], [2**60, "y", 1]),
    ({"type": "string", "pattern": r"^\<[a-z]\>$"}, ["<a>"], ["a", r"\<a\>"]),
    (
        {"type": "object", "patternProperties": {f"^{c}|z": {"type": ["string", "null"]} for c in "abcdef"}},
        [{"a": "x", "zz": None, "y": 1}],
        [{"a": 1}, {"yz": 1}],
    ),
]
cases = pytest.mark.parametrize(
    ("schema", "valid", "invalid"), REFUSED_BEFORE, ids=lambda value: json.dumps(value)[:50]
)


def name_of(value: Case | Way) -> str:
    return value if isinstance(value, str) else json.dumps(value.schema, ensure_ascii=False)[:60]


@functools.cache
def _grammar(text: str) -> Grammar:
    return grammar_of(json.loads(text), any_whitespace=False)


def grammar(schema: Any) -> Grammar:
    return _grammar(json.dumps(schema))


@cases
def test_what_llguidance_refuses_is_served(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    judge = jsonschema.Draft202012Validator(schema)
    assert all(map(judge.is_valid, valid))
    assert not any(map(judge.is_valid, invalid))
    assert [value for value in valid if not accepts(grammar(schema), value)] == []
    assert [value for value in invalid if accepts(grammar(schema), value)] == []


@cases
def test_walks_at_random_end_in_valid_instances(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    judge, rng = jsonschema.Draft202012Validator(schema), random.Random(json.dumps(schema))
    for _ in range(12):
        try:
            token_ids, ended = walk(grammar(schema).session(), vocabulary(), rng, free=15, longest=120)
        except DeadEnd:
            continue
        if ended:
            text = text_of(token_ids, vocabulary())
            assert judge.is_valid(json.loads(text)), text


@cases
def test_a_mask_equals_checking_bytes_one_by_one(schema: Any, valid: list[Any], invalid: Any) -> None:
    rng, single = random.Random(json.dumps(schema)), vocabulary().byte_token_ids()
    for value in valid:
        data = json.dumps(value).encode()
        for cut in rng.sample(range(len(data)), min(5, len(data))):
            session = grammar(schema).session()
            assert all(session.accept(single[byte]) for byte in data[:cut])
            if isinstance(session, GuardedSession):
                check_mask_byte_by_byte(session, vocabulary(), rng, 200)


@pytest.mark.parametrize(("case", "way"), in_turns(CASES, ["guarded", "loosened", "apart"]), ids=name_of)
def test_guards_do_not_change_the_instances(case: Case, way: Way) -> None:
    backend = make_backend_once("llguidance")
    spec = ConstraintSpec(kind="json_schema", text=json.dumps(case.schema), any_whitespace=False)
    try:
        found = backend.load(spec, backend.compiled_by(spec, way))
    except ConstraintError:
        return
    check = validator(case.schema)
    assert [value for value in case.invalid if accepts(found, value)] == []
    assert [value for value in case.valid if not accepts(found, value)] == []
    try:
        token_ids, ended = walk(found.session(), vocabulary(), random.Random(way), free=10, longest=100)
    except DeadEnd:
        return
    if ended:
        assert check.is_valid(json.loads(text_of(token_ids, vocabulary())))


def test_older_drafts_keywords_are_not_loosened() -> None:
    schema = {"$schema": "http://json-schema.org/draft-04/schema#", "oneOf": [{"const": 1}, {"type": "integer"}]}
    with pytest.raises(ConstraintError, match="const cannot be enforced: the draft"):
        loosened(read(schema), joins=True)
