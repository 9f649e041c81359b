"""Proofs about schemas without an instance: that nothing satisfies several at once.

`Logic.is_empty` is sound and not complete: True is a proof, False may mean that none was found. The rewrites beside
this module rest on it: branches that exclude each other, and alternatives that may be left out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from manta.structured.constraint import Unsupported
from manta.structured.schemas import patterns
from manta.structured.schemas.documents import Document
from manta.structured.schemas.judge import Judge
from manta.structured.schemas.numbers import Range, is_integer, is_number, range_of

ATOMS = ("null", "boolean", "integer", "fraction", "string", "array", "object")
"""The types, apart from each other: a `number` is an `integer` or a `fraction`."""
MAX_STEPS = 4000
"""Most proofs for one schema: about a tenth of a second. Beyond it the guard has the work."""
MAX_DEPTH = 6
"""Levels of properties, items and branches that one proof looks into."""
MAX_ALTERNATIVES = 64
"""Most alternatives that a rewrite may make of one schema. A grammar follows all of them while it is in doubt."""


class Foreign(NamedTuple):
    """A keyword that the schema's draft does not have."""

    keyword: str


class Alternative(NamedTuple):
    """One way to satisfy a negation."""

    schema: Any
    reason: str | Foreign = ""
    """Keyword that no schema says exactly, and why; `schema` then allows more. Empty if `schema` is exact."""


def atoms(value: Any) -> frozenset[str]:
    """The types that a `type` keyword allows."""
    names = set(value) if isinstance(value, list) else {value}
    if "number" in names:
        names = names - {"number"} | {"integer", "fraction"}
    return frozenset(names)


def type_names(found: frozenset[str]) -> list[str]:
    """The value of `type` that allows these; without `fraction` alone, which has no name."""
    names = [name for name in ATOMS if name in found]
    if "fraction" in found:
        names = ["number" if name == "fraction" else name for name in names if name != "integer"]
    return names


def type_of(value: Any) -> str:
    """The type of a value, one of `ATOMS`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if is_number(value):
        return "integer" if is_integer(value) else "fraction"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


class TooManySteps(Unsupported):
    """The branches of a schema take too many proofs to tell apart."""


class Logic:
    """Proofs about one document's schemas. A list of schemas stands for their conjunction."""

    def __init__(self, document: Document, proves: bool = True) -> None:
        self.document = document
        self.proves = proves
        """False to prove and negate nothing: a guard then has the work."""
        self.judge = Judge(document)
        self.negating: list[str] = []
        """References whose targets are being negated, outer ones first."""
        self._steps = 0

    def step(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            cause = f"they take more than {MAX_STEPS} proofs to tell apart"
            raise TooManySteps.at("the schema's branches", cause, "simplify them")

    def flat(self, schemas: list[Any]) -> list[dict[str, Any]] | None:
        """The conjuncts, references and `allOf` resolved; None if one of them is `false`. Keywords that the draft does
        not know are left out, because nothing follows from them.
        """
        foreign = self.document.foreign
        found: list[dict[str, Any]] = []
        seen: set[str] = set()
        pending = list(reversed(schemas))
        while pending:
            schema = pending.pop()
            if schema is False:
                return None
            if schema is True or not schema:
                continue
            ref = schema.get("$ref")
            if ref is not None and ref not in seen:
                seen.add(ref)
                pending.append(self.document.resolve(ref))
            pending += reversed(schema.get("allOf", ()))
            is_known = foreign.isdisjoint(schema)
            found.append(schema if is_known else {key: item for key, item in schema.items() if key not in foreign})
        return found

    def is_empty(self, schemas: list[Any], depth: int = 0) -> bool:
        """Whether it is proved that no instance satisfies all of `schemas`."""
        self.step()
        flat = self.flat(schemas)
        if flat is None:
            return True
        types = types_of(flat)
        if not types:
            return True
        if not self.proves:
            return False
        values = self.finite_values(flat)
        if values is not None:
            return not values
        if depth > MAX_DEPTH:
            return False
        if all(_PROOFS[name](self, flat, depth) for name in types):
            return True
        return any(
            all(self.is_empty([*flat, branch], depth + 2) for branch in branches) for branches in _branches_of(flat)
        )

    def finite_values(self, flat: list[dict[str, Any]]) -> list[Any] | None:
        """The values that remain if an `enum` or `const` is among the conjuncts, else None."""
        lists = [schema["enum"] for schema in flat if "enum" in schema]
        lists += [[schema["const"]] for schema in flat if "const" in schema]
        if not lists:
            return None
        return [value for value in min(lists, key=len) if self.judge.is_valid(value, flat)]

    def property_schemas(self, flat: list[dict[str, Any]], name: str) -> list[Any]:
        """Returns the schemas that apply to the value of property `name`."""
        found: list[Any] = []
        for schema in flat:
            if not schema.keys() & _NAMED:
                continue
            own = [value for key, value in schema.get("properties", {}).items() if key == name]
            own += [value for key, value in schema.get("patternProperties", {}).items() if self.judge.finds(key, name)]
            if not own and "additionalProperties" in schema:
                own = [schema["additionalProperties"]]
            if "propertyNames" in schema and not self.judge.is_valid(name, [schema["propertyNames"]]):
                own = [False]
            found += own
        return found

    def possible_names(self, flat: list[dict[str, Any]]) -> list[str] | None:
        """Returns the names of all properties that an object may have, in the order of the schema; None if the schemas
        do not list them. All schemas of `flat` apply to the object.
        """
        for schema in flat:
            if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
                names = [name for name, value in schema.get("properties", {}).items() if value is not False]
                return [name for name in names if False not in self.property_schemas(flat, name)]
        return None


_NAMED = frozenset(["properties", "patternProperties", "additionalProperties", "propertyNames"])


def types_of(flat: list[dict[str, Any]]) -> frozenset[str]:
    found = frozenset(ATOMS)
    for schema in flat:
        if "type" in schema:
            found &= atoms(schema["type"])
    return found


def item_schemas(flat: list[dict[str, Any]], index: int) -> list[Any]:
    """Returns the schemas that apply to the item at `index`."""
    found = []
    for schema in flat:
        prefix = schema.get("prefixItems", ())
        if index < len(prefix):
            found.append(prefix[index])
        elif "items" in schema:
            found.append(schema["items"])
    return found


def _branches_of(flat: list[dict[str, Any]]) -> Iterator[list[Any]]:
    for schema in flat:
        for name in ("anyOf", "oneOf"):
            if name in schema:
                yield schema[name]


def numbers_of(logic: Logic, flat: list[dict[str, Any]], depth: int = 0) -> Range | None:
    """A range of all numbers that satisfy the conjuncts, those of branches too; None if no number does."""
    types = types_of(flat) & {"integer", "fraction"}
    if not types:
        return None
    found = range_of(flat, of_integers=types == {"integer"})
    for branches in _branches_of(flat) if depth < MAX_DEPTH else ():
        conjuncts = [each for branch in branches if (each := logic.flat([branch])) is not None]
        possible = [held for each in conjuncts if (held := numbers_of(logic, each, depth + 1)) is not None]
        if not possible:
            return None
        found = found.met(functools.reduce(Range.joined, possible))
    return None if found.is_empty else found


def largest(flat: list[dict[str, Any]], name: str, default: float) -> float:
    return max((schema[name] for schema in flat if name in schema), default=default)


def smallest(flat: list[dict[str, Any]], name: str, default: float) -> float:
    return min((schema[name] for schema in flat if name in schema), default=default)


# ---- one proof for each type ---------------------------------------------------------------------------------------


def _never(logic: Logic, flat: list[dict[str, Any]], depth: int) -> bool:
    return False


def _no_number(logic: Logic, flat: list[dict[str, Any]], depth: int) -> bool:
    return range_of(flat, of_integers=False).is_empty


def _no_integer(logic: Logic, flat: list[dict[str, Any]], depth: int) -> bool:
    return range_of(flat, of_integers=True).is_empty


def _no_string(logic: Logic, flat: list[dict[str, Any]], depth: int) -> bool:
    if largest(flat, "minLength", 0) > smallest(flat, "maxLength", math.inf):
        return True
    found = [schema["pattern"] for schema in flat if "pattern" in schema]
    return len(found) > 1 and patterns.are_disjoint(found)


def _no_array(logic: Logic, flat: list[dict[str, Any]], depth: int) -> bool:
    least = int(largest(flat, "minItems", 0))
    if least > smallest(flat, "maxItems", math.inf):
        return True
    longest = max((len(schema.get("prefixItems", ())) for schema in flat), default=0)
    return any(logic.is_empty(item_schemas(flat, index), depth + 1) for index in range(min(least, longest + 1)))


def _no_object(logic: Logic, flat: list[dict[str, Any]], depth: int) -> bool:
    required = {name for schema in flat for name in schema.get("required", ())}
    if max(len(required), largest(flat, "minProperties", 0)) > smallest(flat, "maxProperties", math.inf):
        return True
    names = logic.possible_names(flat)
    if names is not None and (largest(flat, "minProperties", 0) > len(names) or not required <= set(names)):
        return True
    return any(logic.is_empty(logic.property_schemas(flat, name), depth + 1) for name in required)


_PROOFS = {
    "null": _never,
    "boolean": _never,
    "integer": _no_integer,
    "fraction": _no_number,
    "string": _no_string,
    "array": _no_array,
    "object": _no_object,
}
