"""Follows which properties an object has, and which of its branches they leave, for objects of any order.

A `Ways` is what may stand at one place of a text: the combinations of branches that describe it, each without further
branches. `Progress` says of an open object or array which of them the text so far satisfies. An object may end if one
of these needs no further property. Before that at most `MAX_UNLISTED` names may come that no schema lists, because a
model might write such for ever. The schema is that of the grammar, with the marks of `structured/schemas/any_order.py`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from manta.structured.schemas.any_order import FREE, Prover
from manta.structured.schemas.documents import Document
from manta.structured.schemas.logic import Logic, item_schemas, largest, smallest, types_of
from manta.structured.schemas.numbers import json_text, read_json
from manta.structured.schemas.patterns import are_disjoint, of_beginning

MAX_PLACES = 10_000
"""Most places that are remembered. Beyond it all are forgotten."""
MAX_KEPT = 100
"""Most verdicts on values, and most sets of names with those that may follow, that one place remembers."""
MAX_UNLISTED = 4
"""Most properties that no schema lists before all that are needed have come."""
_COMBINING = frozenset(["$ref", "allOf", "anyOf"])


class Space:
    """The places of one schema. Not for two threads at once."""

    def __init__(self, document: Document) -> None:
        self.logic = Logic(document)
        self.prover = Prover(document)
        self._places: dict[tuple[Any, ...], Ways] = {}
        self._plain: dict[int, dict[str, Any]] = {}
        self.root = self.place([[document.root]])

    def place(self, alternatives: list[list[Any]]) -> Ways:
        """Returns the ways to satisfy all schemas of one of the alternatives."""
        key = tuple(dict.fromkeys(tuple(map(id, each)) for each in alternatives))
        found = self._places.get(key)
        if found is None:
            if len(self._places) >= MAX_PLACES:
                self._places.clear()
            ways = [way for each in alternatives for way in self._ways(each, [], frozenset())]
            found = self._places[key] = Ways(self, [Way(self, each) for each in ways])
        return found

    def _ways(
        self, pending: list[Any], found: list[dict[str, Any]], seen: frozenset[str]
    ) -> list[list[dict[str, Any]]]:
        pending = list(pending)
        while pending:
            schema = pending.pop(0)
            if schema is False:
                return []
            if schema is True:
                continue
            found = [*found, self._without_branches(schema)]
            pending[:0] = schema.get("allOf", ())
            ref = schema.get("$ref")
            if ref is not None and ref not in seen:
                seen |= {ref}
                pending.insert(0, self.logic.document.resolve(ref))
            if "anyOf" in schema:
                return [way for branch in schema["anyOf"] for way in self._ways([branch, *pending], found, seen)]
        return [found] if types_of(found) else []

    def _without_branches(self, schema: dict[str, Any]) -> dict[str, Any]:
        if _COMBINING.isdisjoint(schema):
            return schema
        if id(schema) not in self._plain:
            self._plain[id(schema)] = {name: item for name, item in schema.items() if name not in _COMBINING}
        return self._plain[id(schema)]


class Way:
    """Schemas that apply to one value together, without branches."""

    def __init__(self, space: Space, conjuncts: list[dict[str, Any]]) -> None:
        self.conjuncts = conjuncts
        self.types = types_of(conjuncts)
        self.is_free = any(FREE in each for each in conjuncts)
        self.needed = frozenset(name for each in conjuncts for name in each.get("required", ()))
        self._least = largest(conjuncts, "minProperties", 0)
        self._most = smallest(conjuncts, "maxProperties", math.inf)
        self._space = space
        self._names: dict[str, bytes] | None = None
        self._taken: dict[tuple[int, ...], bool] = {}
        self._begun: dict[str, bool] = {}
        closed = [each for each in conjuncts if each.get("additionalProperties") is False]
        self.is_closed = bool(closed)
        """Whether properties may not have just any name."""
        self.is_listed = any(not each.get("patternProperties") for each in closed)
        """Whether all properties that an object may have are listed."""

    def names(self) -> dict[str, bytes]:
        """Returns the names that the schemas list and allow, each with its text in JSON."""
        if self._names is None:
            listed = [name for each in self.conjuncts for name in each.get("properties", ())]
            names = dict.fromkeys([*listed, *sorted(self.needed)])
            self._names = {name: json_text(name).encode() for name in names if self.takes(name)}
        return self._names

    def takes(self, name: str) -> bool:
        """Whether there may be a property of this name, as far as that is known."""
        schemas = self.property_schemas(name)
        key = tuple(map(id, schemas))
        if key not in self._taken:
            self._taken[key] = not self._space.prover.is_empty(schemas)
        return self._taken[key]

    def room(self, names: frozenset[str]) -> float:
        """Returns how many properties may follow these besides those that are needed; below 0 if the needed ones are
        too many.
        """
        return self._most - len(names | self.needed)

    def is_complete(self, names: frozenset[str]) -> bool:
        return self.needed <= names and self._least <= len(names) <= self._most

    def following(self, names: frozenset[str]) -> dict[str, bytes] | None:
        """Returns the names that may follow these, each with its text in JSON; None if they are not listed."""
        if self.room(names) <= 0:
            listed = self.needed if self.room(names) == 0 else frozenset()
            return {name: text for name, text in self.names().items() if name in listed - names}
        if not self.is_listed and (self.needed <= names or len(names - self.names().keys()) < MAX_UNLISTED):
            return None
        return {name: text for name, text in self.names().items() if name not in names}

    def may_have(self, begun: str) -> bool:
        """Whether patterns allow a name that begins so. False is certain."""
        if begun not in self._begun:
            start = of_beginning(begun)
            self._begun[begun] = all(
                any(not are_disjoint([rule, start]) for rule in each.get("patternProperties", ()))
                for each in self.conjuncts
                if each.get("additionalProperties") is False
            )
        return self._begun[begun]

    def property_schemas(self, name: str) -> list[Any]:
        return self._space.logic.property_schemas(self.conjuncts, name)


class Ways:
    """Lists the schemas of the values that may stand at one place."""

    def __init__(self, space: Space, ways: list[Way], is_free: bool = False) -> None:
        """With `is_free` these are the ways of an object whose properties come in any order."""
        self.ways = ways
        self.is_free = is_free
        self._space = space
        self._of_kinds: dict[str, Progress] = {}
        self._within: dict[tuple[Any, ...], Ways] = {}
        self._left: dict[tuple[Any, ...], tuple[int, ...]] = {}
        self._apart: dict[str | int, bool] = {}
        self._following: dict[tuple[tuple[int, ...], frozenset[str]], dict[str, bytes] | None] = {}

    def begun(self, kind: str) -> Progress:
        """Returns the progress of an object or array that begins here."""
        if kind not in self._of_kinds:
            ways = [way for way in self.ways if kind in way.types]
            place = Ways(self._space, ways, kind == "object" and any(way.is_free for way in ways))
            self._of_kinds[kind] = Progress(place, tuple(range(len(place.ways))), frozenset())
        return self._of_kinds[kind]

    def schemas_within(self, left: tuple[int, ...], key: str | int) -> list[list[Any]]:
        """Returns the schemas of a property or an item, in each of the ways that are left."""
        ways = [self.ways[index] for index in left]
        if isinstance(key, str):
            return [way.property_schemas(key) for way in ways]
        return [item_schemas(way.conjuncts, key) for way in ways]

    def within(self, left: tuple[int, ...], key: str | int) -> Ways:
        """Returns the place of a property or an item."""
        found = self._within.get((left, key))
        if found is None:
            found = self._space.place(self.schemas_within(left, key))
            if len(self._within) < MAX_PLACES:
                self._within[left, key] = found
        return found

    def tells_apart(self, key: str | int) -> bool:
        """Whether the ways have other schemas for the value of a property or an item."""
        if len(self.ways) < 2:
            return False
        if key not in self._apart:
            if len(self._apart) >= MAX_PLACES:
                self._apart.clear()
            schemas = self.schemas_within(tuple(range(len(self.ways))), key)
            self._apart[key] = len({tuple(map(id, each)) for each in schemas}) > 1
        return self._apart[key]

    def left_by(self, left: tuple[int, ...], key: str | int, text: bytes) -> tuple[int, ...]:
        """Returns the ways of those that are left which allow a property or an item of this text."""
        known = (left, key, text)
        found = self._left.get(known)
        if found is None:
            value, judge = read_json(text), self._space.logic.judge
            pairs = zip(left, self.schemas_within(left, key), strict=True)
            found = tuple(index for index, schemas in pairs if judge.is_valid(value, schemas))
            if len(self._left) >= MAX_KEPT:
                self._left.clear()
            self._left[known] = found
        return found

    def following(self, left: tuple[int, ...], names: frozenset[str]) -> dict[str, bytes] | None:
        """Returns the names that may follow in one of the ways that are left; None if they are not listed."""
        key = (left, names)
        if key not in self._following:
            if len(self._following) >= MAX_KEPT:
                self._following.clear()
            found = [self.ways[index].following(names) for index in left]
            merged = {name: text for each in found for name, text in (each or {}).items()}
            self._following[key] = None if None in found else merged
        return self._following[key]

    @property
    def types(self) -> frozenset[str]:
        """The types of values that may stand here, and perhaps others."""
        return frozenset(kind for way in self.ways for kind in way.types)

    def values(self) -> list[Any] | None:
        """Returns the values that may stand here, if each way lists them."""
        found: list[Any] = []
        for way in self.ways:
            values = self._space.logic.finite_values(way.conjuncts)
            if values is None:
                return None
            found += values
        return found

    def is_valid(self, left: tuple[int, ...], text: bytes) -> bool:
        """Whether a whole value is as one of the ways says."""
        value, judge = read_json(text), self._space.logic.judge
        return any(judge.is_valid(value, self.ways[index].conjuncts) for index in left)


class Progress(NamedTuple):
    """An object or array that has begun."""

    place: Ways
    left: tuple[int, ...]
    """Indices of the ways that what it holds satisfies."""
    names: frozenset[str]
    """Properties so far."""

    @property
    def is_free(self) -> bool:
        """Whether the properties come in any order. The grammar then allows each several times, and demands none."""
        return self.place.is_free

    def within(self, key: str | int) -> Ways:
        return self.place.within(self.left, key)

    @property
    def is_narrowed(self) -> bool:
        """Whether a way is left no more which the grammar may still follow, because it demands no property."""
        return len(self.left) < len(self.place.ways)

    def tells_apart(self, key: str | int) -> bool:
        """Whether the value of a property or an item decides which ways are left."""
        return self.place.tells_apart(key)

    def after_name(self, name: str) -> Progress | None:
        """Returns the progress after a property's name; None if it must not follow."""
        names, ways = self.names | {name}, self.place.ways
        left = tuple(index for index in self.left if ways[index].takes(name) and ways[index].room(names) >= 0)
        if self.is_free:
            following = self.following()
            is_wrong = name in self.names and not self._may_repeat(name) if following is None else name not in following
            if is_wrong or not left:
                return None
        return self._replace(left=left, names=names)

    def after_value(self, key: str | int, text: bytes) -> Progress | None:
        """Returns the progress after the value of a property, or an item; None if no way that is left allows it."""
        if not self.tells_apart(key):
            return self
        left = self.place.left_by(self.left, key, text)
        return self._replace(left=left) if left else None

    def may_end(self) -> bool:
        """Whether the object has all properties that one of the ways needs."""
        return not self.is_free or any(self.place.ways[index].is_complete(self.names) for index in self.left)

    def is_wrong(self, text: bytes) -> bool:
        """Whether the whole value, whose text is given, fits no way. A freed object fits if it may end."""
        return len(self.place.ways) > 1 and not self.is_free and not self.place.is_valid(self.left, text)

    def following(self) -> dict[str, bytes] | None:
        """Returns the names that may follow, each with its text in JSON; None if they are not listed."""
        return self.place.following(self.left, self.names)

    def may_begin(self, text: bytes) -> bool:
        """Whether a name may follow whose text in JSON begins so, with a quote."""
        following = self.following()
        if following is not None:
            return any(name.startswith(text) for name in following.values())
        if not any(name.startswith(text) for name in self.taken()):
            return True
        begun = text[1:].decode(errors="ignore")
        ways = [self.place.ways[index] for index in self.left]
        listed = (name for way in ways for name in (way.following(self.names) or way.names()) if name not in self.names)
        return any(name.startswith(begun) for name in listed) or any(way.may_have(begun) for way in ways)

    def taken(self) -> list[bytes]:
        """Returns the texts of the names that have come and of which others may not be the beginning."""
        if not self.is_free or not self._has_rules_alone():
            return []
        return [
            text for index in self.left for name, text in self.place.ways[index].names().items() if name in self.names
        ]

    def _has_rules_alone(self) -> bool:
        """Whether only patterns allow names that are not listed."""
        return all(self.place.ways[index].is_closed for index in self.left)

    def _may_repeat(self, name: str) -> bool:
        """Whether a name may come again, because only patterns say which names there are, perhaps too few."""
        return self._has_rules_alone() and not any(name in self.place.ways[index].names() for index in self.left)
