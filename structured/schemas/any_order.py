"""Lets the properties of objects come in any order: the grammar knows them as patterns, and the guard counts them.

`free` moves `required` and `dependentRequired` of each object's schema to `NAMES`, a key beside those of the
specification. It stays with the schema while that is rewritten. `as_patterns` then makes patterns of the properties,
whose order a grammar leaves open. A `Guard` forbids a name that has come already, and the object's end before all names
have come that it needs. Until then it allows listed names alone: a model might write others for ever.

The objects of schemas that several branches or conjuncts describe keep the schema's order: what they need depends on
the branch, which a guard does not know before the object's end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from manta.structured.schemas import patterns
from manta.structured.schemas.documents import SCHEMA, SCHEMA_LIST, SCHEMA_MAP, Document
from manta.structured.schemas.logic import Logic
from manta.structured.schemas.possible_types import possible_types

NAMES = "$names"
"""`required` and `dependentRequired` of an object whose properties come in any order, by their names."""
_MOVED = ("required", "dependentRequired")
_CHOICES = ("anyOf", "oneOf")
_CONTAINERS = frozenset(["object", "array"])
_OF_VALUES = frozenset(["items", "additionalProperties"])
_MAPS_OF_VALUES = frozenset(["properties", "patternProperties"])
_KEEPING = frozenset(
    [
        *("$ref", "allOf", "anyOf", "oneOf", "not", "if", "enum", "const", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties", "dependentSchemas", "unevaluatedProperties"),
    ]
)
"""Keywords beside which an object keeps the order of its schema."""


def free(document: Document) -> bool:
    """Frees the order of the document's objects in place. Returns whether there are any."""
    freer = _Freer(document)
    root = freer.value(document.root)
    if not freer.has_freed:
        return False
    document.replace(root, {**document.definitions, **freer.made})
    document.has_marks = True
    return True


class _Freer:
    def __init__(self, document: Document) -> None:
        self._document = document
        self._logic = Logic(document)
        self.made: dict[str, Any] = {}
        """Definitions of freed schemas, by name; those under way are None."""
        self.has_freed = False

    def value(self, schema: Any) -> Any:
        """Returns a schema that applies to a value whatever else holds, with its objects freed."""
        if isinstance(schema, bool):
            return schema
        result = {name: self._within(name, item, schema) for name, item in schema.items()}
        if not schema.get("dependentSchemas", True):  # as `dependencies` of older drafts leave it
            del result["dependentSchemas"]
        if "properties" in result and _KEEPING.isdisjoint(result) and False not in schema["properties"].values():
            self.has_freed = True
            result[NAMES] = {name: result.pop(name) for name in _MOVED if name in result}
        self._document.place(result, self._document.path(schema))
        return result

    def _within(self, name: str, item: Any, schema: dict[str, Any]) -> Any:
        if name in _OF_VALUES:
            return self.value(item)
        if name in _MAPS_OF_VALUES:
            return {key: self.value(each) for key, each in item.items()}
        if name in ("prefixItems", "allOf"):
            return [self.value(each) for each in item]
        if name in _CHOICES:
            return [self.value(each) if self._is_certain(each, item) else each for each in item]
        return self._definition(item) if name == "$ref" else item

    def _is_certain(self, branch: Any, branches: list[Any]) -> bool:
        """Whether an object or array that a branch takes is none that another takes."""
        own = _containers(self._logic, branch)
        return all(own.isdisjoint(_containers(self._logic, each)) for each in branches if each is not branch)

    def _definition(self, ref: str) -> str:
        name = f"{ref.removeprefix('#/$defs/')}_free"
        if name not in self.made:
            self.made[name] = None
            self.made[name] = self.value(self._document.resolve(ref))
        return f"#/$defs/{name}"


def needed_names(flat: list[dict[str, Any]]) -> frozenset[str]:
    """Returns the names that an object always needs, of those that its grammar does not demand."""
    return frozenset(name for schema in flat for name in schema.get(NAMES, {}).get("required", ()))


def listed_names(flat: list[dict[str, Any]]) -> list[str]:
    """Returns the names that the schemas of an object list, with those that it may need."""
    found = [*needed_names(flat)]
    for schema in flat:
        found += schema.get("properties", ())
    for _, needed in dependent_names(flat):
        found += needed
    return found


def dependent_names(flat: list[dict[str, Any]]) -> list[tuple[str, frozenset[str]]]:
    """Returns names and what an object needs that has them, of what its grammar does not demand."""
    found = [schema.get(NAMES, {}).get("dependentRequired", {}) for schema in flat]
    return [(name, frozenset(needed)) for each in found for name, needed in each.items()]


def _containers(logic: Logic, schema: Any) -> frozenset[str]:
    flat = logic.flat([schema])
    return frozenset() if flat is None else possible_types(logic, flat) & _CONTAINERS


def with_certain_branches(logic: Logic, schemas: list[Any], kind: str) -> list[Any]:
    """Returns the conjuncts with the branches that apply to every value of type `kind`: of each choice the branch that
    alone takes one.
    """
    found = list(schemas)
    seen: set[int] = set()
    while True:
        chosen = [each for each in _certain_branches(logic, found, kind) if id(each) not in seen]
        if not chosen:
            return found
        seen |= set(map(id, chosen))
        found += chosen


def _certain_branches(logic: Logic, schemas: list[Any], kind: str) -> Iterator[Any]:
    for schema in logic.flat(schemas) or ():
        for name in _CHOICES:
            possible = [each for each in schema.get(name, ()) if kind in _containers(logic, each)]
            if len(possible) == 1:
                yield possible[0]


def as_patterns(schema: Any) -> Any:
    """Returns a rewritten schema whose freed objects know their properties by patterns. None has `NAMES` any more."""
    if not isinstance(schema, dict):
        return schema
    result = {name: _mapped(name, item) for name, item in schema.items() if name != NAMES}
    if NAMES in schema and _KEEPING.isdisjoint(schema):
        named = result.pop("properties")
        result["patternProperties"] = {patterns.of_texts([name]): item for name, item in named.items()}
    return result


def _mapped(name: str, item: Any) -> Any:
    if (name in SCHEMA_MAP or name == "$defs") and isinstance(item, dict):
        return {key: as_patterns(each) for key, each in item.items()}
    if name in SCHEMA_LIST:
        return [as_patterns(each) for each in item]
    return as_patterns(item) if name in SCHEMA else item
