"""JSON schemas with instances that satisfy them and instances that do not; jsonschema agrees with every line.

Instances list properties in the schema's order, which is the order that grammars generate.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Case(NamedTuple):
    schema: Any
    valid: list[Any]
    invalid: list[Any]


def _object(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required is not None:
        schema["required"] = required
    return schema | more


_INT, _STR = {"type": "integer"}, {"type": "string"}
CLOSED = {"additionalProperties": False}

CASES = [
    Case({"type": "null"}, [None], [0, False, ""]),
    Case({"type": "boolean"}, [True, False], [None, 0, "true"]),
    Case({"type": "integer"}, [0, -7, 12345], [1.5, "1", None]),
    Case({"type": "number"}, [0, -7, 1.5, 2e3], ["1", None, [1]]),
    Case({"type": "string"}, ["", "a", 'q"\\\n', "ü€😀"], [1, None, ["a"]]),
    Case({"type": ["string", "null"]}, ["x", None], [1, False]),
    Case({"const": "fixed"}, ["fixed"], ["fixe", "fixed ", 1]),
    Case({"const": {"a": [1, None]}}, [{"a": [1, None]}], [{"a": [1]}, {}]),
    Case({"enum": ["a", "ab", 'q"', 3, None]}, ["a", "ab", 'q"', 3, None], ["b", 4, "abc", False]),
    Case({"type": "string", "enum": ["red", "green"]}, ["red"], ["blue", "re"]),
    Case({"type": "integer", "minimum": -3, "maximum": 12}, [-3, 0, 12], [-4, 13, 100]),
    Case({"type": "integer", "minimum": 0}, [0, 10**9], [-1]),
    Case({"type": "integer", "maximum": 5}, [-100, 5], [6, 50]),
    Case({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6}, [4, 5], [3, 6]),
    Case({"type": "number", "minimum": 0, "maximum": 1}, [0, 0.25, 1], [-0.1, 1.01, 7]),
    Case({"type": "number", "exclusiveMinimum": 0}, [0.5, 3], [-1, -0.5]),
    Case({"type": "integer", "multipleOf": 3}, [0, 3, 21], [1, 20]),
    Case({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "abc", "üü"], ["a", "abcd", ""]),
    Case({"type": "string", "pattern": "^[%--x]+$"}, ["%", "+-x"], ["a", ".", "y"]),
    Case({"type": "string", "pattern": "^[^[&&~~-]+$"}, ["a]"], ["[", "a&", "~", "-"]),
    Case({"type": "string", "minLength": 2}, ["ab", "abcdef"], ["a", ""]),
    Case({"type": "string", "maxLength": 2}, ["", "ab"], ["abc"]),
    Case({"type": "string", "pattern": "^[a-z]{2}[0-9]$"}, ["ab1"], ["a1", "ab12", "AB1"]),
    Case({"type": "string", "pattern": "b+"}, ["abc", "b"], ["ac", ""]),
    Case({"type": "string", "pattern": "^[^a]$"}, ["b", '"', "\\"], ["a", "bb"]),
    Case({"type": "string", "format": "date"}, ["2024-02-29", "1999-12-31"], ["2024-13-01", "yesterday", "2024-1-1"]),
    Case({"type": "string", "format": "time"}, ["10:20:30Z"], ["25:00:00Z", "noon"]),
    Case({"type": "string", "format": "date-time"}, ["2024-02-29T10:20:30Z"], ["2024-02-29", "x"]),
    Case({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123", "zzz"]),
    Case({"type": "string", "format": "ipv4"}, ["127.0.0.1"], ["300.0.0.1", "1.2.3"]),
    Case({"type": "string", "format": "email"}, ["a@b.co"], ["nobody"]),
    Case({"type": "array"}, [[], [1, "a", None]], [1, {}]),
    Case({"type": "array", "items": _INT}, [[], [1, 2]], [["a"], [1, None]]),
    Case({"type": "array", "items": _INT, "minItems": 2}, [[1, 2], [1, 2, 3]], [[], [1]]),
    Case({"type": "array", "items": _INT, "maxItems": 2}, [[], [1, 2]], [[1, 2, 3]]),
    Case({"type": "array", "items": _INT, "minItems": 1, "maxItems": 2}, [[1], [1, 2]], [[], [1, 2, 3]]),
    Case({"type": "array", "prefixItems": [_INT, _STR], "items": False}, [[1, "a"]], [["a", 1], [1, "a", 2]]),
    Case({"type": "array", "prefixItems": [_INT], "items": _STR}, [[1], [1, "a", "b"]], [["a"], [1, 2]]),
    Case({"type": "array", "items": _INT, "uniqueItems": True}, [[1, 2]], [[1, 1]]),
    Case({"type": "array", "contains": {"const": 1}}, [[1], [2, 1]], [[2], []]),
    Case({"type": "object"}, [{}, {"a": 1}], [[], 1]),
    Case(_object({"a": _INT}), [{}, {"a": 1}, {"b": "x"}], [{"a": "x"}]),
    Case(_object({"a": _INT}, **CLOSED), [{}, {"a": 1}], [{"b": 1}, {"a": "x"}]),
    Case(_object({"a": _INT, "b": _STR}, ["a"], **CLOSED), [{"a": 1}, {"a": 1, "b": "x"}], [{}, {"b": "x"}]),
    Case(_object({"a": _INT}, additionalProperties=_STR), [{"a": 1, "z": "y"}], [{"a": 1, "z": 2}]),
    Case(_object({"a": _INT}, ["a", "z"]), [{"a": 1, "z": 0}], [{"a": 1}]),
    Case({"type": "object", "additionalProperties": _INT}, [{}, {"x": 1}], [{"x": "y"}]),
    Case({"type": "object", "minProperties": 1}, [{"x": 1}], [{}]),
    Case({"type": "object", "maxProperties": 1}, [{}, {"x": 1}], [{"x": 1, "y": 2}]),
    Case(_object({"a": _INT}, minProperties=1, **CLOSED), [{"a": 1}], [{}]),
    Case({"type": "object", "patternProperties": {"^x_": _INT}, **CLOSED}, [{}, {"x_a": 1}], [{"y": 1}, {"x_a": "b"}]),
    Case({"type": "object", "patternProperties": {"^.$": _INT}, **CLOSED}, [{}, {'"': 1}], [{"yy": 1}, {"x": "b"}]),
    Case({"type": "object", "propertyNames": {"pattern": "^[a-c]+$"}}, [{}, {"abc": 1}], [{"d": 1}]),
    Case({"type": "object", "dependentRequired": {"a": ["b"]}}, [{}, {"a": 1, "b": 2}], [{"a": 1}]),
    Case(_object({"a": _INT}, unevaluatedProperties=False), [{}, {"a": 1}], [{"b": 1}]),
    Case({"anyOf": [_INT, _STR]}, [1, "a"], [None, 1.5, []]),
    Case({"anyOf": [{"const": "ab"}, {"const": "abc"}, {"const": "a"}]}, ["a", "ab", "abc"], ["b", "abcd"]),
    Case({"oneOf": [_INT, _STR]}, [1, "a"], [None, []]),
    Case({"oneOf": [{"type": "number"}, {"type": "integer"}]}, [1.5], [1, "x"]),
    Case(
        {"oneOf": [_object({"k": {"const": "a"}}, ["k"], **CLOSED), _object({"k": {"const": "b"}}, ["k"], **CLOSED)]},
        [{"k": "a"}, {"k": "b"}],
        [{"k": "c"}, {}],
    ),
    Case({"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 4}]}, [2, 4], [1, 5, "x"]),
    Case({"allOf": [_object({"a": _INT}, ["a"]), _object({"b": _STR}, ["b"])]}, [{"a": 1, "b": "x"}], [{"a": 1}, {}]),
    Case({"not": {"type": "string"}}, [1, None], ["a"]),
    Case({"if": _INT, "then": {"minimum": 3}, "else": _STR}, [3, "a"], [1, None]),
    Case(
        {"$defs": {"pair": _object({"next": {"$ref": "#/$defs/pair"}}, **CLOSED)}, "$ref": "#/$defs/pair"},
        [{}, {"next": {"next": {}}}],
        [{"next": 1}, {"x": {}}],
    ),
    Case(
        {
            "$defs": {"tree": {"anyOf": [_INT, {"type": "array", "items": {"$ref": "#/$defs/tree"}}]}},
            "$ref": "#/$defs/tree",
        },
        [1, [], [[1], 2]],
        ["a", [["x"]]],
    ),
    Case({"$defs": {"n": _INT}, **_object({"a": {"$ref": "#/$defs/n"}}, ["a"], **CLOSED)}, [{"a": 1}], [{"a": "x"}]),
    Case(_object({"ü€": {"const": "😀"}, 'q"': _INT}, ["ü€", 'q"'], **CLOSED), [{"ü€": "😀", 'q"': 1}], [{"ü€": "x"}]),
    Case(
        _object(
            {
                "a": _object(
                    {"b": _object({"c": {"type": "array", "items": {"enum": [1, 2]}}}, ["c"], **CLOSED)},
                    ["b"],
                    **CLOSED,
                )
            },
            ["a"],
            **CLOSED,
        ),
        [{"a": {"b": {"c": [1, 2, 2]}}}],
        [{"a": {"b": {}}}],
    ),
    Case({}, [1, "a", None, [], {"a": 1}], []),
]
