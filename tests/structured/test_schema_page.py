"""The tables of keywords in docs/constrain.md say what happens to a schema: each row is tried with schemas of its own.

A row is named by its first cell. A row of the page without schemas here fails, and so do schemas without a row.
"""

from __future__ import annotations

import functools
import json
import pathlib
import re
from typing import Any, NamedTuple

import msgspec
import pytest

from manta.structured.backends.llguidance import Compiled
from manta.structured.constraint import ConstraintError, ConstraintSpec, Resolved
from tests.structured.test_schema_conformance import accepts, backends, make_backend_once

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "constrain.md"
DRAFT_3, DRAFT_7 = (f"http://json-schema.org/draft-0{number}/schema#" for number in (3, 7))
DRAFT_2019, DRAFT_2020 = (f"https://json-schema.org/draft/{name}/schema" for name in ("2019-09", "2020-12"))
BIG = 2**53 + 3
NODE = {
    "type": "object",
    "properties": {"next": {"$ref": "#/$defs/node", "minProperties": 1}, "v": {"type": "integer"}},
    "additionalProperties": False,
}


class Served(NamedTuple):
    """A schema that is served, an instance that may be written, and one that may not."""

    schema: dict[str, Any]
    right: Any
    wrong: Any
    is_guarded: bool = False


def _guarded(schema: dict[str, Any], right: Any, wrong: Any) -> Served:
    return Served(schema, right, wrong, True)


def _object(names: str, **keywords: Any) -> dict[str, Any]:
    """An object of integers with one-letter names."""
    return {"type": "object", "properties": {name: {"type": "integer"} for name in names}, **keywords}


def _closed(names: str, **keywords: Any) -> dict[str, Any]:
    return _object(names, additionalProperties=False, **keywords)


def _ones(names: str) -> dict[str, int]:
    return dict.fromkeys(names, 1)


def _integers(**keywords: Any) -> dict[str, Any]:
    return {"type": "array", "items": {"type": "integer"}, **keywords}


def _text(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern}


ENFORCED: dict[str, list[Served]] = {
    "`type`, `enum`, `const`, bounds, lengths, `pattern`, `properties`, `items`, `anyOf`, `allOf`, `$ref`, ...": [
        Served({"type": "string", "enum": ["a", "b"]}, "a", "c"),
        Served({"const": 3}, 3, 4),
        Served({"type": "integer", "minimum": 3, "maximum": 9}, 9, 10),
        Served({"type": "number", "multipleOf": 0.5}, 1.5, 1.3),
        Served({"type": "string", "maxLength": 3, "pattern": "^a"}, "abc", "abcd"),
        Served(_integers(minItems=1, maxItems=2), [1], [1, 2, 3]),
        Served({"anyOf": [{"type": "integer"}, {"type": "null"}]}, None, "a"),
        Served({"allOf": [{"type": "integer", "minimum": 1}, {"maximum": 4}]}, 4, 5),
        Served(_closed("a", required=["a"]), {"a": 1}, {}),
        Served({"$ref": "#/$defs/a", "$defs": {"a": {"type": "boolean"}}}, True, 1),
    ],
    "`oneOf`, `not`, `if`, `dependentRequired`, `dependentSchemas`, `dependencies`": [
        Served({"oneOf": [{"type": "integer", "minimum": 2}, {"type": "integer", "maximum": 5}]}, 1, 3),
        Served({"type": ["integer", "string"], "not": {"const": "a"}}, "b", "a"),
        Served(_object("ka", **{"if": {"required": ["k"]}, "then": {"required": ["a"]}}), _ones("ka"), _ones("k")),
        Served(_closed("ab", dependentRequired={"a": ["b"]}), _ones("ab"), _ones("a")),
        Served(_closed("ab", dependentSchemas={"a": {"required": ["b"]}}), _ones("b"), _ones("a")),
        Served({"$schema": DRAFT_7, **_closed("ab", dependencies={"a": ["b"]})}, _ones("ab"), _ones("a")),
        _guarded({"type": "integer", "not": {"multipleOf": 3}}, 4, 6),
        _guarded(_integers(**{"not": {"items": {"minimum": 5}}}), [1, 7], [7]),
        _guarded({"type": "number", "not": {"type": "integer"}}, 1.5, 1),
    ],
    "`propertyNames`, `patternProperties` that overlap, patterns that look around": [
        Served({"type": "object", "propertyNames": {"pattern": "^a"}}, {"ab": 1}, {"b": 1}),
        Served(_closed("", patternProperties={"^a": {"type": "integer"}, "b$": {"minimum": 3}}), {"ab": 3}, {"ab": 1}),
        Served(_text("^(?!a)[a-z]+$"), "b", "a"),
        Served(_text("^[a-z]+(?<!b)$"), "a", "ab"),
        Served(_text("\\bfoo\\b"), "a foo", "afoo"),
    ],
    "`maxProperties` of an object without optional names; its `minProperties`, up to one more than `required` has": [
        Served({"type": "object", "maxProperties": 3}, _ones("abc"), _ones("abcd")),
        Served(_object("ab", required=["a", "b"], maxProperties=3), _ones("abc"), _ones("abcd")),
        Served(_object("ab", required=["a", "b"], minProperties=3), _ones("abc"), _ones("ab")),
    ],
    "`minProperties: 1`; `minProperties`, `maxProperties` of an object whose names are all listed and few": [
        Served(_object("ab", minProperties=1), {"c": 1}, {}),
        Served(_closed("abcd", minProperties=2, maxProperties=3), _ones("ab"), _ones("abcd")),
    ],
    "`minProperties`, `maxProperties` of other objects": [
        _guarded({"type": "object", "minProperties": 2}, _ones("ab"), _ones("a")),
        _guarded(_object("ab", required=["a"], minProperties=2), _ones("ac"), _ones("a")),
        _guarded(_object("ab", maxProperties=1), {"c": 1}, {"a": 1, "c": 1}),
        _guarded(_closed("abcdefghijklmnop", minProperties=9), _ones("abcdefghi"), _ones("a")),
    ],
    "`uniqueItems`, `contains`, `minContains`, `maxContains`, `unevaluatedItems`": [
        _guarded(_integers(uniqueItems=True), [1, 2], [1, 1]),
        _guarded(_integers(contains={"const": 1}), [2, 1], [2]),
        _guarded(_integers(contains={"const": 1}, minContains=2), [1, 1], [1]),
        _guarded(_integers(contains={"const": 1}, maxContains=1), [1], [1, 1]),
        _guarded({"type": "array", "prefixItems": [{"type": "integer"}], "unevaluatedItems": False}, [1], [1, 2]),
    ],
    "a number that a 64-bit float does not hold exactly, a `multipleOf` of more than 1,024 (without its final zeros)": [
        _guarded({"type": "integer", "maximum": BIG}, BIG, BIG + 1),
        _guarded({"const": BIG}, BIG, BIG - 1),
        _guarded({"type": "integer", "multipleOf": 1025}, 2050, 2051),
        Served({"type": "integer", "multipleOf": 5000}, 10000, 10001),
    ],
    "`maxLength`, `maxItems`, `maxProperties`, `maxContains` from 2^31 on": [
        Served({"type": "string", "maxLength": 2**31}, "abc", 1),
        Served(_integers(maxItems=2**63 - 1), [1], ["a"]),
    ],
    "references in loops beside other keywords, patterns of more than 250 states, overlaps that are too many": [
        _guarded({"$ref": "#/$defs/node", "$defs": {"node": NODE}}, {"next": {"v": 1}}, {"next": {}}),
        _guarded(_text("^(?=.*a.{9})(?=.*b.{9})[ab]+$"), "ab" * 9, "ab"),
        _guarded(
            {
                "type": "object",
                "allOf": [{"anyOf": [{"required": [f"{one}{other}"]} for other in "abcdef"]} for one in "abcdef"],
            },
            {f"{one}a": 1 for one in "abcdef"},
            {f"{one}a": 1 for one in "abcde"},
        ),
    ],
    "`unevaluatedProperties`": [
        Served(_object("a", unevaluatedProperties=False), {"a": 1}, {"b": 1}),
        _guarded(
            _object("a", anyOf=[_object("b", required=["b"]), {}], unevaluatedProperties=False), _ones("ab"), {"c": 1}
        ),
    ],
    "`format` of the specification": [
        Served({"type": "string", "format": "date"}, "2024-02-29", "2023-02-29"),
        Served({"type": "string", "format": "regex"}, "(a+)", "("),
        Served({"type": "string", "format": "idn-hostname"}, "example.com", "a..b"),
        Served({"type": "string", "format": "hostname"}, "example.com", "xn--4gbwdl.xn--wgbh1c"),
    ],
}
"""Schemas of each row of the first table. Those without a guard are enforced by the grammar, rewritten or not."""

ANNOTATED = "any other `format`"

REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "a schema that nothing satisfies": [
        ({"type": "integer", "minimum": 4, "maximum": 3}, r"minimum \(4\) is greater than maximum \(3\)"),
        ({"type": "object", "required": ["a"], "properties": {"a": False}}, "required property 'a'"),
    ],
    "`$dynamicRef` or `$recursiveRef` if a schema within has `$id`": [
        ({"$dynamicRef": "#n", "$defs": {"n": {"$id": "b", "$dynamicAnchor": "n"}}}, r"#/\$dynamicRef .*use \$ref"),
        ({"$schema": DRAFT_2019, "items": {"$recursiveRef": "#"}, "$defs": {"n": {"$id": "b"}}}, r"use \$ref"),
    ],
    "a reference to another document": [
        ({"$ref": "https://example.com/other.json"}, "put what it names into"),
        ({"$ref": DRAFT_2019}, "its target depends on the instance"),
        ({"$ref": DRAFT_2020}, "its target depends on the instance"),
    ],
    "names beside a control character in the schema": [
        (_object("a", required=["a\x01"]), "names are not kept apart"),
    ],
    "`$schema` of a draft before 4": [
        ({"$schema": DRAFT_3, "type": "integer", "divisibleBy": 3}, r"#/\$schema cannot be enforced: drafts before 4"),
    ],
    "`prefixItems` under an older draft, or beside `additionalItems`": [
        ({"$schema": DRAFT_7, "prefixItems": [{"type": "integer"}]}, "#/prefixItems"),
        ({"prefixItems": [{"type": "integer"}], "additionalItems": False}, "#/prefixItems"),
    ],
    "a `pattern` that is not [ECMA-262's](#regular-expressions), or that refers back, such as `(a)\\1`": [
        (_text("(a)\\1"), r"#/pattern: the backreference \\1 at position 3 cannot be enforced"),
        (_text("a{,3}"), r"#/pattern: the quantifier \{,3\} at position 1 is not one of ECMA-262"),
        (_text("("), r"#/pattern: the open group \( at position 0"),
    ],
    "`minLength`, `minItems`, `minProperties`, `minContains` from 2^31 on, numbers of more than 1,000 digits": [
        ({"type": "string", "minLength": 2**31}, "#/minLength 2147483648 exceeds the 2147483647"),
        ({"const": 10**1000}, "#/const cannot be enforced: a number has more than 1000 digits"),
    ],
}
"""Schemas of each row of the second table, and words of the refusal."""


@functools.cache
def _rows(heading: str) -> list[str]:
    """The first cells of the table whose own first cell is `heading`."""
    table = re.search(rf"^\| {heading} \|.*\n\| --- .*\n((?:\|.*\n)+)", PAGE.read_text(), re.MULTILINE)
    assert table is not None, f"{PAGE.name} has no table of {heading}"
    return re.findall(r"^\| (.*?) \|", table[1], re.MULTILINE)


def _resolved(schema: Any) -> Resolved:
    return backends().resolve(
        ConstraintSpec(kind="json_schema", text=json.dumps(schema), additional_properties="as_schema")
    )


def test_every_row_of_the_page_is_tried() -> None:
    assert _rows("keyword") == [*ENFORCED, ANNOTATED]
    assert _rows("refused") == list(REFUSED)


@pytest.mark.parametrize("row", ENFORCED)
def test_a_keyword_is_enforced_as_its_row_says(row: str) -> None:
    for case in ENFORCED[row]:
        resolved = _resolved(case.schema)
        compiled = msgspec.msgpack.decode(resolved.compiled, type=Compiled)
        assert bool(compiled.translation.guard) == case.is_guarded, case
        grammar = make_backend_once(resolved.spec.backend).load(resolved.spec, resolved.compiled)
        assert accepts(grammar, case.right), case
        assert not accepts(grammar, case.wrong), case
        assert resolved.not_enforced == [], case


def test_any_other_format_is_an_annotation() -> None:
    resolved = _resolved({"type": "string", "format": "color"})
    assert resolved.not_enforced == ["#/format: 'color' is no format of JSON Schema"]


@pytest.mark.parametrize("row", REFUSED)
def test_a_schema_is_refused_as_its_row_says(row: str) -> None:
    for schema, words in REFUSED[row]:
        with pytest.raises(ConstraintError, match=f"(?s){words}"):
            _resolved(schema)


def test_references_to_meta_schemas_are_served() -> None:
    assert _resolved({"$ref": DRAFT_7}).not_enforced == []


def test_neighbours_of_a_reference_are_hidden_before_2019() -> None:
    schema = {"$ref": "#/definitions/a", "minimum": 3, "definitions": {"a": {"type": "integer"}}}
    for name, may_write_one in ((DRAFT_7, True), (DRAFT_2019, False)):
        resolved = _resolved({"$schema": name, **schema})
        grammar = make_backend_once(resolved.spec.backend).load(resolved.spec, resolved.compiled)
        assert accepts(grammar, 1) == may_write_one
        assert not accepts(grammar, "a")
