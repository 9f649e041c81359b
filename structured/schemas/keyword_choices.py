"""The keywords that a rewrite turns into a choice: schemas of which one holds where the keyword does.

`structured/schemas/negation.py` has the proofs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from manta.structured.schemas import negation
from manta.structured.schemas.logic import ATOMS, Alternative, Logic, type_names
from manta.structured.schemas.negation import Context, absent, all_of, alternatives, present

Choice = Callable[[Context], list[Alternative]]

CHOICES = ("oneOf", "not", "if", "dependentRequired", "dependentSchemas")


def choices_of(logic: Logic, schema: dict[str, Any]) -> Iterator[tuple[str, Choice]]:
    """The choices that the keywords of a schema become, each with a name within the schema."""
    whole = {"oneOf": _one_of, "not": alternatives}
    for name in CHOICES:
        if name not in schema:
            continue
        value = schema[name]
        if name in whole:
            yield name, functools.partial(whole[name], logic, value)
        elif name == "if":
            yield name, functools.partial(_conditional, logic, value, schema)
        else:
            make = _dependent_names if name == "dependentRequired" else _dependent_schema
            for key, needed in value.items():
                yield f"{name}/{key}", functools.partial(make, logic, key, needed)


def possible(logic: Logic, branches: list[Any], context: Context) -> list[Alternative]:
    return [Alternative(each) for each in branches if not logic.is_empty([*context, each])]


def _one_of(logic: Logic, branches: list[Any], context: Context) -> list[Alternative]:
    """Exactly one holds: one, and the negation of each other that does not exclude it."""
    found: list[Alternative] = []
    held = [each.schema for each in possible(logic, branches, context)]
    overlapping: dict[int, list[int]] = {index: [] for index in range(len(held))}
    for (i, one), (j, other) in itertools.combinations(enumerate(held), 2):
        if not logic.is_empty([*context, one, other]):
            overlapping[i].append(j)
            overlapping[j].append(i)
    for index, branch in enumerate(held):
        here = [*context, branch]
        others = [alternatives(logic, held[other], here) for other in overlapping[index]]
        for each in negation.product(logic, others, here):
            found.append(Alternative(all_of(branch, each.schema), each.reason))
    return found


def _conditional(logic: Logic, condition: Any, schema: Any, context: Context) -> list[Alternative]:
    """`if` and `then` hold, or `if` fails and `else` holds."""
    if "then" not in schema and "else" not in schema:
        return [Alternative(True)]
    found = [Alternative(all_of(condition, schema.get("then", True)))]
    for each in alternatives(logic, condition, context):
        found.append(Alternative(all_of(each.schema, schema.get("else", True)), each.reason))
    return [each for each in found if negation.is_possible(logic, each, context)]


def _dependent_names(logic: Logic, name: str, needed: list[str], context: Context) -> list[Alternative]:
    """The name is absent, or all are present."""
    return _dependent(logic, name, present(name, *(other for other in needed if other != name)), context)


def _dependent_schema(logic: Logic, name: str, needed: Any, context: Context) -> list[Alternative]:
    """The name is absent, or present and its schema holds."""
    return _dependent(logic, name, all_of(present(name), needed), context)


def _dependent(logic: Logic, name: str, held: Any, context: Context) -> list[Alternative]:
    others = {"type": type_names(frozenset(ATOMS) - {"object"})}
    return possible(logic, [others, absent(name), held], context)
