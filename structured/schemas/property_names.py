"""Rewrites `propertyNames` and overlapping `patternProperties` as patterns that exclude each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from manta.structured.constraint import Unsupported
from manta.structured.schemas import patterns
from manta.structured.schemas.formats import is_annotation
from manta.structured.schemas.logic import Logic
from manta.structured.schemas.negation import all_of, alternatives

MAX_OVERLAPS = 5
"""Most patterns that may overlap: each set of them becomes a pattern."""


def with_apart_names(logic: Logic, schema: dict[str, Any]) -> dict[str, Any]:
    """`propertyNames` and patterns that overlap, as patterns that exclude each other: each name then falls under
    one of them, whose schema is the conjunction of all that applied to it.
    """
    rules = schema.get("patternProperties", {})
    if "propertyNames" not in schema and len(rules) < 2:
        return schema
    schema = logic.document.copy_of(schema, dict(schema))
    allowed = schema.pop("propertyNames", True)
    if "properties" in schema:
        schema["properties"] = {
            name: value if logic.judge.is_valid(name, [allowed]) else False
            for name, value in schema["properties"].items()
        }
    wanted = [] if allowed is True else _name_patterns(logic, allowed, schema)
    if wanted is not None and (wanted or not _are_apart(list(rules))):
        _split_names(logic, schema, rules, wanted)
    return schema


def _name_patterns(logic: Logic, allowed: Any, schema: dict[str, Any]) -> list[str] | None:
    """Patterns that a name must all satisfy; None if only listed names are allowed, so that none is needed."""
    if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
        return None
    flat = logic.flat([{"type": "string"}, allowed])
    return ["^a$", "^b$"] if flat is None else [text for part in flat for text in _texts(logic, part, schema)]


def _texts(logic: Logic, part: dict[str, Any], schema: dict[str, Any]) -> Iterator[str]:
    """The patterns that a schema of strings amounts to."""
    for name, value in part.items():
        if name == "pattern":
            yield value
        elif name in ("enum", "const"):
            texts = [text for text in (value if name == "enum" else [value]) if isinstance(text, str)]
            yield patterns.of_texts(texts)
        elif name in ("minLength", "maxLength"):
            yield f"^(?:(?s:.){{{f'{value},' if name == 'minLength' else f'0,{value}'}}})$"
        elif name == "not":
            yield from _texts_of_negation(logic, value, schema)
        elif name not in ("type", "allOf", "$ref") and not (name == "format" and is_annotation(value)):
            raise Unsupported.at(f"{logic.document.path(schema)}/propertyNames/{name}", remedy="use a pattern")


def _texts_of_negation(logic: Logic, value: Any, schema: dict[str, Any]) -> Iterator[str]:
    found = alternatives(logic, value, [{"type": "string"}])
    if len(found) != 1 or found[0].reason:
        raise Unsupported.at(f"{logic.document.path(schema)}/propertyNames/not", remedy="use a pattern")
    for part in logic.flat([found[0].schema]) or []:
        yield from _texts(logic, part, schema)


def _split_names(logic: Logic, schema: dict[str, Any], rules: dict[str, Any], wanted: list[str]) -> None:
    if len(rules) > MAX_OVERLAPS:
        cause = f"more than {MAX_OVERLAPS} patterns overlap"
        raise Unsupported.at(f"{logic.document.path(schema)}/patternProperties", cause, "use fewer")
    additional = schema.get("additionalProperties", True)
    result: dict[str, Any] = {}
    try:
        for size in range(len(rules), -1 if wanted else 0, -1):
            for chosen in itertools.combinations(rules, size):
                pattern = patterns.combined([*wanted, *chosen], [rule for rule in rules if rule not in chosen])
                if pattern is not None:
                    result[pattern] = all_of(*(rules[rule] for rule in chosen)) if chosen else additional
    except patterns.TooLarge as error:
        place, cause = f"{logic.document.path(schema)}/patternProperties", "the automaton of their overlap is too large"
        raise Unsupported.at(place, cause, "simplify them") from error
    schema["patternProperties"] = result
    if wanted:
        schema["additionalProperties"] = False


def _are_apart(rules: list[str]) -> bool:
    return all(patterns.are_disjoint([one, other]) for one, other in itertools.combinations(rules, 2))
