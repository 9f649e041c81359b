"""Asks `jsonschema` whether a value satisfies schemas of a `Document`: its verdict is what a schema means."""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Iterator
from typing import Any

from manta.structured.constraint import Unsupported
from manta.structured.schemas.documents import GUARD, Document
from manta.structured.schemas.formats import REGULAR
from manta.structured.schemas.numbers import is_integer, is_multiple, is_number


class Judge:
    """One for each document. `jsonschema` is loaded when first needed, for that takes a tenth of a second."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._base: Any = None
        self._validators: dict[tuple[int, ...], tuple[list[Any], Any]] = {}
        """Schemas and their validator, by the schemas' `id`. They are kept, so that no other schema gets the `id`."""

    def is_valid(self, value: Any, schemas: list[Any]) -> bool:
        """Whether `value` satisfies all of `schemas`; every format that Manta enforces counts."""
        others = []
        for schema in schemas:
            if schema is True:
                continue
            if isinstance(schema, dict) and schema.keys() <= _SIMPLE and self._document.draft > 4:
                if not _satisfies(value, schema):
                    return False
            else:
                others.append(schema)
        return not others or self._asked(value, others)

    def _asked(self, value: Any, schemas: list[Any]) -> bool:
        key = tuple(map(id, schemas))
        known = self._validators.get(key)
        if known is None:
            if self._base is None:
                self._base = self._validator()
            if len(self._validators) >= MAX_VALIDATORS:
                self._validators.clear()
            known = self._validators[key] = (schemas, self._base.evolve(schema={"allOf": schemas}))
        try:
            return bool(known[1].is_valid(value))
        except RecursionError:  # the value is deeper than any guard lets a model write
            return False

    def _validator(self) -> Any:
        made, checker = _validators(self._document.draft == 4)
        return made({"$defs": self._document.definitions}, format_checker=checker)


@functools.cache
def _validators(is_draft_4: bool) -> tuple[Any, Any]:
    """The class of validators, whose types are those of draft 4 or of later drafts, and the checker of formats. One for
    the process, because making them takes a millisecond.
    """
    import jsonschema

    checker = jsonschema.FormatChecker(formats=())
    for name, pattern in REGULAR.items():
        checker.checks(name)(_matcher(pattern))
    kind: Any = jsonschema.Draft4Validator if is_draft_4 else jsonschema.Draft202012Validator
    types = kind.TYPE_CHECKER.redefine("fraction", _is_fraction)
    if not is_draft_4:
        types = types.redefine("integer", lambda checker, value: is_integer(value))
    changed = {"multipleOf": _multiples}
    return jsonschema.validators.extend(jsonschema.Draft202012Validator, changed, type_checker=types), checker


def _is_fraction(checker: Any, value: Any) -> bool:
    return is_number(value) and not checker.is_type(value, "integer")


def _multiples(validator: Any, divisor: Any, value: Any, schema: Any) -> Iterator[Any]:
    """`multipleOf` on decimals; `jsonschema` divides floats."""
    import jsonschema

    if is_number(value) and not is_multiple(value, divisor):
        yield jsonschema.ValidationError(f"{value} is no multiple of {divisor}")


def _matcher(pattern: str) -> Any:
    compiled = re.compile(pattern.removesuffix("$") + r"\Z")
    return lambda value: not isinstance(value, str) or compiled.search(value) is not None


MAX_VALIDATORS = 1000
"""Most validators that one document's judge keeps."""
_SIMPLE = frozenset(
    [
        *(GUARD, "type", "enum", "const", "pattern", "minLength", "maxLength"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    ]
)
"""Schemas of these keywords alone are the most frequent, and `jsonschema` takes 20 times as long for them."""


_OF_NUMBERS = {
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
    "multipleOf": is_multiple,
}


def _satisfies(value: Any, schema: dict[str, Any]) -> bool:
    key = json_key(value)
    if "const" in schema and json_key(schema["const"]) != key:
        return False
    if "enum" in schema and all(json_key(item) != key for item in schema["enum"]):
        return False
    if "type" in schema and not is_of_type(value, schema["type"]):
        return False
    if isinstance(value, str):
        return schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", math.inf) and (
            "pattern" not in schema or _finds(schema["pattern"], value)
        )
    if not is_number(value):
        return True
    return all(holds(value, schema[name]) for name, holds in _OF_NUMBERS.items() if name in schema)


def is_of_type(value: Any, names: Any) -> bool:
    """Whether a value is of the type, or of one of the types, that `type` names."""
    return any(_is_of(value, name) for name in (names if isinstance(names, list) else [names]))


def _is_of(value: Any, name: str) -> bool:
    if isinstance(value, bool) or value is None:
        return name == ("null" if value is None else "boolean")
    if is_number(value):
        return name in ("number", "integer" if is_integer(value) else "fraction")
    return name == ("string" if isinstance(value, str) else "array" if isinstance(value, list) else "object")


def json_key(value: Any) -> Any:
    """Equal for equal JSON values, and only for those: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, list):
        return ("array", tuple(map(json_key, value)))
    if isinstance(value, dict):
        return ("object", frozenset((name, json_key(item)) for name, item in value.items()))
    return value


def _finds(pattern: str, text: str) -> bool:
    """Returns whether the pattern is found in the text. Raises `Unsupported` if Python does not read the pattern."""
    try:
        return re.search(pattern, text) is not None
    except re.error as error:
        raise Unsupported.at(f"the pattern {pattern[:80]!r}", cause=str(error)) from error
