"""A rewritten schema accepts what the original accepts: `jsonschema` judges both on every small instance."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import hypothesis
import jsonschema
import pytest
from hypothesis import strategies as st

from manta.structured.constraint import ConstraintError, Unsupported
from manta.structured.schemas import patterns
from manta.structured.schemas.documents import read
from manta.structured.schemas.rewriting import needs_rewriting, rewritten
from tests.conftest import PROVE
from tests.structured.ecma_patterns import finds, reading_ecma

SCALARS = [None, True, False, 0, 1, 2, 3, 5, -1, 1.5, 2.5, "", "a", "b", "ab", "x-a", "abc"]
ARRAYS = [[], [1], ["a"], [None], [1, 1], [1, 2], ["a", 1], [1, "a"], [1, 2, 3], ["a", "b", 1, None], [[], {}]]
VALUES = [0, 1, "a", "b", None, {}, []]
OBJECTS = [
    {},
    *({name: value} for name in ("a", "b", "c", "x-a") for value in VALUES),
    *({"a": one, "b": other} for one in VALUES for other in VALUES),
    *({"a": one, "b": other, "c": 1} for one in (0, "a") for other in (1, "b")),
    {"a": {"a": 1}},
    {"a": {"a": "b"}, "b": 1},
    {"b": 1, "c": 2, "x-a": 3},
    {"a": 1, "b": 1, "c": 1, "x-a": "a"},
]
INSTANCES = [*SCALARS, *ARRAYS, *OBJECTS]


def verdicts(schema: Any, draft: Any = jsonschema.Draft202012Validator) -> list[bool]:
    judge = reading_ecma(draft)(schema)
    return [judge.is_valid(instance) for instance in INSTANCES]


def assert_equivalent(schema: Any, draft: Any = jsonschema.Draft202012Validator) -> None:
    result, guard = rewritten(read(schema))
    assert not guard
    expected, found = verdicts(schema, draft), verdicts(result)
    wrong = [value for value, one, other in zip(INSTANCES, expected, found, strict=True) if one != other]
    assert not wrong, f"{json.dumps(result)} differs on {wrong[:5]}"
    text = json.dumps(result)
    for name in ("oneOf", "not", "if", "dependentRequired", "dependentSchemas", "propertyNames"):
        assert f'"{name}":' not in text


OBJECT = {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}}
HAND_WRITTEN = [
    {"oneOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
    {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"oneOf": [{"type": "integer", "minimum": 2}, {"type": "integer", "maximum": 3}]},
    {"oneOf": [{"const": 1}, {"enum": [1, 2, "a"]}, {"type": "string", "pattern": "^a"}]},
    {"oneOf": [{"required": ["a"], "not": {"required": ["b"]}}, {"required": ["b"], "not": {"required": ["a"]}}]},
    {"oneOf": [{"properties": {"a": {"const": 0}}, "required": ["a"]}, {"properties": {"a": {"const": 1}}}]},
    {"not": {"type": "string"}},
    {"not": {"type": ["object", "integer", "number"]}},
    {"not": {"enum": [None, True, 1, 2, "a", "ab"]}},
    {"not": {"const": []}},
    {"type": "object", "not": {"const": {}}},
    {"type": "string", "not": {"pattern": "^a"}},
    {"not": {"required": ["a", "b"]}},
    {"not": {"anyOf": [{"required": ["a"]}, {"type": "array"}]}},
    {"not": {"allOf": [{"minimum": 2}, {"type": "integer"}]}, "type": ["integer", "string"]},
    {"not": {"not": {"required": ["a"]}}},
    {"not": {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}},
    {"not": {"minLength": 2}},
    {"not": {"maxItems": 1}},
    {"not": {"properties": {"a": {"type": "string"}}}},
    {"not": {"prefixItems": [{"type": "number"}, {"const": "a"}]}},
    {"type": "array", "maxItems": 3, "not": {"items": {"type": "number"}}},
    {"type": "array", "not": {"contains": {"const": 1}}},
    {"properties": {"a": {}, "b": {}}, "additionalProperties": False, "not": {"additionalProperties": {"const": 0}}},
    {"if": {"properties": {"a": {"const": 0}}}, "then": {"required": ["b"]}, "else": {"required": ["c"]}},
    {"if": {"type": "object"}, "then": {"required": ["a"]}},
    {"if": {"required": ["a"]}, "else": False},
    {"if": {"type": "string"}},
    {"not": {"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {"type": "array"}}},
    {"dependentRequired": {"a": ["b"], "b": ["a", "c"]}},
    {"dependentSchemas": {"a": {"properties": {"b": {"const": 1}}}}},
    {"dependencies": {"a": ["b"], "b": {"required": ["c"]}}, "$schema": "http://json-schema.org/draft-07/schema#"},
    {"not": {"dependencies": {"a": ["b"]}}, "$schema": "http://json-schema.org/draft-07/schema#"},
    {"propertyNames": {"pattern": "^[ab]"}},
    {"propertyNames": {"enum": ["a", "b"]}, "properties": {"c": {"type": "integer"}}},
    {"propertyNames": {"maxLength": 1}, "additionalProperties": {"type": "integer"}},
    {"propertyNames": {"not": {"const": "a"}}},
    {"propertyNames": False},
    {"patternProperties": {"a": {"type": "integer"}, "^x": {"minimum": 4}}},
    {"patternProperties": {"a": {"type": "integer"}, "b": {}}, "additionalProperties": False},
    {"enum": [1, "a", "ab", []], "minLength": 2},
    {"const": {"a": 1}, "required": ["b"]},
    {**OBJECT, "additionalProperties": False, "minProperties": 2},
    {**OBJECT, "additionalProperties": False, "maxProperties": 1},
    {**OBJECT, "required": ["a"], "additionalProperties": False, "minProperties": 2, "maxProperties": 2},
    {**OBJECT, "minProperties": 1},
    {"properties": {"a": {}}, "minProperties": 1},
    {"allOf": [{"if": {"required": ["a"]}, "then": {"required": ["b"]}}, {"not": {"required": ["c"]}}]},
    {"$defs": {"s": {"type": "string"}}, "oneOf": [{"$ref": "#/$defs/s"}, {"type": "null"}]},
    {"$defs": {"t": {"properties": {"a": {"$ref": "#/$defs/t"}}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}}}
    | {"$ref": "#/$defs/t"},
    {"uniqueItems": False, "not": False},
    {"patternProperties": {"^(?!a)": {"type": "integer"}}},
    {"$defs": {"no": False}, "properties": {"a": {"$ref": "#/$defs/no"}}, "not": {"required": ["b"]}},
    {
        "$defs": {"t": {"properties": {"a": {"allOf": [{"$ref": "#/$defs/t"}], "required": ["b"]}}}},
        "$ref": "#/$defs/t",
        "not": {"required": ["c"]},
    },
    {"properties": {"a": {}}, "allOf": [{"properties": {"b": {"type": "integer"}}}], "unevaluatedProperties": False},
    {"unevaluatedProperties": True, "contains": {}, "minContains": 0},
]


@pytest.mark.parametrize("schema", HAND_WRITTEN, ids=lambda schema: json.dumps(schema)[:60])
def test_a_rewritten_schema_accepts_the_same_instances(schema: Any) -> None:
    assert needs_rewriting(schema) or "enum" in schema or "const" in schema
    draft = jsonschema.Draft7Validator if "draft-07" in schema.get("$schema", "") else jsonschema.Draft202012Validator
    assert_equivalent(schema, draft)


DRAFTS = {
    "http://json-schema.org/draft-04/schema#": jsonschema.Draft4Validator,
    "http://json-schema.org/draft-06/schema#": jsonschema.Draft6Validator,
    "http://json-schema.org/draft-07/schema#": jsonschema.Draft7Validator,
    "https://json-schema.org/draft/2019-09/schema": jsonschema.Draft201909Validator,
}


@pytest.mark.parametrize("uri", DRAFTS)
@pytest.mark.parametrize(
    "schema",
    [
        {"items": [{"type": "integer"}, {"type": "string"}], "additionalItems": False},
        {"items": [{"type": "integer"}], "additionalItems": {"type": "string"}},
        {"items": {"type": "integer"}, "additionalItems": False},
        {"definitions": {"a": {"type": "string"}}, "properties": {"a": {"$ref": "#/definitions/a"}}},
        {"oneOf": [{"items": [{"type": "integer"}]}, {"type": "object"}], "type": ["array", "object"], "maxItems": 1},
    ],
    ids=json.dumps,
)
def test_older_drafts_mean_what_they_meant(uri: str, schema: Any) -> None:
    assert_equivalent({"$schema": uri, **schema}, DRAFTS[uri])


def test_what_a_draft_said_in_its_own_way() -> None:
    draft4 = "http://json-schema.org/draft-04/schema#"
    bounds = {"$schema": draft4, "type": "number", "minimum": 1, "exclusiveMinimum": True, "maximum": 5}
    assert_equivalent(bounds, jsonschema.Draft4Validator)
    hidden = {"$schema": draft4, "definitions": {"a": {}}, "not": {"$ref": "#/definitions/a", "type": "string"}}
    assert_equivalent(hidden, jsonschema.Draft4Validator)
    ids = {"$id": "http://x.org/r", "$defs": {"i": {"$id": "i", "$defs": {"n": {"type": "null"}}, "$ref": "#/$defs/n"}}}
    assert_equivalent({**ids, "properties": {"a": {"$ref": "i"}, "b": {"$ref": "i#/$defs/n"}}})
    assert_equivalent({"$dynamicAnchor": "node", "type": "object", "additionalProperties": {"$dynamicRef": "#node"}})


def test_an_unknown_keyword_is_not_negated() -> None:
    with pytest.raises(Unsupported, match="const: the draft that"):
        rewritten(read({"$schema": "http://json-schema.org/draft-04/schema#", "not": {"const": 1}}))


def test_an_unknown_keyword_implies_nothing() -> None:
    branches = [{"properties": {"a": {"const": value}}, "required": ["a"]} for value in (1, 2)]
    rewritten(read({"oneOf": branches}))
    with pytest.raises(Unsupported, match="const: the draft that"):
        rewritten(read({"$schema": "http://json-schema.org/draft-04/schema#", "oneOf": branches}))


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"$id": "x", "$defs": {"y": {"$id": "y"}}, "$dynamicRef": "#z"}, "its target depends"),
        ({"$ref": "#/$defs/none"}, "#/\\$ref '#/\\$defs/none' is none of the parts of the schema"),
        ({"oneOf": 3}, "#/oneOf must be a list of schemas"),
        ({"properties": {"a~/": {"minimum": "x"}}}, "#/properties/a~0~1/minimum must be a number"),
    ],
)
def test_a_refusal_names_the_keyword_and_its_place(schema: Any, said: str) -> None:
    with pytest.raises(ConstraintError, match=said):
        rewritten(read(schema))


def test_properties_keep_their_order() -> None:
    schema = {"type": "object", "properties": {"z": {}, "a": {}, "m": {}}, "not": {"required": ["a", "z"]}}
    assert list(rewritten(read(schema))[0]["allOf"][0]["properties"]) == ["z", "a", "m"]


def test_oversized_rewrites_are_left_to_the_guard() -> None:
    names = [f"p{index}" for index in range(40)]
    _, guard = rewritten(read({"type": "object", "dependentRequired": {name: [f"{name}x"] for name in names}}))
    assert guard


# ---- generated schemas -----------------------------------------------------------------------------------------------


def schemas() -> st.SearchStrategy[Any]:
    names = st.sampled_from(["a", "b", "c", "x-a"])
    leaves = st.sampled_from(
        [
            True,
            False,
            {"type": "string"},
            {"type": "integer"},
            {"type": "number"},
            {"type": ["object", "null"]},
            {"const": 1},
            {"enum": [0, "a", None]},
            {"enum": [True, [], {}]},
            {"minimum": 1},
            {"maximum": 2, "type": "integer"},
            {"exclusiveMinimum": 1.5},
            {"minLength": 2},
            {"maxLength": 1, "type": "string"},
            {"pattern": "^a"},
            {"pattern": "b$", "type": "string"},
            {"minItems": 1},
            {"maxItems": 2, "type": "array"},
            {"minProperties": 1, "type": "object"},
            {"maxProperties": 1},
        ]
    )

    def nested(child: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        few = st.lists(child, min_size=1, max_size=3)
        by_name = st.dictionaries(names, child, min_size=1, max_size=3)
        keyword = st.one_of(
            few.map(lambda found: {"oneOf": found}),
            few.map(lambda found: {"anyOf": found}),
            few.map(lambda found: {"allOf": found}),
            child.map(lambda found: {"not": found}),
            st.builds(lambda a, b: {"if": a, "then": b}, child, child),
            st.builds(lambda a, b, c: {"if": a, "then": b, "else": c}, child, child, child),
            by_name.map(lambda found: {"properties": found}),
            by_name.map(lambda found: {"properties": found, "additionalProperties": False, "type": "object"}),
            by_name.map(lambda found: {"dependentSchemas": found}),
            st.lists(names, min_size=1, max_size=2, unique=True).map(lambda found: {"required": found}),
            st.dictionaries(names, st.lists(names, max_size=2), max_size=2).map(
                lambda found: {"dependentRequired": found}
            ),
            child.map(lambda found: {"items": found, "type": "array", "maxItems": 3}),
            few.map(lambda found: {"prefixItems": found}),
            child.map(lambda found: {"not": {"contains": found}}),
            st.sampled_from(["^a", "b", "^x"]).map(lambda pattern: {"propertyNames": {"pattern": pattern}}),
            st.builds(lambda one, other: {"patternProperties": {"a": one, "^x|b": other}}, child, child),
        )
        return st.lists(keyword, min_size=1, max_size=2).map(
            lambda parts: {name: value for part in parts for name, value in part.items()}
        )

    return st.recursive(leaves, nested, max_leaves=7)


COUNTS = {"rewritten": 0, "refused": 0}


@hypothesis.settings(
    max_examples=3000 if PROVE else 250, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)
@hypothesis.given(schema=schemas())
def check_generated(schema: Any) -> None:
    for proves in (False, True):  # the second is the one that counts
        try:
            wider, guard = rewritten(read(schema), proves)
        except Unsupported:
            guard = "refused"
            continue
        if guard:
            pairs = zip(INSTANCES, verdicts(schema), verdicts(wider), strict=True)
            missing = [value for value, is_valid, is_allowed in pairs if is_valid and not is_allowed]
            assert not missing, f"{json.dumps(wider)} leaves out {missing[:5]}"
    if guard:
        COUNTS["refused"] += 1
        return
    COUNTS["rewritten"] += 1
    assert_equivalent(schema)


def test_generated_schemas_are_rewritten_exactly_or_refused() -> None:
    COUNTS.update(rewritten=0, refused=0)
    check_generated()
    assert COUNTS["rewritten"] > 2 * COUNTS["refused"], COUNTS


# ---- patterns --------------------------------------------------------------------------------------------------------

PATTERNS = [
    "^a",
    "b$",
    "^(a|b)+$",
    "x",
    "^$",
    "^x-",
    "a|^b",
    "(^a|c$)",
    r"^\d+\.",
    "^[^/]+$",
    "^(foo|bar)?$",
    "^a{2,3}b*?$",
]


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(PATTERNS, 2)))
def test_patterns_are_combined_as_sets_of_texts(one: str, other: str) -> None:
    found = patterns.combined([one], [other])
    rng = random.Random(one + other)
    texts = ["".join(rng.choices("abcfor/x-1.9\n", k=rng.randint(0, 6))) for _ in range(300)]
    for text in texts:
        expected = finds(one, text) and not finds(other, text)
        assert (found is not None and finds(found, text)) == expected, (found, text)


@pytest.mark.parametrize("pattern", ["^(?!a)[a-c]+$", "^(?=.{1,2}$)[ab]*", "^(?!b)(?!.*c$)", r"^(?!(a|b)\(?x)[ab(x]+$"])
def test_a_grammar_is_given_patterns_without_looks_around(pattern: str) -> None:
    found, rng = patterns.for_grammar(pattern), random.Random(pattern)
    assert found is not None
    assert patterns.is_plain(found)
    for _ in range(500):
        text = "".join(rng.choices("abc(x", k=rng.randint(0, 5)))
        assert finds(found, text) == finds(pattern, text), (found, text)


def test_disjoint_patterns_are_found() -> None:
    assert patterns.are_disjoint(["^a", "^b"])
    assert patterns.are_disjoint(["^[à-ü]+$", r"^\d+$"])
    assert not patterns.are_disjoint(["^a", "b$"])
    assert patterns.are_disjoint([r"^\ba", "^b"])
