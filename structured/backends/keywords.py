"""Which combinations of JSON Schema keywords a schema uses: what a backend must be proven to enforce.

A combination is the sorted list of assertions that stand in one schema object, with the values of `type` and `format`:
`maxLength+type:string`. Annotations do not count.
"""

from __future__ import annotations

from typing import Any

ANNOTATIONS = frozenset(
    [
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$schema",
        "$id",
        "$comment",
        "$anchor",
        "$defs",
        "definitions",
        "contentMediaType",
        "contentEncoding",
        "markdownDescription",
        "x-guidance",
    ]
)
_SCHEMA = frozenset(
    [
        "items",
        "additionalProperties",
        "additionalItems",
        "contains",
        "not",
        "if",
        "then",
        "else",
        "propertyNames",
        "unevaluatedItems",
        "unevaluatedProperties",
    ]
)
_SCHEMA_LISTS = frozenset(["anyOf", "oneOf", "allOf", "prefixItems", "items"])
_SCHEMA_MAPS = frozenset(["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"])


def combinations(schema: Any) -> set[str]:
    """Every combination in a schema and its subschemas."""
    found: set[str] = set()
    _collect(schema, found)
    return found


def _collect(schema: Any, found: set[str]) -> None:
    if not isinstance(schema, dict):
        return
    names = sorted(
        name if name not in ("type", "format") else f"{name}:{_text(value)}"
        for name, value in schema.items()
        if name not in ANNOTATIONS
    )
    if names:
        found.add("+".join(names))
    for name, value in schema.items():
        if name in _SCHEMA_MAPS and isinstance(value, dict):
            for child in value.values():
                _collect(child, found)
        elif name in _SCHEMA_LISTS and isinstance(value, list):
            for child in value:
                _collect(child, found)
        elif name in _SCHEMA:
            _collect(value, found)


def _text(value: Any) -> str:
    return "|".join(sorted(map(str, value))) if isinstance(value, list) else str(value)
