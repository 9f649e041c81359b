"""The places of keywords in a JSON schema, and the combinations of keywords that it uses.

A combination is the sorted list of the assertions in one schema object, with the values of `type` and `format`, such as
`maxLength+type:string`; annotations do not count. A backend must be proven to enforce each combination by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

ANNOTATIONS = frozenset(
    [
        *("title", "description", "markdownDescription", "default", "examples", "example", "deprecated", "readOnly"),
        *("writeOnly", "contentMediaType", "contentEncoding", "contentSchema", "$schema", "$id", "id", "$comment"),
        *("$anchor", "$dynamicAnchor", "$vocabulary", "$defs", "definitions", "discriminator", "x-guidance"),
    ]
)
_SCHEMAS = frozenset(
    [
        *("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else"),
        *("propertyNames", "unevaluatedItems", "unevaluatedProperties"),
    ]
)
_SCHEMA_LISTS = frozenset(("anyOf", "oneOf", "allOf", "prefixItems", "items"))
_SCHEMA_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
"""Keywords whose value is a schema, a list of schemas, or schemas by name."""
_HOLDERS = _SCHEMAS | _SCHEMA_LISTS | _SCHEMA_MAPS


def subschemas(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each schema object in `schema` with its JSON pointer, outer ones first. Values that are not schemas are
    skipped.
    """
    pending = [("#", schema)]
    while pending:
        path, schema = pending.pop()
        if not isinstance(schema, dict):
            continue
        yield path, schema
        inner: list[tuple[str, Any]] = []
        for name, value in schema.items():
            if name not in _HOLDERS:
                continue
            if name in _SCHEMA_MAPS and isinstance(value, dict):
                inner += [(f"{path}/{name}/{escaped(key)}", child) for key, child in value.items()]
            elif name in _SCHEMA_LISTS and isinstance(value, list):
                inner += [(f"{path}/{name}/{index}", child) for index, child in enumerate(value)]
            elif name in _SCHEMAS:
                inner.append((f"{path}/{name}", value))
        pending += reversed(inner)


def escaped(key: str) -> str:
    """A member's name, escaped for a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def combinations(schema: Any) -> set[str]:
    """Every combination in a schema and its subschemas."""
    found = set()
    for _, subschema in subschemas(schema):
        names = sorted(
            name if name not in ("type", "format") else f"{name}:{_text(value)}"
            for name, value in subschema.items()
            if name not in ANNOTATIONS
        )
        if names:
            found.add("+".join(names))
    return found


def _text(value: Any) -> str:
    return "|".join(sorted(map(str, value))) if isinstance(value, list) else str(value)
