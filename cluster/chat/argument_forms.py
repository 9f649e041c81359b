"""The form of each argument in a format without JSON objects: which texts are strings, and which are JSON.

The grammar (`cluster/chat/argument_grammar.py`) and the parser (`cluster/chat/argument_readers.py`) of a tool's calls
take the form of each argument from here. So the parser reads each text that the grammar allows as the same value.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from manta.structured.backends.keywords import ANNOTATIONS

SCALARS = frozenset(["string", "number", "boolean", "null"])
_TYPES = SCALARS | {"object", "array"}
_MAX_DEPTH = 20
"""Most references and combinations that are followed, one within the other."""
NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?"
"""Pattern of a JSON number."""
OF_STRINGS = frozenset(["pattern", "minLength", "maxLength", "format"])


class ArgumentForm(msgspec.Struct, frozen=True):
    """The form of the values of one argument, in a format whose strings are raw."""

    types: frozenset[str]
    """The types of JSON that the schema may allow; `integer` counts as `number`."""
    has_plain_scalars: bool
    """Whether the schema limits numbers, booleans and null by nothing but their types, or lists the valid ones."""

    @property
    def is_raw(self) -> bool:
        """Whether each text is a string."""
        return self.types <= {"string"}

    @property
    def is_mixed(self) -> bool:
        """Whether a text is null, a boolean or a number if it reads like one, and else a string. An argument that is
        neither raw nor mixed is JSON, with its strings in quotes.
        """
        return "string" in self.types and self.types <= SCALARS and self.has_plain_scalars and not self.is_raw


class ArgumentForms(msgspec.Struct, frozen=True):
    """The forms of one tool's arguments."""

    named: dict[str, ArgumentForm]
    other: ArgumentForm
    """The form of arguments that the schema does not name."""

    def of(self, key: str) -> ArgumentForm:
        return self.named.get(key, self.other)


def argument_forms(schema: dict[str, Any]) -> ArgumentForms:
    """Returns how each argument of a tool with this schema is written, by the JSON types that it may have. An argument
    whose types are unclear may have any, so this never raises.
    """
    root = resolved(schema, schema)
    properties = root.get("properties")
    named = properties if isinstance(properties, dict) else {}
    other = form_of(root.get("additionalProperties", True), schema)
    return ArgumentForms({key: form_of(value, schema) for key, value in named.items()}, other)


def form_of(schema: Any, root: dict[str, Any]) -> ArgumentForm:
    """Returns the form of an argument with this schema; `root` holds what the schema refers to."""
    return ArgumentForm(types_of(schema, root), _has_plain_scalars(schema, root, _MAX_DEPTH))


def resolved(schema: Any, root: dict[str, Any]) -> Any:
    """Returns `schema`, or the schema that it stands for if it is nothing but a reference into `$defs` or one
    alternative.
    """
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, dict) or len(names := assertions(schema)) != 1:
            return schema
        (name,) = names
        value = schema[name]
        if name == "$ref" and (target := _target(value, root)) is not None:
            schema = target
        elif name in ("allOf", "anyOf", "oneOf") and isinstance(value, list) and len(value) == 1:
            schema = value[0]
        else:
            return schema
    return schema


def assertions(schema: dict[str, Any]) -> set[str]:
    """Returns the keywords of a schema that say which values are valid."""
    return schema.keys() - ANNOTATIONS


def _target(reference: Any, root: dict[str, Any]) -> Any:
    """Returns the schema in `$defs` or `definitions` that a reference names; None if it names none."""
    found = re.fullmatch(r"#/(\$defs|definitions)/([^/]+)", reference) if isinstance(reference, str) else None
    if found is None or not isinstance(root.get(found[1]), dict):
        return None
    return root[found[1]].get(found[2].replace("~1", "/").replace("~0", "~"))


def types_of(schema: Any, root: dict[str, Any], depth: int = _MAX_DEPTH) -> frozenset[str]:
    """Returns the JSON types that a schema may allow; never fewer than the schema allows."""
    if schema is False:
        return frozenset()
    if not isinstance(schema, dict) or depth == 0:
        return _TYPES
    found = _TYPES
    if (target := _target(schema.get("$ref"), root)) is not None:
        found &= types_of(target, root, depth - 1)
    if "type" in schema:
        names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        found &= {"number" if name == "integer" else name for name in names if isinstance(name, str)}
    if isinstance(schema.get("enum"), list):
        found &= {type_of(value) for value in schema["enum"]}
    if "const" in schema:
        found &= {type_of(schema["const"])}
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            found &= frozenset[str]().union(*(types_of(each, root, depth - 1) for each in schema[name]))
    for each in schema["allOf"] if isinstance(schema.get("allOf"), list) else []:
        found &= types_of(each, root, depth - 1)
    return found


def type_of(value: Any) -> str:
    """Returns the type of a JSON value, as schemas name it, but `number` for an integer."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    return "number" if isinstance(value, int | float) else "array" if isinstance(value, list) else "object"


def _has_plain_scalars(schema: Any, root: dict[str, Any], depth: int) -> bool:
    schema = resolved(schema, root)
    if not isinstance(schema, dict) or depth == 0:
        return False
    names = assertions(schema)
    for name in ("anyOf", "oneOf"):
        if names == {name} and isinstance(schema[name], list):
            return all(_has_plain_scalars(each, root, depth - 1) for each in schema[name])
    return names <= {"type", "enum", "const"} | OF_STRINGS
