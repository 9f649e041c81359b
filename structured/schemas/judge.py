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
        if self._base is None:
            self._base = self._validator()
        return self._base.evolve(schema={"allOf": schemas}).is_valid(value)

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
