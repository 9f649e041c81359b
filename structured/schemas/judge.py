"""Asks `jsonschema` whether a value satisfies schemas of a `Document`: its verdict is what a schema means."""

from __future__ import annotations

import re
from typing import Any

from structured.schemas.documents import Document
from structured.schemas.formats import REGULAR


class Judge:
    """One for each document. `jsonschema` is loaded when first needed, for that takes a tenth of a second."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._base: Any = None

    def is_valid(self, value: Any, schemas: list[Any]) -> bool:
        """Whether `value` satisfies all of `schemas`; every format that Manta enforces counts."""
        others = []
        for schema in schemas:
            if isinstance(schema, dict) and schema.keys() <= _SIMPLE and self._document.draft > 4:
                if not _satisfies(value, schema):
                    return False
            else:
                others.append(schema)
        return not others or self._asked(value, others)

    def _asked(self, value: Any, schemas: list[Any]) -> bool:
        if self._base is None:
            self._base = self._validator()
        try:
            return self._base.evolve(schema={"allOf": schemas}).is_valid(value)
        except OverflowError:  # of `multipleOf`, for a number that a float cannot hold
            return False

    def _validator(self) -> Any:
        import jsonschema

        checker = jsonschema.FormatChecker(formats=())
        for name, pattern in REGULAR.items():
            checker.checks(name)(_matcher(pattern))
        kind: Any = jsonschema.Draft4Validator if self._document.draft == 4 else jsonschema.Draft202012Validator
        types = kind.TYPE_CHECKER.redefine("fraction", _is_fraction)
        made = jsonschema.validators.extend(jsonschema.Draft202012Validator, type_checker=types)
        return made({"$defs": self._document.definitions}, format_checker=checker)


def _is_fraction(checker: Any, value: Any) -> bool:
    return checker.is_type(value, "number") and not checker.is_type(value, "integer")


def _matcher(pattern: str) -> Any:
    compiled = re.compile(pattern.removesuffix("$") + r"\Z")
    return lambda value: not isinstance(value, str) or compiled.search(value) is not None


_SIMPLE = frozenset(["type", "enum", "const"])
"""Schemas of these keywords alone are the most frequent, and `jsonschema` takes 50 times as long for them."""


def _satisfies(value: Any, schema: dict[str, Any]) -> bool:
    key = json_key(value)
    if "const" in schema and json_key(schema["const"]) != key:
        return False
    if "enum" in schema and all(json_key(item) != key for item in schema["enum"]):
        return False
    names = schema.get("type", ())
    return not names or any(_is_of(value, name) for name in (names if isinstance(names, list) else [names]))


def _is_of(value: Any, name: str) -> bool:
    if isinstance(value, bool) or value is None:
        return name == ("null" if value is None else "boolean")
    if isinstance(value, int | float):
        return name == "number" or name == ("integer" if (isinstance(value, int) or value.is_integer()) else "fraction")
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
