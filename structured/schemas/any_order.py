"""Lets the properties of objects come in any order: the grammar knows them as patterns, and a guard counts them.

`free` takes the schema of a grammar, in which only `allOf`, `anyOf` and `$ref` combine schemas. Where several schemas
apply to one object, all of them are freed or none. In the grammar a freed object knows its properties by patterns,
whose order a grammar leaves open, and demands none. The guard follows the same schema with marks (`FREE`): it forbids a
name that has come already, and the object's end before all names have come that one of its branches needs
(`structured/schemas/progress.py`).

An object keeps the order of its schema if it is listed itself (`const`, `enum`), and if its branches are too many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from manta.structured.constraint import Unsupported
from manta.structured.schemas import patterns
from manta.structured.schemas.documents import SCHEMA, SCHEMA_LIST, SCHEMA_MAP, Document
from manta.structured.schemas.judge import Judge
from manta.structured.schemas.logic import Logic, TooManySteps, types_of
from manta.structured.schemas.negation import all_of

FREE = "$free"
"""A key beside those of the specification: the properties of this schema come in any order."""
MAX_PROOFS = 8
"""Most proofs that may each take as long as `Logic` allows, about a tenth of a second."""
MAX_WAYS = 256
"""Most combinations of branches that may describe one object, because the guard follows all of them."""
_COUNTED = ("required", "minProperties", "maxProperties")
"""Keywords that the guard enforces. Where they hold beside each other depends on what is still to come."""
_TIED = ("properties", "patternProperties", "additionalProperties")
_OF_OBJECTS = frozenset([*_TIED, *_COUNTED])

Finds = Callable[[str, str], bool]
"""Returns whether a pattern is found in a text."""


class Freed(NamedTuple):
    """A schema whose objects, or some of them, have their properties in any order."""

    grammar: Any
    marked: Any
    """The same schema as it was, with `FREE` in each schema of such an object. None if nothing is left to order."""


def free(schema: Any, draft: int) -> Freed | None:
    """Returns a grammar's schema with its objects freed; None if there is nothing to free. Raises `Unsupported` for a
    pattern whose automaton is too large.
    """
    if isinstance(schema, bool):
        return None
    document = Document(draft)
    document.root, document.definitions = schema, schema.get("$defs", {})
    prover = Prover(document)
    schema = _possible(prover, schema, [])
    if isinstance(schema, bool):
        return Freed(schema, None)
    freer = _Freer(schema, Judge(document).finds)
    if not freer.names_of:
        return None
    return Freed(freer.copied(schema, freer.with_patterns), freer.copied(schema, freer.with_mark))


class Prover:
    """Proves that nothing satisfies schemas, in bounded time."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._logic = Logic(document)
        self._num_left = MAX_PROOFS

    def is_empty(self, schemas: list[Any]) -> bool:
        """Whether it is proved that no value satisfies all of these."""
        try:
            return self._logic.is_empty(schemas)
        except TooManySteps:
            if self._num_left > 0:
                self._num_left -= 1
                self._logic = Logic(self._document)
            flat = self._logic.flat(schemas)
            return flat is None or not types_of(flat)


def _possible(prover: Prover, schema: Any, context: list[Any]) -> Any:
    """Returns a schema without the branches that nothing satisfies where all of `context` holds too. A grammar in which
    no property is required would follow these, to no end.
    """
    if isinstance(schema, bool):
        return schema
    if not context and prover.is_empty([schema]):
        return False
    copy: dict[str, Any] = {}
    beside = [*context, schema]
    for name, item in schema.items():
        if (name in SCHEMA_MAP or name == "$defs") and isinstance(item, dict):
            copy[name] = {key: _possible(prover, each, []) for key, each in item.items()}
        elif name == "anyOf":
            copy[name] = [_possible(prover, each, beside) for each in item if not prover.is_empty([*beside, each])]
            if not copy[name]:
                return False
        elif name == "allOf":
            copy[name] = [_possible(prover, each, beside) for each in item]
        elif name in SCHEMA_LIST:
            copy[name] = [_possible(prover, each, []) for each in item]
        else:
            copy[name] = _possible(prover, item, []) if name in SCHEMA else item
    return copy


class _Groups:
    """The schemas within a schema, in groups: two that may apply to the same value are in one group, and others may be
    too.
    """

    def __init__(self, root: dict[str, Any], finds: Finds) -> None:
        self._definitions: dict[str, Any] = root.get("$defs", {})
        self._finds = finds
        self._leaders: dict[int, int] = {}
        """The `id` of another schema of the group, by a schema's; that of itself for the group's leader."""
        self.members: dict[int, list[dict[str, Any]]] = {}
        """The schemas of each group, by their leader's `id`."""
        for node in _nodes(root):
            self._leaders[id(node)] = id(node)
            self.members[id(node)] = [node]
        for node in _nodes(root):
            for part in self.parts(node):
                self._join(node, part)
        self._has_joined = True
        while self._has_joined:
            self._has_joined = False
            for members in list(self.members.values()):
                self._join_values(members)

    def parts(self, schema: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the schemas that apply to the same value because this one does."""
        found = [*schema.get("allOf", ()), *schema.get("anyOf", ()), *schema.get("oneOf", ())]
        return [each for each in [*found, *self.targets(schema)] if isinstance(each, dict)]

    def targets(self, schema: dict[str, Any]) -> list[Any]:
        return [self._definitions[schema["$ref"].removeprefix("#/$defs/")]] if "$ref" in schema else []

    def leader(self, schema: dict[str, Any]) -> int:
        found = id(schema)
        while self._leaders[found] != found:
            found = self._leaders[found]
        return found

    def _join(self, *schemas: Any) -> None:
        nodes = [each for each in schemas if isinstance(each, dict)]
        for other in nodes[1:]:
            one, two = self.leader(nodes[0]), self.leader(other)
            if one != two:
                self._has_joined = True
                self._leaders[two] = one
                self.members[one] = [*self.members[one], *self.members.pop(two)]

    def _join_values(self, members: list[dict[str, Any]]) -> None:
        """Joins the schemas of the same property, and of the same item, in the schemas of one value."""
        others: list[Any] = []
        for member in members:
            others += [*member.get("patternProperties", {}).values(), member.get("additionalProperties")]
        self._join(*others)
        for name in {name for member in members for name in member.get("properties", ())}:
            self._join(*(each for member in members for each in self._of_property(member, name)))
        longest = max(len(member.get("prefixItems", ())) for member in members)
        for index in range(longest + 1):
            self._join(*(_item(member, index) for member in members))

    def _of_property(self, member: dict[str, Any], name: str) -> list[Any]:
        own = [member["properties"][name]] if name in member.get("properties", ()) else []
        own += [each for rule, each in member.get("patternProperties", {}).items() if self._finds(rule, name)]
        return own or [member.get("additionalProperties")]

    def num_ways(self, members: list[dict[str, Any]]) -> int:
        """Returns how many combinations of branches describe one value, at most, by one of its schemas alone."""
        within = {id(part) for member in members for part in self.parts(member)}
        heads = [member for member in members if id(member) not in within]
        return max(self._ways(head, frozenset()) for head in heads or members)

    def _ways(self, schema: Any, above: frozenset[int]) -> int:
        if isinstance(schema, bool) or id(schema) in above:
            return 1
        above |= {id(schema)}
        found = math.prod(self._ways(each, above) for each in [*schema.get("allOf", ()), *self.targets(schema)])
        for name in ("anyOf", "oneOf"):
            if name in schema:
                found *= sum(self._ways(each, above) for each in schema[name])
        return min(found, MAX_WAYS + 1)


class _Freer:
    def __init__(self, root: dict[str, Any], finds: Finds) -> None:
        self._finds = finds
        self._groups = _Groups(root, finds)
        self.names_of: dict[int, list[str]] = {}
        """The names that the schemas of a freed group list, by the `id` of the group's leader."""
        for leader, members in self._groups.members.items():
            names = dict.fromkeys(name for member in members for name in _names(member))
            is_counted = any("minProperties" in member or "maxProperties" in member for member in members)
            keeps = any(map(_keeps_order, members)) or self._groups.num_ways(members) > MAX_WAYS
            if (names or is_counted) and not keeps:
                self.names_of[leader] = list(names)
            elif is_counted:
                cause, remedy = "properties are counted that keep their order", "ask for the order of the schema"
                raise Unsupported.at("minProperties or maxProperties", cause, remedy)

    def copied(self, schema: Any, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Any:
        """Returns a copy of a schema in which `change` has been applied to the copies of the freed ones."""
        if isinstance(schema, bool):
            return schema
        copy: dict[str, Any] = {}
        for name, item in schema.items():
            if (name in SCHEMA_MAP or name == "$defs") and isinstance(item, dict):
                copy[name] = {key: self.copied(each, change) for key, each in item.items()}
            elif name in SCHEMA_LIST:
                copy[name] = [self.copied(each, change) for each in item]
            else:
                copy[name] = self.copied(item, change) if name in SCHEMA else item
        if not _OF_OBJECTS.isdisjoint(schema) and self._groups.leader(schema) in self.names_of:
            change(schema, copy)
        return copy

    def with_mark(self, schema: dict[str, Any], copy: dict[str, Any]) -> None:
        copy[FREE] = True

    def with_patterns(self, schema: dict[str, Any], copy: dict[str, Any]) -> None:
        """Makes patterns of the properties. Those of `patternProperties` leave out all names that are listed."""
        own, rules = copy.get("properties", {}), copy.get("patternProperties", {})
        found: dict[str, list[Any]] = {name: [each] for name, each in own.items()}
        result: dict[str, Any] = {}
        for rule, each in rules.items():
            listed = [name for name in self.names_of[self._groups.leader(schema)] if self._finds(rule, name)]
            for name in listed:
                found.setdefault(name, []).append(each)
            rest = _without_texts(rule, listed) if listed else rule
            if rest is not None:
                result[rest] = each
        exact = {patterns.of_texts([name]): False if False in each else all_of(*each) for name, each in found.items()}
        tied = {"patternProperties": {**exact, **result}} if exact or result else {}
        tied |= {name: copy[name] for name in ("additionalProperties",) if name in copy}
        before = dict(copy)
        copy.clear()
        for name, item in before.items():  # a grammar reads those that are tied as one only beside each other
            copy |= tied if name in _TIED else {} if name in _COUNTED else {name: item}


def _without_texts(rule: str, texts: list[str]) -> str | None:
    try:
        return patterns.combined([rule], [patterns.of_texts(texts)])
    except patterns.TooLarge as error:
        place, cause = f"the pattern {rule[:80]!r}", "its automaton without the listed names is too large"
        raise Unsupported.at(place, cause, "simplify it") from error


def _keeps_order(schema: dict[str, Any]) -> bool:
    listed = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]
    return any(isinstance(value, dict) for value in listed)


def _names(schema: dict[str, Any]) -> list[str]:
    return [*schema.get("properties", ()), *schema.get("required", ())]


def _item(schema: dict[str, Any], index: int) -> Any:
    first = schema.get("prefixItems", ())
    return first[index] if index < len(first) else schema.get("items")


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields every schema within a schema, itself included."""
    pending = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            yield node
            for name, item in node.items():
                if (name in SCHEMA_MAP or name == "$defs") and isinstance(item, dict):
                    pending += item.values()
                elif name in SCHEMA_LIST:
                    pending += item
                elif name in SCHEMA:
                    pending.append(item)
