"""Negation of schemas: `alternatives(logic, schema, context)` are schemas of which one holds if and only if `schema`
does not, for instances that satisfy `context`.

Each function here negates one keyword and gives the proof in its docstring; De Morgan does the rest: a schema is the
conjunction of its keywords, so its negation is the union of theirs. A keyword says something about one type only, so
its negation begins with that type. Where no schema says it, an alternative has a reason.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from manta.structured.schemas import patterns
from manta.structured.schemas.formats import is_annotation
from manta.structured.schemas.logic import (
    ATOMS,
    MAX_ALTERNATIVES,
    Alternative,
    Foreign,
    Logic,
    atoms,
    item_schemas,
    smallest,
    type_names,
    type_of,
    types_of,
)

Context = list[Any]
MAX_ITEMS = 8
"""`items` is negated one item at a time where `maxItems` is at most this."""


def alternatives(logic: Logic, schema: Any, context: Context) -> list[Alternative]:
    """Returns the alternatives that the context leaves possible."""
    if isinstance(schema, bool):
        return [] if schema else [Alternative({})]
    if not logic.proves:
        return [Alternative({}, "it is left to the guard")]
    found: list[Alternative] = []
    for name, value in schema.items():
        negate = _NEGATIONS.get(name)
        if negate is None:
            continue
        if name in logic.document.foreign:
            found.append(Alternative({}, Foreign(name)))
            continue
        found += [each for each in negate(logic, schema, value, context) if is_possible(logic, each, context)]
        if len(found) > MAX_ALTERNATIVES:
            return [Alternative({}, f"its negation has more than {MAX_ALTERNATIVES} alternatives")]
    return found


def is_possible(logic: Logic, each: Alternative, context: Context) -> bool:
    return not logic.is_empty([*context, each.schema])


def product(logic: Logic, choices: list[list[Alternative]], context: Context) -> list[Alternative]:
    """One alternative of each list at a time, for all must hold; without those that exclude each other."""
    found = [Alternative(True)]
    for choice in choices:
        joined = [_both(one, other) for one in found for other in choice]
        found = [each for each in joined if is_possible(logic, each, context)]
        if len(found) > MAX_ALTERNATIVES:
            return [Alternative({}, f"it has more than {MAX_ALTERNATIVES} combinations of alternatives")]
    return found


def _both(one: Alternative, other: Alternative) -> Alternative:
    return Alternative(all_of(one.schema, other.schema), one.reason or other.reason)


def all_of(*schemas: Any) -> Any:
    """The conjunction, without what says nothing."""
    parts: list[Any] = []
    for schema in schemas:
        if isinstance(schema, dict) and schema.keys() == {"allOf"}:
            parts += schema["allOf"]
        elif schema is not True and schema != {}:
            parts.append(schema)
    return True if not parts else parts[0] if len(parts) == 1 else {"allOf": parts}


def any_of(found: list[Alternative]) -> list[Alternative]:
    """The same alternatives as at most two: one that is exact, and one for all with a reason."""
    result: list[Alternative] = []
    vague: str | Foreign = next((each.reason for each in found if each.reason), "")
    for reason in ("", vague):
        schemas = [each.schema for each in found if bool(each.reason) == bool(reason)]
        if schemas and not (result and not reason):
            result.append(Alternative(schemas[0] if len(schemas) == 1 else {"anyOf": schemas}, reason))
    return result


def _typed(kind: str, **keywords: Any) -> Alternative:
    return Alternative({"type": kind, **keywords})


# ---- any type --------------------------------------------------------------------------------------------------------


def _not_type(logic: Logic, schema: Any, value: Any, context: Context) -> Iterator[Alternative]:
    """The types partition all values: not one of these is one of the others."""
    others = frozenset(ATOMS) - atoms(value)
    if "fraction" in others and "integer" not in others:
        others -= {"fraction"}
        yield Alternative({"type": "fraction"}, "type: a number that is no integer cannot be asked for")
    if others:
        yield Alternative({"type": type_names(others)})


def _not_enum(logic: Logic, schema: Any, values: Any, context: Context) -> Iterator[Alternative]:
    """The context's values without these; or, type by type, the type's values without these."""
    flat = logic.flat(context) or []
    finite = logic.finite_values(flat)
    if finite is not None:
        rest = [value for value in finite if logic.judge.is_valid(value, [{"not": {"enum": values}}])]
        if rest:
            yield Alternative({"enum": rest})
        return
    types = types_of(flat)
    held = {type_of(value) for value in values}
    plain = frozenset(types) - held - {"integer", "fraction"}
    if plain:
        yield Alternative({"type": type_names(plain)})
    if "boolean" in types & held:
        yield from (
            Alternative({"enum": [each]}) for each in (True, False) if not any(value is each for value in values)
        )
    if types & {"integer", "fraction"}:
        yield from _between([value for value in values if type_of(value) in ("integer", "fraction")])
    if "string" in types & held:
        yield _no_text([value for value in values if isinstance(value, str)])
    for value in values:
        if isinstance(value, list | dict):
            yield from _not_container(value, sum(isinstance(each, type(value)) for each in values))


def _no_text(texts: list[str]) -> Alternative:
    try:
        pattern = patterns.without_texts(texts)
    except patterns.TooLarge:
        return Alternative({"type": "string"}, "its strings are too many to exclude")
    return _typed("string", pattern=pattern)


def _between(values: list[Any]) -> Iterator[Alternative]:
    """The numbers below, between and above the given ones."""
    bounds = sorted(set(values))
    if not bounds:
        yield _typed("number")
        return
    yield _typed("number", exclusiveMaximum=bounds[0])
    for low, high in itertools.pairwise(bounds):
        yield _typed("number", exclusiveMinimum=low, exclusiveMaximum=high)
    yield _typed("number", exclusiveMinimum=bounds[-1])


def _not_container(value: Any, count: int) -> Iterator[Alternative]:
    """Something is not the empty array or object if and only if it holds something."""
    kind, least = ("array", "minItems") if isinstance(value, list) else ("object", "minProperties")
    if value or count > 1:
        yield Alternative({"type": kind}, f"an {kind} that differs from a given one cannot be asked for")
    else:
        yield Alternative({"type": kind, least: 1})


def _not_const(logic: Logic, schema: Any, value: Any, context: Context) -> Iterator[Alternative]:
    """`const` is an `enum` of one."""
    yield from _not_enum(logic, schema, [value], context)


def _not_ref(logic: Logic, schema: Any, ref: Any, context: Context) -> Iterator[Alternative]:
    """A reference is what it names."""
    if ref in logic.negating:
        yield Alternative({}, "$ref: a schema that refers to itself cannot be negated")
        return
    logic.negating.append(ref)
    try:
        yield from alternatives(logic, logic.document.resolve(ref), context)
    finally:
        logic.negating.pop()


def _not_all_of(logic: Logic, schema: Any, parts: Any, context: Context) -> Iterator[Alternative]:
    """De Morgan."""
    for part in parts:
        yield from alternatives(logic, part, context)


def _not_any_of(logic: Logic, schema: Any, parts: Any, context: Context) -> Iterator[Alternative]:
    """De Morgan."""
    yield from product(logic, [alternatives(logic, part, context) for part in parts], context)


def _not_one_of(logic: Logic, schema: Any, parts: Any, context: Context) -> Iterator[Alternative]:
    """Not exactly one: none, or two."""
    yield from _not_any_of(logic, schema, parts, context)
    yield from (Alternative(all_of(one, other)) for i, one in enumerate(parts) for other in parts[:i])


def _not_not(logic: Logic, schema: Any, value: Any, context: Context) -> Iterator[Alternative]:
    """A double negation."""
    yield Alternative(value)


def _not_if(logic: Logic, schema: Any, condition: Any, context: Context) -> Iterator[Alternative]:
    """`if` holds and `then` fails, or `if` fails and `else` fails."""
    for each in alternatives(logic, schema.get("then", True), [*context, condition]):
        yield Alternative(all_of(condition, each.schema), each.reason)
    if "else" in schema:
        failed = alternatives(logic, condition, context)
        yield from product(logic, [failed, alternatives(logic, schema["else"], context)], context)


# ---- numbers, strings ------------------------------------------------------------------------------------------------


def _opposite(kind: str, name: str, step: int = 0) -> Callable[..., Iterator[Alternative]]:
    """A bound fails if and only if the opposite bound holds, one further for integers."""

    def negate(logic: Logic, schema: Any, value: Any, context: Context) -> Iterator[Alternative]:
        if value + step >= 0 or kind == "number":
            yield Alternative({"type": kind, name: value + step if step else value})

    return negate


def _beyond(kind: str, why: str) -> Callable[..., Iterator[Alternative]]:
    def negate(logic: Logic, schema: Any, value: Any, context: Context) -> Iterator[Alternative]:
        if value is not False:
            yield Alternative({"type": kind}, why)

    return negate


def _not_pattern(logic: Logic, schema: Any, pattern: Any, context: Context) -> Iterator[Alternative]:
    """Regular languages are closed under complement."""
    try:
        other = patterns.combined([], [pattern])
    except patterns.TooLarge:
        yield Alternative({"type": "string"}, f"the complement of pattern {pattern!r} is not found; simplify it")
        return
    if other is not None:
        yield _typed("string", pattern=other)


def _not_format(logic: Logic, schema: Any, name: Any, context: Context) -> Iterator[Alternative]:
    """A name that the specification does not define is an annotation, which never fails."""
    if not is_annotation(name):
        yield Alternative({"type": "string"}, f"the complement of format {name!r} cannot be asked for")


# ---- arrays ----------------------------------------------------------------------------------------------------------


def _item(index: int, found: list[Alternative]) -> Iterator[Alternative]:
    for each in any_of(found):
        items = [*[True] * index, each.schema]
        yield Alternative({"type": "array", "minItems": index + 1, "prefixItems": items}, each.reason)


def _not_prefix_items(logic: Logic, schema: Any, parts: Any, context: Context) -> Iterator[Alternative]:
    """One of the items is there and fails."""
    flat = logic.flat(context) or []
    for index, part in enumerate(parts):
        yield from _item(index, alternatives(logic, part, item_schemas(flat, index)))


def _not_items(logic: Logic, schema: Any, part: Any, context: Context) -> Iterator[Alternative]:
    """An item beyond the prefix is there and fails."""
    flat = logic.flat(context) or []
    first, longest = len(schema.get("prefixItems", ())), smallest(flat, "maxItems", MAX_ITEMS + 1)
    if part is False:
        yield _typed("array", minItems=first + 1)
    elif longest <= MAX_ITEMS:
        for index in range(first, int(longest)):
            yield from _item(index, alternatives(logic, part, item_schemas(flat, index)))
    elif alternatives(logic, part, item_schemas(flat, MAX_ITEMS)) or first:
        yield Alternative({"type": "array", "minItems": first + 1}, "items: an array with one bad item has no schema")


def _not_contains(logic: Logic, schema: Any, part: Any, context: Context) -> Iterator[Alternative]:
    """None of the items satisfies it."""
    least = schema.get("minContains", 1)
    if "maxContains" in schema or least > 1:
        yield Alternative({"type": "array"}, "contains with a count cannot be negated")
    elif least == 1:
        found = alternatives(logic, part, [])
        reason = next((each.reason for each in found if each.reason), "")
        yield Alternative(
            {"type": "array", "items": {"anyOf": [each.schema for each in found]} if found else False}, reason
        )


# ---- objects ---------------------------------------------------------------------------------------------------------


def absent(name: str) -> dict[str, Any]:
    """The object has no property of that name."""
    return {"type": "object", "properties": {name: False}}


def present(*names: str) -> dict[str, Any]:
    return {"type": "object", "required": list(names)}


def _not_required(logic: Logic, schema: Any, names: Any, context: Context) -> Iterator[Alternative]:
    """One of the names is absent."""
    yield from (Alternative(absent(name)) for name in dict.fromkeys(names))


def _failing(name: str, found: list[Alternative]) -> Iterator[Alternative]:
    for each in any_of(found):
        yield Alternative({**present(name), "properties": {name: each.schema}}, each.reason)


def _not_properties(logic: Logic, schema: Any, parts: Any, context: Context) -> Iterator[Alternative]:
    """One of the properties is there and fails."""
    flat = logic.flat(context) or []
    for name, part in parts.items():
        yield from _failing(name, alternatives(logic, part, logic.property_schemas(flat, name)))


def _not_others(
    logic: Logic, schema: Any, part: Any, context: Context, keyword: str, applies: Callable[[str], bool]
) -> Iterator[Alternative]:
    """One of the properties whose names `keyword` applies to is there and fails `part`."""
    flat = logic.flat(context) or []
    names = logic.possible_names(flat)
    if part is True or part == {}:
        return
    if names is None:
        least = {"type": "object", "minProperties": 1}
        yield Alternative(least, f"{keyword}: an object with one bad property has no schema unless its names are given")
        return
    for name in filter(applies, names):
        yield from _failing(name, alternatives(logic, part, logic.property_schemas(flat, name)))


def _not_additional(logic: Logic, schema: Any, part: Any, context: Context) -> Iterator[Alternative]:
    """One of the names that the context allows is additional, is there and fails."""
    known, rules = schema.get("properties", {}), schema.get("patternProperties", {})

    def applies(name: str) -> bool:
        return name not in known and not any(logic.judge.finds(rule, name) for rule in rules)

    yield from _not_others(logic, schema, part, context, "additionalProperties", applies)


def _not_pattern_properties(logic: Logic, schema: Any, rules: Any, context: Context) -> Iterator[Alternative]:
    """One of the names that the context allows matches, is there and fails."""
    for rule, part in rules.items():
        applies = functools.partial(logic.judge.finds, rule)
        yield from _not_others(logic, schema, part, context, "patternProperties", applies)


def _not_names(logic: Logic, schema: Any, part: Any, context: Context) -> Iterator[Alternative]:
    """A property is there whose name fails."""
    yield from _not_others(
        logic, schema, False, context, "propertyNames", lambda name: not logic.judge.is_valid(name, [part])
    )


def _not_dependent_required(logic: Logic, schema: Any, parts: Any, context: Context) -> Iterator[Alternative]:
    """A name is there and one that it needs is not."""
    for name, needed in parts.items():
        yield from (Alternative(all_of(present(name), absent(other))) for other in needed)


def _not_dependent_schemas(logic: Logic, schema: Any, parts: Any, context: Context) -> Iterator[Alternative]:
    """A name is there and its schema fails."""
    for name, part in parts.items():
        for each in alternatives(logic, part, [*context, present(name)]):
            yield Alternative(all_of(present(name), each.schema), each.reason)


_NEGATIONS: dict[str, Callable[..., Iterator[Alternative]]] = {
    "type": _not_type,
    "enum": _not_enum,
    "const": _not_const,
    "$ref": _not_ref,
    "allOf": _not_all_of,
    "anyOf": _not_any_of,
    "oneOf": _not_one_of,
    "not": _not_not,
    "if": _not_if,
    "minimum": _opposite("number", "exclusiveMaximum"),
    "exclusiveMinimum": _opposite("number", "maximum"),
    "maximum": _opposite("number", "exclusiveMinimum"),
    "exclusiveMaximum": _opposite("number", "minimum"),
    "multipleOf": _beyond("number", "multipleOf cannot be negated"),
    "minLength": _opposite("string", "maxLength", -1),
    "maxLength": _opposite("string", "minLength", 1),
    "pattern": _not_pattern,
    "format": _not_format,
    "minItems": _opposite("array", "maxItems", -1),
    "maxItems": _opposite("array", "minItems", 1),
    "prefixItems": _not_prefix_items,
    "items": _not_items,
    "contains": _not_contains,
    "uniqueItems": _beyond("array", "uniqueItems cannot be negated"),
    "unevaluatedItems": _beyond("array", "unevaluatedItems cannot be negated"),
    "required": _not_required,
    "properties": _not_properties,
    "additionalProperties": _not_additional,
    "patternProperties": _not_pattern_properties,
    "propertyNames": _not_names,
    "minProperties": _opposite("object", "maxProperties", -1),
    "maxProperties": _opposite("object", "minProperties", 1),
    "dependentRequired": _not_dependent_required,
    "dependentSchemas": _not_dependent_schemas,
    "unevaluatedProperties": _beyond("object", "unevaluatedProperties cannot be negated"),
}
