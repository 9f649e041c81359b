"""Orders the properties of an instance as its schema names them: the order in which engines have them written."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

ALTERNATIVES = ("anyOf", "oneOf")
BRANCHES = ("if", "then", "else")


Takes = Callable[[Any, Any], bool]
"""Returns whether a schema takes a value."""


def in_order(instance: Any, schema: Any, takes: Takes = lambda schema, value: True) -> Any:
    """Returns the instance with the properties of every object in the order of the schemas that apply to it; unnamed
    ones come last, as they are. Of alternatives those apply that take the value. References must be JSON pointers into
    `schema` (`#/...`, RFC 6901); others are ignored.
    """
    return _ordered(instance, [schema], schema, takes)


def _ordered(value: Any, schemas: list[Any], root: Any, takes: Takes) -> Any:
    applied = _applied(schemas, root, lambda schema: takes(schema, value))
    if isinstance(value, dict):
        named = [name for schema in applied for name in schema.get("properties", {})]
        names = dict.fromkeys([*(name for name in named if name in value), *value])
        return {name: _ordered(value[name], _of_property(applied, name), root, takes) for name in names}
    if isinstance(value, list):
        return [_ordered(item, _of_item(applied, index), root, takes) for index, item in enumerate(value)]
    return value


def _applied(schemas: list[Any], root: Any, takes: Callable[[Any], bool]) -> list[dict[str, Any]]:
    """Returns the schemas and all that they apply to the same value, each once, in the order of their keywords."""
    found: dict[int, dict[str, Any]] = {}
    seen: set[int] = set()

    def add(schema: Any) -> None:
        if not isinstance(schema, dict) or id(schema) in seen:
            return
        seen.add(id(schema))
        for keyword, value in schema.items():
            if keyword == "properties":
                found[id(schema)] = schema
            elif keyword == "$ref" and isinstance(value, str):
                add(_target(value, root))
            elif keyword == "allOf" or keyword in ALTERNATIVES or keyword in BRANCHES:
                for inner in value if isinstance(value, list) else [value]:
                    if keyword == "allOf" or takes(inner):
                        add(inner)
        found[id(schema)] = schema

    for schema in schemas:
        add(schema)
    return list(found.values())


def _of_property(applied: list[dict[str, Any]], name: str) -> list[Any]:
    named = [schema["properties"][name] for schema in applied if name in schema.get("properties", {})]
    for schema in applied:
        named += [each for pattern, each in schema.get("patternProperties", {}).items() if _finds(pattern, name)]
    return named or [schema["additionalProperties"] for schema in applied if "additionalProperties" in schema]


def _finds(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:  # of another dialect
        return False


def _of_item(applied: list[dict[str, Any]], index: int) -> list[Any]:
    found = []
    for schema in applied:
        items = schema.get("items")
        first = items if isinstance(items, list) else schema.get("prefixItems", [])
        rest = schema.get("additionalItems") if isinstance(items, list) else items
        found.append(first[index] if index < len(first) else rest)
    return found


def _target(reference: str, root: Any) -> Any:
    """Returns the schema at a JSON pointer within `root`; None if there is none."""
    if not reference.startswith("#"):
        return None
    target = root
    for part in unquote(reference[1:]).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and key.isdigit() and int(key) < len(target):
            target = target[int(key)]
        elif isinstance(target, dict) and key in target:
            target = target[key]
        else:
            return None
    return target
