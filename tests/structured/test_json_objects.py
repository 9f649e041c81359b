"""Requests say more of JSON objects than their schemas: white space, further properties, the order of properties."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from manta.structured.backend import DeadEnd
from manta.structured.constraint import ConstraintError, ConstraintSpec, JsonObjects
from manta.structured.schemas.progress import MAX_UNLISTED
from tests.schema_cases import CASES
from tests.structured.test_schema_conformance import (
    accepts,
    accepts_text,
    grammar_of,
    grammar_of_spec,
    validator,
    wild_output,
)

NUMBERS = {"type": "array", "items": {"type": "integer"}}
UNIQUE = {**NUMBERS, "uniqueItems": True}
TAG = {"begin": "<f>", "end": "</f>"}


def _lark(schema: Any, **options: Any) -> ConstraintSpec:
    return ConstraintSpec(kind="lark", text=f"start: %json {json.dumps(schema)}", **options)


def _tag(schema: Any) -> ConstraintSpec:
    tag = {"structures": [{**TAG, "schema": schema}], "triggers": ["<f>"]}
    return ConstraintSpec(kind="structural_tag", text=json.dumps(tag))


DOORS = {
    "schema": lambda schema: ConstraintSpec(kind="json_schema", text=json.dumps(schema)),
    "loose": lambda schema: ConstraintSpec(kind="json_schema", text=json.dumps(schema), loose=True),
    "object": lambda schema: ConstraintSpec(kind="json_object"),
    "lark": _lark,
    "loose lark": lambda schema: _lark({**schema, "x-guidance": {"lenient": True}}, loose=True),
    "tag": _tag,
}


@pytest.mark.parametrize("items", [NUMBERS, UNIQUE], ids=["grammar", "guard"])
@pytest.mark.parametrize("door", DOORS)
def test_white_space_is_bounded(door: str, items: dict[str, Any]) -> None:
    """A model could idle there until `max_tokens`."""
    schema = {"type": "object", "properties": {"a": items}, "required": ["a"], "additionalProperties": False}
    grammar = grammar_of_spec(DOORS[door](schema))
    begin, end = (TAG["begin"], TAG["end"]) if door == "tag" else ("", "")
    for template in ('{"a":%s[1]}', '{%s"a":[1]}', '{"a":[1]%s}', '{"a":[%s1]}', '{"a"%s:[1]}'):
        assert accepts_text(grammar, begin + template % (" " * 20) + end)
        assert not accepts_text(grammar, begin + template % (" " * 21) + end)


def test_white_space_can_be_fixed_within_a_grammar() -> None:
    grammar = grammar_of_spec(_lark({"type": "array", "items": {"type": "integer"}}, any_whitespace=False))
    assert accepts_text(grammar, "[1, 2]")
    assert not accepts_text(grammar, "[1,2]")
    own = {**NUMBERS, "x-guidance": {"whitespace_pattern": "[ ]{0,30}"}}
    assert accepts_text(grammar_of_spec(_lark(own)), f"[{' ' * 30}1]")
    tight = grammar_of_spec(_lark({**NUMBERS, "x-guidance": {"whitespace_flexible": False}}))
    assert accepts_text(tight, "[1,2]")
    assert not accepts_text(tight, "[1, 2]")


# ---- further properties ----------------------------------------------------------------------------------------------

NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "v": {"type": "integer"}}}
A, B = {"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "integer"}}}
KINDS = [
    {"properties": {"kind": {"const": "x"}, "a": True}, "required": ["kind"]},
    {"properties": {"kind": {"const": "y"}, "b": True}, "required": ["kind"]},
]
CLOSED = [
    ({"type": "object", **A}, [{}, {"a": 1}], [{"b": 1}, {"a": 1, "b": 1}]),
    ({"type": "object"}, [{"a": 1}], []),
    ({"type": "object", "properties": {}}, [{"a": 1}], []),
    ({"type": "object", **A, "additionalProperties": True}, [{"a": 1, "b": 1}], []),
    ({"type": "object", **A, "unevaluatedProperties": True}, [{"a": 1, "b": 1}], []),
    ({"type": "object", **A, "required": ["a", "b"]}, [{"a": 1, "b": 2}], [{"a": 1, "b": 2, "c": 3}]),
    ({"type": "object", **A, "patternProperties": {"^x": True}}, [{"a": 1, "x1": 2}], [{"y": 1}]),
    ({"$ref": "#/$defs/node", "$defs": {"node": NODE}}, [{"next": {"v": 1}}], [{"next": {"w": 1}}, {"w": 1}]),
    ({"type": "object", "allOf": [A, B]}, [{"a": 1, "b": 1}], [{"a": 1, "c": 1}]),
    ({"type": "object", **A, "allOf": [{"$ref": "#/$defs/b"}], "$defs": {"b": B}}, [{"a": 1, "b": 1}], [{"c": 1}]),
    ({"type": "object", "anyOf": [A, {**B, "required": ["b"]}]}, [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}, {"c": 1}]),
    ({"anyOf": [{"type": "object", **A}, {"type": "null"}]}, [None, {"a": 1}], [{"b": 1}]),
    ({"type": "object", "oneOf": KINDS}, [{"kind": "x", "a": 1}], [{"kind": "x", "b": 1}, {"kind": "y", "c": 1}]),
    ({"type": "object", "oneOf": [A, {**B, "required": ["b"]}]}, [{"a": 1}], [{"c": 1}, {"a": 1, "b": 1}]),
    ({"type": "object", **A, "if": {"required": ["a"]}, "then": B}, [{"a": 1, "b": 1}], [{"c": 1}]),
    ({"type": "array", "items": {"type": "object", **A}}, [[{"a": 1}]], [[{"b": 1}]]),
    ({"type": "object", **A, "not": {"required": ["a"], **B}}, [{}], [{"b": 1}, {"c": 1}]),
    ({"$schema": "http://json-schema.org/draft-04/schema#", "type": "object", **A}, [{"a": 1}], [{"b": 1}]),
    ({"type": "object", **A, "minProperties": 2}, [{"a": 1, "z": 1}], []),
    ({"const": {"a": 1, "b": 1}, **A}, [{"a": 1, "b": 1}], []),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), CLOSED, ids=lambda case: json.dumps(case)[:60])
def test_listed_properties_exclude_others(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    closed = grammar_of(schema, additional_properties=None)
    assert [value for value in valid if not accepts(closed, value)] == []
    assert [value for value in invalid if accepts(closed, value)] == []
    judge, as_schema = validator(schema), grammar_of(schema)
    assert all(map(judge.is_valid, valid)), "the case is wrong"
    assert [value for value in invalid if judge.is_valid(value) and not accepts(as_schema, value)] == []


def test_schemas_in_grammars_are_closed_too() -> None:
    schema = {"type": "object", **A}
    for spec in (_lark(schema), _lark({**schema, "x-guidance": {"lenient": True}}, loose=True)):
        assert not accepts_text(grammar_of_spec(spec), '{"b":1}')
    assert accepts_text(grammar_of_spec(_lark(schema, additional_properties="as_schema")), '{"b":1}')
    assert not accepts_text(grammar_of_spec(_tag(schema)), '<f>{"b":1}</f>')


def test_the_engine_s_options_are_for_constraints_that_do_not_say_it() -> None:
    options = JsonObjects(additional_properties="as_schema", property_order="any")
    spec = ConstraintSpec(kind="json_schema", text="{}", property_order="schema")
    applied = options.applied(spec)
    assert (applied.additional_properties, applied.property_order) == ("as_schema", "schema")
    choice = ConstraintSpec(kind="choice", text='["a"]')
    assert options.applied(choice) == choice


# ---- order -----------------------------------------------------------------------------------------------------------

ORDER = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "abc": {"type": "boolean"}, "ü": {"$ref": "#/$defs/inner"}},
    "required": ["ü", "a"],
    "$defs": {"inner": {"type": "object", "properties": {"x": True, "y": True}, "required": ["y"]}},
}


def _texts(value: Any) -> list[str]:
    """Returns the JSON of a value with the properties of its outer object in every order."""
    return [json.dumps(dict(pairs), ensure_ascii=False) for pairs in itertools.permutations(value.items())]


@pytest.mark.parametrize("is_within", [False, True], ids=["alone", "in a grammar"])
@pytest.mark.parametrize("additional", ["closed", "as_schema"])
def test_properties_may_come_in_any_order(is_within: bool, additional: Any) -> None:
    options = {"additional_properties": additional, "property_order": "any"}
    grammar = grammar_of_spec(_lark(ORDER, **options)) if is_within else grammar_of(ORDER, **options)
    inner = {"x": [1], "y": {}}
    for value in ({"a": 1, "ü": inner}, {"a": 1, "abc": True, "ü": {"y": 1}}, {"a": 1, "ü": {"y": 2, "x": 1}}):
        assert [text for text in _texts(value) if not accepts_text(grammar, text)] == []
    for value in ({"a": 1}, {"ü": inner}, {"a": 1, "ü": {"x": 1}}, {"a": True, "ü": inner}, {}):
        assert [text for text in _texts(value) if accepts_text(grammar, text)] == []
    twice = ['{"a":1,"ü":{"y":1},"a":2}', '{"ü":{"y":1,"x":1,"y":1},"a":2}', '{"\\u0061":1,"ü":{"y":1}}']
    assert [text for text in twice if accepts_text(grammar, text)] == []
    assert accepts_text(grammar, '{"a":1,"ü":{"y":1},"z":1,"abc":true}') == (additional == "as_schema")
    assert accepts_text(grammar, '{"z":1,"a":1,"ü":{"y":1}}') == (additional == "as_schema")
    assert not accepts_text(grammar, '{"a":1,"ü":{"y":1},"z":1,"z":1}')
    many = {f"z{number}": number for number in range(MAX_UNLISTED + 1)}
    assert not accepts(grammar, {**many, "a": 1, "ü": {"y": 1}})
    walks = [wild_output(grammar.session(), random.Random(seed)) for seed in range(6)]
    values = [json.loads(text, object_pairs_hook=_without_repeats) for text in walks if text is not None]
    assert values
    assert all(map(validator(ORDER).is_valid, values))


def test_names_that_need_others_may_come_in_any_order() -> None:
    schema = {"type": "object", "properties": dict.fromkeys("abc", True), "dependentRequired": {"a": ["b", "c"]}}
    grammar = grammar_of(schema, property_order="any")
    assert [text for text in _texts({"a": 1, "b": 2, "c": 3}) if not accepts_text(grammar, text)] == []
    assert accepts_text(grammar, '{"c":1,"b":1}')
    assert not accepts_text(grammar, '{"b":1,"a":1}')


def test_an_object_that_may_be_null_has_any_order() -> None:
    schema = {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/order"}, {"type": "null"}]}}
    schema["$defs"] = {"order": {"type": "object", "properties": {"a": True, "b": True}, "required": ["a", "b"]}}
    grammar = grammar_of(schema, property_order="any")
    assert accepts_text(grammar, '[null,{"b":1,"a":2},{"a":1,"b":2}]')
    assert not accepts_text(grammar, '[{"b":1}]')


KIND_A = {"properties": {"kind": {"const": "a"}, "x": {"$ref": "#/$defs/two"}}, "required": ["kind", "x"]}
KIND_B = {"properties": {"kind": {"const": "b"}, "x": {"properties": {"p": {"type": "integer"}}}, "y": True}}
BRANCHES: list[tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]] = [
    (
        {
            "oneOf": [
                {**KIND_A, "type": "object", "additionalProperties": False},
                {**KIND_B, "type": "object", "required": ["kind", "x"], "additionalProperties": False},
            ],
            "$defs": {
                "two": {"type": "object", "properties": {"p": {"type": "integer"}, "q": True}, "required": ["p", "q"]}
            },
        },
        [{"kind": "a", "x": {"p": 1, "q": 2}}, {"kind": "b", "x": {"p": 1}}, {"kind": "b", "x": {}, "y": 1}],
        [{"kind": "a", "x": {"p": 1}}, {"kind": "a", "x": {"p": 1, "q": 1}, "y": 1}, {"x": {"p": 1, "q": 2}}],
    ),
    (
        {
            "type": "object",
            "properties": {name: {"type": "integer"} for name in "abc"},
            "anyOf": [{"required": ["a", "b"]}, {"required": ["c"]}],
        },
        [{"a": 1, "b": 2}, {"c": 3}, {"c": 3, "a": 1}],
        [{}, {"a": 1}, {"b": 2}, {"b": 2, "c": "x"}],
    ),
    (
        {
            "allOf": [{"properties": {"a": True}, "required": ["a"]}, {"$ref": "#/$defs/d"}],
            "type": "object",
            "$defs": {"d": {"properties": {"b": {"type": "integer"}, "c": True}, "required": ["b"]}},
        },
        [{"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}],
        [{"a": 1}, {"b": 2, "c": 3}, {"a": 1, "b": "x"}],
    ),
    (
        {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}, "b": True, "c": True},
            "required": ["a"],
            "if": {"properties": {"a": {"const": 1}}},
            "then": {"required": ["b"]},
            "else": {"required": ["c"]},
        },
        [{"a": 1, "b": 0}, {"a": 2, "c": 0}, {"a": 2, "b": 0, "c": 0}],
        [{"a": 1, "c": 0}, {"a": 2, "b": 0}, {"b": 0, "c": 0}],
    ),
    (
        {
            "type": "object",
            "properties": {"id": {"type": "integer"}, "x-y": {"maxLength": 3}},
            "required": ["id"],
            "patternProperties": {"^x-": {"type": "string"}},
            "additionalProperties": False,
        },
        [{"id": 1, "x-a": "s", "x-y": "abc"}, {"x-b": "s", "id": 1}],
        [{"x-a": "s"}, {"id": 1, "x-y": "abcd"}, {"id": 1, "x-y": 1}, {"id": 1, "y": "s"}, {"id": 1, "x-a": 1}],
    ),
    (
        {
            "type": "object",
            "properties": dict.fromkeys("abc", True),
            "not": {"required": ["a", "b"]},
            "dependentSchemas": {"c": {"required": ["b"]}},
            "additionalProperties": False,
        },
        [{"a": 1}, {"b": 1, "c": 2}, {}],
        [{"a": 1, "b": 1}, {"c": 1}, {"a": 1, "c": 1}],
    ),
    (
        {
            "type": "object",
            "properties": dict.fromkeys("abcd", True),
            "required": ["a", "b"],
            "minProperties": 3,
            "maxProperties": 3,
            "additionalProperties": {"type": "integer"},
        },
        [{"a": 1, "b": 1, "c": 1}, {"d": 1, "a": 1, "b": 1}, {"a": 1, "b": 1, "z": 1}],
        [{"a": 1, "b": 1}, {"a": 1, "c": 1, "d": 1}, {"a": 1, "b": 1, "c": 1, "d": 1}],
    ),
]
"""Schemas whose objects are described by several schemas, with valid and invalid instances."""


@pytest.mark.few(3)
@pytest.mark.parametrize(("schema", "valid", "invalid"), BRANCHES)
def test_what_several_schemas_describe_may_come_in_any_order(
    schema: dict[str, Any], valid: list[Any], invalid: list[Any]
) -> None:
    options: dict[str, Any] = {"additional_properties": "as_schema", "property_order": "any"}
    check = validator(schema)
    assert all(map(check.is_valid, valid)), "the case is wrong"
    assert not any(map(check.is_valid, invalid)), "the case is wrong"
    grammar = grammar_of(schema, **options)
    assert [text for value in valid for text in _texts(value) if not accepts_text(grammar, text)] == []
    assert [text for value in invalid for text in _texts(value) if accepts_text(grammar, text)] == []
    walks = [wild_output(grammar.session(), random.Random(seed)) for seed in range(8)]
    values = [json.loads(text) for text in walks if text is not None]
    assert values
    assert all(map(check.is_valid, values))


def _random_value(chooser: random.Random, depth: int) -> Any:
    simple = ({"const": 1}, {"type": "integer"}, {"enum": ["x", "y"]}, {"type": "string"}, True, {"type": "null"})
    return _random_object(chooser, depth + 1) if chooser.random() < 0.2 else chooser.choice(simple)


def _random_object(chooser: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of objects with the names a, b and c, of one to four schemas."""

    def some(probability: float) -> bool:
        return chooser.random() < probability

    schema: dict[str, Any] = {"type": "object"}
    schema["properties"] = {name: _random_value(chooser, depth) for name in "abc" if some(0.6)}
    schema["required"] = [name for name in "abc" if some(0.4)]
    if some(0.4):
        schema["additionalProperties"] = chooser.choice([False, {"type": "integer"}])
    if some(0.2):
        schema["patternProperties"] = {chooser.choice(["^a", "^[ab]$", "b"]): _random_value(chooser, depth)}
    if some(0.15):
        schema[chooser.choice(["minProperties", "maxProperties"])] = 2
    if depth < 2:
        for name in ("anyOf", "oneOf", "allOf"):
            if some(0.3):
                schema[name] = [_random_object(chooser, depth + 1) for _ in range(chooser.randint(1, 2))]
        if some(0.15):
            schema["not"] = {"required": [chooser.choice("abc")]}
        if some(0.15):
            schema |= {"if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "then": {"required": ["b"]}}
    return schema


@pytest.mark.parametrize("seed", range(12))
def test_random_objects_in_any_order_are_judged_as_jsonschema_does(seed: int) -> None:
    chooser = random.Random(seed)
    values: list[Any] = [1, "x", None, {}, {"a": 1}, {"b": "x", "a": 1}, {"c": 1}]
    for _ in range(3):
        schema = _random_object(chooser)
        try:
            grammar = grammar_of(schema, any_whitespace=False, additional_properties="as_schema", property_order="any")
        except ConstraintError:  # nothing satisfies it
            continue
        check = validator(schema)
        for _ in range(20):
            names = chooser.sample(["a", "b", "c", "z"], chooser.randrange(5))
            value = {name: chooser.choice(values) for name in names}
            text = json.dumps(value)
            assert accepts_text(grammar, text) == check.is_valid(value), (schema, text)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), pairs
    return dict(pairs)


@pytest.mark.filterwarnings("ignore:Possible :FutureWarning")  # of Python, for `--` and the like in a class
@pytest.mark.parametrize("options", [{"property_order": "any"}, {"additional_properties": "closed"}], ids=str)
def test_cases_hold_with_the_options(options: dict[str, Any]) -> None:
    """Any order takes what the schema takes; closed objects take less. Neither takes an invalid instance, nor ends a
    walk in one.
    """
    for index, case in enumerate(CASES):
        try:
            grammar = grammar_of(case.schema, any_whitespace=False, **options)
        except ConstraintError:
            continue
        forbidden = [value for value in case.valid if not accepts(grammar, value)]
        assert not [value for value in case.invalid if accepts(grammar, value)], case.schema
        if options == {"property_order": "any"}:
            exact = grammar_of(case.schema, any_whitespace=False)
            assert forbidden == [value for value in case.valid if not accepts(exact, value)], case.schema
        try:
            text = wild_output(grammar.session(), random.Random(index))
        except DeadEnd:  # puzzles of `not` and `uniqueItems`
            continue
        if text is not None:
            value = json.loads(text, object_pairs_hook=_without_repeats if "property_order" in options else None)
            assert validator(case.schema).is_valid(value), (case.schema, text)
