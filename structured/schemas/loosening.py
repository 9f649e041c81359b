"""The last resort for a schema whose grammar a backend refuses: a grammar of what is simple, and a guard for the rest.

Each keyword is kept as it is, or left out and marked. Keywords are conjuncts, so the result accepts every instance of
the schema; the guard judges what was left out. Nothing is proved and nothing is multiplied out: the time is linear.
"""

from __future__ import annotations

from typing import Any

from manta.structured.constraint import Unsupported
from manta.structured.schemas import patterns
from manta.structured.schemas.documents import (
    GUARD,
    NO_KEYWORD,
    SCHEMA,
    SCHEMA_LIST,
    SCHEMA_MAP,
    Document,
    references,
)
from manta.structured.schemas.formats import is_annotation
from manta.structured.schemas.guard import encoded
from manta.structured.schemas.judge import Judge
from manta.structured.schemas.logic import type_names, type_of
from manta.structured.schemas.numbers import is_kept, keeps_multiples

_LEFT_OUT = frozenset(
    [
        *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "propertyNames", "patternProperties"),
        *("contains", "minContains", "maxContains", "uniqueItems", "minProperties", "maxProperties"),
        *("unevaluatedItems", "unevaluatedProperties"),
    ]
)
_BESIDE_PATTERN = frozenset(["minLength", "maxLength", "format"])


def loosened(document: Document, joins: bool) -> tuple[Any, str]:
    """The schema for a document's grammar, and what a `Guard` needs. If `joins` is False, no two schemas apply to one
    value in the grammar except as branches. Raises `Unsupported` and `ConstraintError`.
    """
    if document.foreign:
        names = ", ".join(sorted(document.foreign))
        raise Unsupported.at(names, cause=NO_KEYWORD, remedy="name a newer draft in $schema")
    loosener = _Loosener(document, joins)
    root = loosener.loose(document.root)
    if isinstance(root, bool):
        return root, encoded(document)
    definitions = {name: loosener.loose(value) for name, value in document.definitions.items()}
    return {**root, **({"$defs": definitions} if definitions else {})}, encoded(document)


class _Loosener:
    def __init__(self, document: Document, joins: bool) -> None:
        self._document = document
        self._judge = Judge(document)
        self._joins = joins
        self._tied = self._tied_references()
        self._keeps_multiples = keeps_multiples([document.root, document.definitions])

    def _tied_references(self) -> frozenset[str]:
        """References to what leads into a loop of references."""
        loops = self._document.loops()
        found = set(loops)
        while True:
            more = {
                f"#/$defs/{name}"
                for name, schema in self._document.definitions.items()
                if not found.isdisjoint(references(schema))
            }
            if more <= found:
                return frozenset(found)
            found |= more

    def loose(self, schema: Any) -> Any:
        if isinstance(schema, bool):
            return schema
        if "enum" in schema or "const" in schema:
            return self._listed(schema)
        result: dict[str, Any] = {}
        for name, value in list(schema.items()):
            if self._stays(name, value, schema):
                result[name] = self._within(name, value)
            elif not _says_nothing(name, value):
                self._document.mark(schema, name)
        self._add_branches(result, schema)
        return result

    def _add_branches(self, result: dict[str, Any], schema: dict[str, Any]) -> None:
        """Adds the branches of a choice, if what stands beside them may be joined with each of them."""
        name = "anyOf" if "anyOf" in schema else "oneOf"
        if name not in schema:
            return
        branches = schema[name]
        joined = [each for each in branches if isinstance(each, dict) and each.get("$ref") in self._tied]
        if result and (joined or not self._joins):
            if result.keys() - {"type"}:
                self._document.mark(schema, name)
                return
            self._document.mark(schema, "type")
            del result["type"]
        result["anyOf"] = [self.loose(each) for each in branches]

    def _listed(self, schema: dict[str, Any]) -> Any:
        """Keeps the listed values that satisfy the schema."""
        name = "enum" if "enum" in schema else "const"
        values = schema["enum"] if name == "enum" else [schema["const"]]
        values = [value for value in values if self._judge.is_valid(value, [schema])]
        if not is_kept(name, values):
            self._document.mark(schema, name)
            return {"type": type_names(frozenset(map(type_of, values)))}
        return {"enum": values} if values else False

    def _within(self, name: str, value: Any) -> Any:
        if name in SCHEMA_MAP:
            return {key: self.loose(each) for key, each in value.items()}
        if name in SCHEMA_LIST:
            return [self.loose(each) for each in value]
        return self.loose(value) if name in SCHEMA else value

    def _stays(self, name: str, value: Any, schema: dict[str, Any]) -> bool:
        if name in _LEFT_OUT or name in (GUARD, "oneOf", "anyOf"):
            return False
        if name == "$ref":
            return len(schema.keys() - {GUARD}) == 1 or (self._joins and value not in self._tied)
        if name == "allOf":
            return self._joins and self._tied.isdisjoint(references(value))
        if name == "additionalProperties":
            return "patternProperties" not in schema
        if name == "pattern":
            return patterns.is_plain(value) and (self._joins or not schema.keys() & _BESIDE_PATTERN)
        if name == "multipleOf" and not self._keeps_multiples:
            return False
        return is_kept(name, value) and not (name == "format" and is_annotation(value))


def _says_nothing(name: str, value: Any) -> bool:
    return (
        name in (GUARD, "anyOf") or (name == "uniqueItems" and not value) or (name == "format" and is_annotation(value))
    )
