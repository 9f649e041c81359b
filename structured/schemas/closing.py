"""Closes the objects of a document: where a schema lists properties and does not say whether others may be there, none
may. The result takes fewer instances than the schema, and none that the schema refuses.

The names are those of all schemas that apply to the same object: its own, those of its `allOf`, `$ref`, `if`,
`dependentSchemas` and branches. An object stays as it is if one of them has `additionalProperties` or
`unevaluatedProperties`, if none lists names, or if it is listed itself (`const`, `enum`). Conditions stay as they are
too (`not`, `if`, `contains`, the branches of a `oneOf` that may overlap): to narrow them could widen the whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from manta.structured.constraint import Unsupported
from manta.structured.schemas.documents import Document
from manta.structured.schemas.logic import Logic

MAX_BRANCHES = 16
"""Most branches of a `oneOf` that are told apart: their number of pairs is that of the proofs."""
_OPENING = frozenset(["additionalProperties", "unevaluatedProperties"])
_VALUES = frozenset(["items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems"])
_VALUE_MAPS = frozenset(["properties", "patternProperties"])
"""Keywords with the schemas of what a value holds. The next ones have schemas of the value itself."""
_PARTS = frozenset(["then", "else"])
_PART_LISTS = frozenset(["allOf", "anyOf"])


class _Names(NamedTuple):
    """The names and patterns of properties in the schemas of one object."""

    listed: dict[str, None]
    """Names in the order of the schemas, those of `required` included."""
    patterns: dict[str, None]
    has_list: bool
    """Whether a name is listed by more than `required`."""


def close(document: Document) -> bool:
    """Closes the document's objects in place. Returns whether that changed anything."""
    closer = _Closer(document)
    root = closer.value(document.root)
    if not closer.has_closed:
        return False
    document.replace(root, {**document.definitions, **closer.made})
    return True


class _Closer:
    def __init__(self, document: Document) -> None:
        self._document = document
        self._logic = Logic(document)
        self.made: dict[str, Any] = {}
        """Definitions of closed schemas, by name; those under way are None."""
        self.has_closed = False

    def value(self, schema: Any) -> Any:
        """Returns the schema of a whole value with its objects closed."""
        if isinstance(schema, bool) or "enum" in schema or "const" in schema:
            return schema
        if schema.keys() == {"$ref"}:
            return {"$ref": self._definition(schema["$ref"], "closed", self.value)}
        choice = self._lone_choice(schema)
        if choice:
            return self._placed(schema, {**schema, choice: [self.value(each) for each in schema[choice]]})
        names = self._names(schema, frozenset())
        inner = self._part(schema)
        if names is None or not names.has_list:
            return inner
        self.has_closed = True
        own, rules = inner.get("properties", {}), inner.get("patternProperties", {})
        closed = {**inner, "properties": {**own, **{name: True for name in names.listed if name not in own}}}
        if names.patterns:
            closed["patternProperties"] = {**rules, **{rule: True for rule in names.patterns if rule not in rules}}
        return self._placed(schema, {**closed, "additionalProperties": False})

    def _part(self, schema: Any) -> Any:
        """Returns a schema that is one of several of a value, with the objects closed that the value holds."""
        if isinstance(schema, bool) or "enum" in schema or "const" in schema:
            return schema
        result: dict[str, Any] = {}
        for name, item in schema.items():
            if name in _VALUES:
                result[name] = self.value(item)
            elif name in _VALUE_MAPS:
                result[name] = {key: self.value(each) for key, each in item.items()}
            elif name == "prefixItems":
                result[name] = [self.value(each) for each in item]
            elif name in _PART_LISTS or (name == "oneOf" and self._are_apart(schema)):
                result[name] = [self._part(each) for each in item]
            elif name in _PARTS:
                result[name] = self._part(item)
            elif name == "dependentSchemas":
                result[name] = {key: self._part(each) for key, each in item.items()}
            elif name == "$ref":
                result[name] = self._definition(item, "part", self._part)
            else:
                result[name] = item
        return self._placed(schema, result)

    def _placed(self, schema: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
        """Returns the changed schema, which takes the place of the client's."""
        self._document.place(changed, self._document.path(schema))
        return changed

    def _definition(self, ref: str, kind: str, make: Callable[[Any], Any]) -> str:
        name = f"{ref.removeprefix('#/$defs/')}_{kind}"
        if name not in self.made:
            self.made[name] = None
            self.made[name] = make(self._document.resolve(ref))
        return f"#/$defs/{name}"

    def _lone_choice(self, schema: dict[str, Any]) -> str:
        """Returns the keyword whose branches alone list properties; empty if there is none."""
        found = [name for name in ("anyOf", "oneOf") if name in schema]
        if len(found) != 1 or (found[0] == "oneOf" and not self._are_apart(schema)):
            return ""
        beside = {name: item for name, item in schema.items() if name != found[0]}
        names = self._names(beside, frozenset())
        return found[0] if names is not None and not names.listed and not names.patterns else ""

    def _are_apart(self, schema: dict[str, Any]) -> bool:
        """Whether no instance satisfies two branches of `oneOf`. Then fewer instances of each are fewer of it."""
        branches = schema["oneOf"]
        beside = {name: item for name, item in schema.items() if name != "oneOf"}
        if len(branches) > MAX_BRANCHES:
            return False
        try:
            return all(self._logic.is_empty([beside, *pair]) for pair in itertools.combinations(branches, 2))
        except (Unsupported, RecursionError):
            return False

    def _names(self, schema: Any, seen: frozenset[int]) -> _Names | None:
        """Returns what the schemas of an object say; None if one of them says which other properties there may be."""
        names = _Names({}, {}, False)
        if isinstance(schema, bool) or id(schema) in seen:
            return names
        if not _OPENING.isdisjoint(schema):
            return None
        listed = {**dict.fromkeys(schema.get("properties", ())), **dict.fromkeys(schema.get("required", ()))}
        patterns = dict.fromkeys(schema.get("patternProperties", ()))
        for needed in schema.get("dependentRequired", {}).values():
            listed |= dict.fromkeys(needed)
        has_list = bool(schema.get("properties") or patterns)
        for part in self._parts(schema):
            found = self._names(part, seen | {id(schema)})
            if found is None:
                return None
            listed, patterns = {**listed, **found.listed}, {**patterns, **found.patterns}
            has_list = has_list or found.has_list
        return _Names(listed, patterns, has_list)

    def _parts(self, schema: dict[str, Any]) -> list[Any]:
        found = [*schema.get("allOf", ()), *schema.get("anyOf", ()), *schema.get("oneOf", ())]
        found += [schema[name] for name in ("if", "then", "else") if name in schema]
        found += schema.get("dependentSchemas", {}).values()
        return [*found, *([self._document.resolve(schema["$ref"])] if "$ref" in schema else [])]
