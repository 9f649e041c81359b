"""Asks `jsonschema` whether a value satisfies schemas of a `Document`: its verdict is what a schema means.

Patterns are found by automata (`structured/regexes/matching.py`), numbers are decimals, and a reference is followed
once for each value that it applies to. So the work grows with the text and not exponentially, and `MAX_COST` bounds it.
A value whose verdict would cost more counts as invalid, which a mask never lets a model write.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

from manta.structured.regexes.automata import TooLarge
from manta.structured.schemas import patterns
from manta.structured.schemas.documents import GUARD, Document
from manta.structured.schemas.formats import REGULAR
from manta.structured.schemas.numbers import is_integer, is_multiple, is_number

MAX_COST = 1_000_000
"""Highest cost of one verdict: keywords, members that they look at, and runs of patterns. Measured: about a second."""
MAX_MASK_COST = 2 * MAX_COST
"""Highest cost of all verdicts of one mask, which must take less than `PoolConfig.mask_seconds`."""


class TooCostly(Exception):
    """A verdict would exceed its cost."""


class Judge:
    """One for each document. `jsonschema` is loaded when first needed, for that takes a tenth of a second."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._base: Any = None
        self._validators: dict[tuple[int, ...], tuple[list[Any], Any]] = {}
        """Schemas and their validator, by the schemas' `id`. They are kept, so that no other schema gets the `id`."""
        self._left = 0.0
        """What the verdict may still cost."""
        self._left_of_mask = math.inf
        self._followed: dict[tuple[str, int], bool] = {}
        """Verdicts of references, by the `id` of the value, while one verdict is sought."""

    @contextlib.contextmanager
    def one_mask(self) -> Iterator[None]:
        """Bounds the cost of all verdicts within by `MAX_MASK_COST`. One within another changes nothing."""
        if self._left_of_mask < math.inf:
            yield
            return
        self._left_of_mask = MAX_MASK_COST
        try:
            yield
        finally:
            self._left_of_mask = math.inf

    def is_valid(self, value: Any, schemas: list[Any]) -> bool:
        """Whether `value` satisfies all of `schemas`; every format that Manta enforces counts."""
        self._left = MAX_COST
        self._followed.clear()
        try:
            return self._satisfies_all(value, schemas)
        except (TooCostly, TooLarge, RecursionError):  # the last is for schemas that nest with the value
            return False

    def finds(self, pattern: str, text: str) -> bool:
        """Whether a pattern is found in a text."""
        return self.is_valid(text, [{"pattern": pattern}])

    def _satisfies_all(self, value: Any, schemas: list[Any]) -> bool:
        others = []
        for schema in schemas:
            if schema is True:
                continue
            if isinstance(schema, dict) and schema.keys() <= _SIMPLE and self._document.draft > 4:
                self._spend(_size(schema.get("enum")))
                if not self._satisfies(value, schema):
                    return False
            else:
                others.append(schema)
        return not others or self._asked(value, others)

    def _spend(self, cost: int) -> None:
        self._left -= cost
        self._left_of_mask -= cost
        if self._left < 0 or self._left_of_mask < 0:
            raise TooCostly

    def _satisfies(self, value: Any, schema: dict[str, Any]) -> bool:
        key = json_key(value)
        if "const" in schema and json_key(schema["const"]) != key:
            return False
        if "enum" in schema and all(json_key(item) != key for item in schema["enum"]):
            return False
        if "type" in schema and not is_of_type(value, schema["type"]):
            return False
        if isinstance(value, str):
            return schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", math.inf) and (
                "pattern" not in schema or self._finds(schema["pattern"], value)
            )
        if not is_number(value):
            return True
        return all(holds(value, schema[name]) for name, holds in _OF_NUMBERS.items() if name in schema)

    def _finds(self, pattern: str, text: str) -> bool:
        return patterns.matcher(pattern).finds(text, self._spend)

    # ---- jsonschema --------------------------------------------------------------------------------------------------

    def _asked(self, value: Any, schemas: list[Any]) -> bool:
        key = tuple(map(id, schemas))
        known = self._validators.get(key)
        if known is None:
            if self._base is None:
                self._base = self._validator()
            if len(self._validators) >= MAX_VALIDATORS:
                self._validators.clear()
            known = self._validators[key] = (schemas, self._base.evolve(schema={"allOf": schemas}))
        return bool(known[1].is_valid(value))

    def _validator(self) -> Any:
        import jsonschema

        kind = jsonschema.Draft202012Validator
        own = {
            "pattern": self._pattern,
            "patternProperties": self._pattern_properties,
            "additionalProperties": self._additional_properties,
            "unevaluatedProperties": self._unevaluated_properties,
            "format": self._format,
        }
        changed = {**kind.VALIDATORS, **own, "multipleOf": _multiples, "uniqueItems": _unique_items}
        changed = {name: self._counted(keyword) for name, keyword in changed.items()}
        changed["$ref"] = self._ref(changed["$ref"])
        made = jsonschema.validators.extend(kind, changed, type_checker=_type_checker(self._document.draft == 4))
        return made({"$defs": self._document.definitions})

    def _counted(self, keyword: Keyword) -> Keyword:
        def counted(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
            self._spend(1 + _size(value) + _size(instance))
            return keyword(validator, value, instance, schema)

        return counted

    def _ref(self, keyword: Keyword) -> Keyword:
        """`$ref`, which gives the same verdict again for the same value."""

        def ref(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
            key = (value, id(instance))
            if key not in self._followed:
                self._followed[key] = not any(True for _ in keyword(validator, value, instance, schema) or ())
            if not self._followed[key]:
                yield _error(f"{value} is not satisfied")

        return ref

    def _pattern(self, validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
        if isinstance(instance, str) and not self._finds(pattern, instance):
            yield _error(f"{pattern} is not found")

    def _format(self, validator: Any, name: str, instance: Any, schema: Any) -> Iterator[Any]:
        yield from self._pattern(validator, REGULAR.get(name, ""), instance, schema)

    def _pattern_properties(self, validator: Any, rules: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if isinstance(instance, dict):
            for rule, inner in rules.items():
                for name, value in instance.items():
                    if self._finds(rule, name):
                        yield from validator.descend(value, inner)

    def _additional_properties(self, validator: Any, inner: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if isinstance(instance, dict):
            known, rules = schema.get("properties", {}), schema.get("patternProperties", {})
            for name, value in instance.items():
                if name not in known and not any(self._finds(rule, name) for rule in rules):
                    yield from validator.descend(value, inner)

    def _unevaluated_properties(self, validator: Any, inner: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if isinstance(instance, dict):
            evaluated = self._evaluated(validator, instance, schema)
            for name, value in instance.items():
                if name not in evaluated:
                    yield from validator.descend(value, inner)

    def _evaluated(self, validator: Any, instance: dict[str, Any], schema: Any) -> set[str]:
        """The properties that a schema which the object satisfies has evaluated, but for `unevaluatedProperties` beside
        them (2020-12 Core, section 11.3).
        """
        if isinstance(schema, bool):
            return set()
        self._spend(1 + _size(schema) + len(instance))
        if "additionalProperties" in schema:
            return set(instance)
        found = instance.keys() & schema.get("properties", {}).keys()
        found |= {name for rule in schema.get("patternProperties", {}) for name in instance if self._finds(rule, name)}
        applied = list(schema.get("allOf", ()))
        if "$ref" in schema:
            applied.append(self._document.resolve(schema["$ref"]))
        applied += [each for name, each in schema.get("dependentSchemas", {}).items() if name in instance]
        branches = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
        if "if" in schema:
            holds = _holds(validator, instance, schema["if"])
            branches.append(schema["if"])
            applied.append(schema.get("then" if holds else "else", True))
        applied += [each for each in branches if _holds(validator, instance, each)]
        for each in applied:
            if isinstance(each, dict) and "unevaluatedProperties" in each:
                return set(instance)
            found |= self._evaluated(validator, instance, each)
        return found


Keyword = Callable[[Any, Any, Any, Any], Any]
"""A keyword of `jsonschema`: validator, the keyword's value, the instance and the schema to errors or None."""


def _size(value: Any) -> int:
    return len(value) if isinstance(value, list | dict) else 0


def _holds(validator: Any, instance: Any, schema: Any) -> bool:
    return bool(validator.evolve(schema=schema).is_valid(instance))


def _error(message: str) -> Exception:
    import jsonschema

    return jsonschema.ValidationError(message)


@functools.cache
def _type_checker(is_draft_4: bool) -> Any:
    """The types of draft 4, or of later drafts."""
    import jsonschema

    kind: Any = jsonschema.Draft4Validator if is_draft_4 else jsonschema.Draft202012Validator
    types = kind.TYPE_CHECKER.redefine("fraction", _is_fraction)
    return types if is_draft_4 else types.redefine("integer", lambda checker, value: is_integer(value))


def _is_fraction(checker: Any, value: Any) -> bool:
    return is_number(value) and not checker.is_type(value, "integer")


def _multiples(validator: Any, divisor: Any, value: Any, schema: Any) -> Iterator[Any]:
    """`multipleOf` on decimals; `jsonschema` divides floats."""
    if is_number(value) and not is_multiple(value, divisor):
        yield _error(f"{value} is no multiple of {divisor}")


def _unique_items(validator: Any, wanted: bool, value: Any, schema: Any) -> Iterator[Any]:
    """`uniqueItems` by keys; `jsonschema` compares each two items."""
    if wanted and isinstance(value, list) and len(set(map(json_key, value))) < len(value):
        yield _error("two items are equal")


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
