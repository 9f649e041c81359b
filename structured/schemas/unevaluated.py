"""Rewrites `unevaluatedProperties` as `additionalProperties` where the evaluated names are known."""

from __future__ import annotations

from typing import Any

from manta.structured.schemas.documents import Document


def closed(document: Document, schema: dict[str, Any]) -> dict[str, Any]:
    """`unevaluatedProperties` as `additionalProperties` beside all names that are evaluated anywhere below. It is
    exact if all of them are evaluated whichever branches hold; else the guard has the rest.
    """
    if schema.get("unevaluatedProperties", True) is True:
        return schema
    known: dict[str, dict[str, Any]] = {"properties": {}, "patternProperties": {}}
    is_certain = _evaluated(document, document.origin(schema), known, set())
    if is_certain is None:
        return schema
    result = dict(schema)
    if is_certain:
        result.pop("unevaluatedProperties")
    for name, names in known.items():
        result[name] = {**schema.get(name, {}), **{key: True for key in names if key not in schema.get(name, {})}}
    result["additionalProperties"] = schema["unevaluatedProperties"]
    return document.copy_of(schema, result)


def _evaluated(document: Document, schema: Any, known: dict[str, dict[str, Any]], seen: set[int]) -> bool | None:
    """Adds the names that a schema evaluates; whether it always does; None if it may evaluate any name."""
    if isinstance(schema, bool) or id(schema) in seen:
        return True
    if "additionalProperties" in schema or ("unevaluatedProperties" in schema and seen):
        return None
    seen.add(id(schema))
    for name, names in known.items():
        names |= schema.get(name, {})
    certain = [*schema.get("allOf", ()), *([document.resolve(schema["$ref"])] if "$ref" in schema else [])]
    branches = [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("dependentSchemas", {}).values()]
    branches += [schema[name] for name in ("if", "then", "else") if name in schema]
    found = [_evaluated(document, part, known, seen) for part in (*certain, *branches)]
    if None in found:
        return None
    return not branches and all(found)
