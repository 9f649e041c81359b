"""The departures of llguidance from JSON Schema, for which a schema is refused or mended before it compiles.

llguidance reports most keywords that it does not enforce. Those that it ignores silently are listed here; each entry is
a case of `tests/structured/test_schema_conformance.py`. Sources of the list: its `docs/json_schema.md`, its parser,
random walks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from manta.structured.backends.keywords import escaped, subschemas
from manta.structured.schemas.numbers import NUMERIC, is_integer, is_kept

_NOT_ENFORCED = frozenset(
    [
        *("not", "if", "contains", "propertyNames", "uniqueItems", "unevaluatedItems", "unevaluatedProperties"),
        *("dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef", "extends"),
        *("disallow", "divisibleBy"),
    ]
)
_NUMBERS = (*sorted(NUMERIC), "const", "enum")
_EXAMINED = frozenset([*_NUMBERS, "prefixItems", "minProperties", "format"])
"""Keywords that `_departures_of` looks at in every schema."""
_NAMED = frozenset(["properties", "patternProperties", "required"])
_MAX_HOSTNAME = 253
_OLD_DRAFTS = re.compile(r"json-schema\.org/(draft-0|draft/2019)")
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")


def departures(schema: Any, has_controls: bool) -> list[str]:
    """Returns what llguidance would silently not enforce, each as `#/path/keyword: why`. `has_controls` is what
    `has_control_characters` says of the schema.
    """
    is_old = isinstance(schema, dict) and bool(_OLD_DRAFTS.search(str(schema.get("$schema", ""))))
    examined = _EXAMINED | _NAMED if has_controls else _EXAMINED
    found = []
    for path, subschema in subschemas(schema):
        if not _NOT_ENFORCED.isdisjoint(subschema):
            ignored = [name for name in subschema if name in _NOT_ENFORCED and subschema[name] is not False]
            found += [f"{path}/{name} is not enforced" for name in ignored]
        if not examined.isdisjoint(subschema):
            found += [f"{path}/{reason}" for reason in _departures_of(subschema, is_old, has_controls)]
    return found


def _departures_of(schema: dict[str, Any], is_old: bool, has_controls: bool) -> Iterator[str]:
    for name in _NUMBERS:
        if name in schema and not is_kept(name, schema[name]):
            yield f"{name}: numbers that no 64-bit float holds are not compared exactly"
    if "prefixItems" in schema and (is_old or "additionalItems" in schema):
        yield "prefixItems is not enforced together with the additionalItems or $schema of an older draft"
    least = schema.get("minProperties", 0)
    if is_integer(least) and least > 1 + len(set(_list(schema.get("required")))):
        yield f"minProperties: {least} is not enforced, for a name may come twice; list names in required"
    if schema.get("format") == "unknown":
        yield "format: 'unknown' is not enforced"
    if has_controls and not _NAMED.isdisjoint(schema):
        yield "properties: names are not kept apart if the schema holds control characters"


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def has_control_characters(schema: Any, text: str) -> bool:
    """Whether any string of a JSON value holds a character that JSON writes as `\\u00XX`, or the character DEL. `text`
    is the value as `json.dumps` writes it.
    """
    is_possible = "\\u00" in text or "\x7f" in text  # what is escaped may be a backslash or another character
    return is_possible and any(_CONTROL.search(each) for each in _strings(schema))


def _strings(value: Any) -> Iterator[str]:
    """The names and strings of a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def mended(schema: Any) -> Any:
    """A copy of the schema for llguidance, in which the departures that can be mended are."""
    if isinstance(schema, list):
        return [mended(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {name: item if name in ("const", "enum") else mended(item) for name, item in schema.items()}
    if result.get("uniqueItems") is False:
        del result["uniqueItems"]
    if result.get("format") == "hostname" and is_integer(result.get("maxLength", 0)):
        result["maxLength"] = min(result.get("maxLength", _MAX_HOSTNAME), _MAX_HOSTNAME)
    return result


def place_of(message: str, schema: Any) -> str:
    """The JSON pointer of the keyword that llguidance's message is about; empty if none is found."""
    words = set(re.findall(r"\$?\w+", message))
    for path, subschema in subschemas(schema):
        for name, value in subschema.items():
            named = name in words and not isinstance(value, str)
            if named or (name in ("type", "format", "pattern", "$ref") and _is_quoted(name, value, message)):
                return f"{path}/{escaped(name)}"
    return ""


def _is_quoted(name: str, value: Any, message: str) -> bool:
    if name == "type":
        return any(f"Invalid type: {kind}" == message for kind in (value if isinstance(value, list) else [value]))
    return isinstance(value, str) and len(value) > 1 and value.lstrip("#") in message
