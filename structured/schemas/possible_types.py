"""Finds the types that a value may have at all where branches decide. Under `oneOf`, `not` and `if` a guard judges a
value when it is complete, and a value of a type that no completion saves must not even begin.

A verdict holds for all values of a type: True if all satisfy the schemas, False if none does, None if that depends on
the value.
"""

from __future__ import annotations

from typing import Any

from manta.structured.schemas.documents import KEYWORDS
from manta.structured.schemas.logic import ATOMS, MAX_DEPTH, Logic, atoms, type_of, types_of

_ALL = frozenset(ATOMS)
_OF_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": (
        *("items", "prefixItems", "contains", "minContains", "maxContains", "unevaluatedItems"),
        *("minItems", "maxItems", "uniqueItems"),
    ),
    "object": (
        *("properties", "patternProperties", "additionalProperties", "propertyNames", "unevaluatedProperties"),
        *("required", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas"),
    ),
}
_NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_READ = frozenset(["type", "enum", "const", "anyOf", "oneOf", "allOf", "not", "if", "then", "else", "$ref"])
"""Keywords whose verdict `_of_conjunct` and `Logic.flat` know."""
_TYPES_OF = {name: frozenset([kind]) for kind, names in _OF_TYPE.items() for name in names}
_TYPES_OF |= {name: frozenset(["integer", "fraction"]) for name in _NUMERIC}
"""The types that a keyword says something about; the other keywords may say something about all."""


def possible_types(logic: Logic, flat: list[dict[str, Any]]) -> frozenset[str]:
    """Returns the types without those of which no value satisfies all conjuncts: a superset of what is left."""
    return frozenset(kind for kind in types_of(flat) if _of_conjuncts(logic, flat, kind, 0) is not False)


def _verdict(logic: Logic, schema: Any, kind: str, depth: int) -> bool | None:
    if depth > MAX_DEPTH:
        return None
    flat = logic.flat([schema])
    return False if flat is None else _of_conjuncts(logic, flat, kind, depth)


def _of_conjuncts(logic: Logic, flat: list[dict[str, Any]], kind: str, depth: int) -> bool | None:
    return _all([_of_conjunct(logic, schema, kind, depth) for schema in flat])


def _of_conjunct(logic: Logic, schema: dict[str, Any], kind: str, depth: int) -> bool | None:
    found: list[bool | None] = []
    if "type" in schema:
        found.append(kind in atoms(schema["type"]))
    listed = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]
    if "enum" in schema or "const" in schema:
        found.append(None if kind in map(type_of, listed) else False)

    def verdicts(branches: list[Any]) -> list[bool | None]:
        return [_verdict(logic, branch, kind, depth + 1) for branch in branches]

    if "anyOf" in schema:
        found.append(_any(verdicts(schema["anyOf"])))
    if "oneOf" in schema:
        found.append(_one(verdicts(schema["oneOf"])))
    if "not" in schema:
        found.append(_not(_verdict(logic, schema["not"], kind, depth + 1)))
    if "if" in schema:
        condition, then, other = verdicts([schema["if"], schema.get("then", True), schema.get("else", True)])
        found.append(_any([_all([condition, then]), _all([_not(condition), other])]))
    others = schema.keys() & KEYWORDS - _READ
    found += [None for name in others if kind in _TYPES_OF.get(name, _ALL)]
    return _all(found)


def _all(verdicts: list[bool | None]) -> bool | None:
    return False if False in verdicts else None if None in verdicts else True


def _any(verdicts: list[bool | None]) -> bool | None:
    return True if True in verdicts else None if None in verdicts else False


def _one(verdicts: list[bool | None]) -> bool | None:
    """Whether exactly one holds."""
    if verdicts.count(True) > 1:
        return False
    return _any(verdicts) if None not in verdicts else None


def _not(verdict: bool | None) -> bool | None:
    return None if verdict is None else not verdict
