"""A guard never raises and never takes long, whatever a model writes: what would cost too much is not in the mask."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from manta.structured.backend import DeadEnd
from manta.structured.backends.guarded import GuardedSession
from manta.structured.masks import row_words
from manta.structured.schemas import judge
from manta.structured.schemas.documents import read
from tests.structured.ecma_patterns import any_pattern, finds, is_valid
from tests.structured.test_schema_conformance import VOCAB_SIZE, byte_tokens, grammar_of, validator

_TREE = {"type": "array", "items": {"$ref": "#/$defs/t"}}
_BRANCHING = {
    "$defs": {
        "t": {"anyOf": [_TREE | {"contains": {"const": 1}}, _TREE | {"contains": {"const": 2}}, {"enum": [1, 2, 3]}]}
    },
    "$ref": "#/$defs/t",
}
"""Each level of a value has two branches, which a judge without memory tries for each other."""
_UNIQUE = {"$defs": {"t": _TREE | {"uniqueItems": True}}, "$ref": "#/$defs/t"}
_LARGE = r"^(?=.*a.{9})(?=.*b.{9})\w+$"

HOSTILE: dict[str, tuple[Any, str, bool]] = {
    "a long integer": ({"type": "integer", "not": {"multipleOf": 7}}, "9" * 5000, True),
    "long unique integers": ({"type": "array", "uniqueItems": True}, f"[{'9' * 5000},{'9' * 5000}]", False),
    "an exponent": ({"type": "array", "uniqueItems": True}, f"[1e{'9' * 40},1]", True),
    "nested too deep": (_UNIQUE, "[" * 1200 + "]" * 1200, False),
    "nested": (_UNIQUE, "[" * 120 + "]" * 120, True),
    "branches": (_BRANCHING, "[" * 60 + "3" + ",1]" * 60, True),
    "no branch": (_BRANCHING, "[" * 60 + "3" + "]" * 60, False),
    "a pattern that backtracks": (
        {"type": "array", "items": {"type": "string"}, "contains": {"pattern": "^(a+)+$"}},
        f'["{"a" * 2000}b"]',
        False,
    ),
    "a name whose pattern backtracks": (
        {"type": "object", "minProperties": 2, "patternProperties": {"^(x+)+y$": False}},
        f'{{"{"x" * 2000}": 1, "z": 1}}',
        True,
    ),
    "a large automaton": ({"type": "string", "pattern": _LARGE}, json.dumps("ab" * 500), True),
    "evaluated names": (
        {"type": "object", "unevaluatedProperties": False}
        | {"anyOf": [{"patternProperties": {r"^\p{L}\u{31}$": True}}, {"properties": {"b": True}, "required": ["b"]}]},
        '{"a1": 1, "é1": 2}',
        True,
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_guard_takes_or_refuses_each_text_without_raising(name: str) -> None:
    schema, text, is_valid_text = HOSTILE[name]
    session = grammar_of(schema).session()
    assert isinstance(session, GuardedSession)
    row = np.zeros(row_words(VOCAB_SIZE), dtype=np.int32)
    is_taken = True
    for index, byte in enumerate(text.encode()):
        if index % 101 == 0 or index > len(text) - 20:
            session.fill(row)
        if not session.accept(byte_tokens()[byte]):
            is_taken = False
            break
    assert (is_taken and session.is_accepting()) == is_valid_text


def test_a_value_that_costs_too_much_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "MAX_COST", 5000)
    for schemas in ([{"not": {"items": {"enum": list(range(100))}}}], [{"contains": {"const": -1}}]):
        asked = judge.Judge(read(True))
        verdicts = [asked.is_valid([*([1] * count), -1], schemas) for count in (10, 5000)]
        assert verdicts == [True, False]


def test_all_verdicts_of_a_mask_share_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "MAX_MASK_COST", 20_000)
    asked, schemas = judge.Judge(read(True)), [{"pattern": "^(a|b)*$"}]
    assert all(asked.is_valid("a" * 200, schemas) for _ in range(100))
    with asked.one_mask():
        verdicts = [asked.is_valid("a" * 200, schemas) for _ in range(100)]
    assert verdicts == sorted(verdicts, reverse=True)
    assert (verdicts[0], verdicts[-1]) == (True, False)
    assert asked.is_valid("a" * 200, schemas)


def test_random_texts_never_raise() -> None:
    rng = random.Random(8)
    pieces = ["[", "]", "{", "}", ",", ":", '"a"', '"a1":', "1", "-0", "1e9", "9" * 400, '"\\ud800"', "null", "true"]
    for schema, _, _ in HOSTILE.values():
        grammar = grammar_of(schema)
        for _ in range(10):
            session = grammar.session()
            for piece in rng.choices(pieces, k=40):
                copy = session.fork()
                if all(copy.accept(byte_tokens()[byte]) for byte in piece.encode()):
                    session = copy
                    try:
                        session.fill(np.zeros(row_words(VOCAB_SIZE), dtype=np.int32))
                    except DeadEnd:
                        break


@pytest.mark.parametrize("seed", range(3))
def test_verdicts_on_names_are_those_of_the_specification(seed: int) -> None:
    """`jsonschema` judges a schema whose patterns Python reads as ECMA does."""
    rng = random.Random(seed)
    patterns = ["^a", "b$", "^[ab]+$", "x|^y", "."]
    for _ in range(60):
        inner = [
            rng.choice(
                [
                    {"patternProperties": {rng.choice(patterns): {"type": "integer"}}},
                    {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
                    {"patternProperties": {rng.choice(patterns): True}, "additionalProperties": {"type": "string"}},
                    {
                        "if": {"required": ["x"]},
                        "then": {"properties": {"x": True}},
                        "else": {"properties": {"y": True}},
                    },
                    {"dependentSchemas": {"a": {"properties": {"b": True}}}},
                    {"propertyNames": {"pattern": rng.choice(patterns)}},
                ]
            )
            for _ in range(3)
        ]
        schema = {rng.choice(["anyOf", "allOf", "oneOf"]): inner[:2], **inner[2]}
        schema["unevaluatedProperties"] = rng.choice([False, {"type": "integer"}])
        asked = judge.Judge(read(schema))
        for _ in range(10):
            names = rng.sample(["a", "b", "ab", "x", "y", "xa"], rng.randint(0, 3))
            value = {name: rng.choice([1, "s"]) for name in names}
            assert asked.is_valid(value, [schema]) == validator(schema).is_valid(value), (schema, value)


def test_verdicts_on_texts_are_those_of_ecma() -> None:
    rng, asked = random.Random(11), judge.Judge(read(True))
    for _ in range(100):
        pattern = any_pattern(rng, depth=2)
        if is_valid(pattern):
            assert asked.finds(pattern, "a1é-b") == finds(pattern, "a1é-b")
