"""Rewrites `minProperties` and `maxProperties` as a choice of properties, where the names are listed and few."""

from __future__ import annotations

import itertools
import math
from typing import Any

from manta.structured.constraint import Unsupported
from manta.structured.schemas.logic import ATOMS, MAX_ALTERNATIVES, Logic, type_names
from manta.structured.schemas.negation import all_of, present


def as_choice(logic: Logic, schema: dict[str, Any]) -> Any:
    """Writes a count of optional properties as a choice of those that are required or absent. At least k of n are
    there if and only if some k are; at most k are there if and only if some n - k are absent.
    """
    least, most = schema.get("minProperties", 0), schema.get("maxProperties")
    if (not least and most is None) or "properties" not in schema or not logic.proves:
        return None
    flat = logic.flat([schema]) or []
    names = logic.possible_names(flat)
    required = {name for part in flat for name in part.get("required", ())}
    if names is None:
        return _at_least_one(logic, schema, required)
    optional = [name for name in names if name not in required]
    least = max(0, int(least) - len(required))
    spare = 0 if most is None else max(0, len(optional) + len(required) - int(most))
    if (most is not None and len(required) > most) or least > len(optional):
        return _of_type_other_than_object(logic, schema)
    rest = {name: value for name, value in schema.items() if name not in ("minProperties", "maxProperties")}
    if max(math.comb(len(optional), size) for size in (least, spare)) > MAX_ALTERNATIVES:
        where = logic.document.path(schema)
        cause = f"there are too many ways to choose {least} to {most} of {len(optional)} optional properties"
        raise Unsupported.at(f"{where}/minProperties", cause, "list some in required")
    choices = [list(itertools.combinations(optional, size)) for size in (least, spare)]
    parts: list[Any] = [logic.document.copy_of(schema, rest)]
    others = type_names(frozenset(ATOMS) - {"object"})
    typed = schema.get("type") == "object"
    if least:
        parts.append({"anyOf": [present(*chosen) for chosen in choices[0]] + [{"type": others}] * (not typed)})
    if spare:
        gone = [{"type": "object", "properties": dict.fromkeys(chosen, False)} for chosen in choices[1]]
        parts.append({"anyOf": gone + [{"type": others}] * (not typed)})
    return all_of(*parts)


def not_kept(logic: Logic, schema: dict[str, Any]) -> list[str]:
    """The counts of a schema that its grammar does not keep. A grammar counts a name that comes twice as two, and
    cannot choose among optional properties.
    """
    flat = logic.flat([schema]) or []
    required = {name for part in flat for name in part.get("required", ())}
    names = {name for part in flat for name, value in part.get("properties", {}).items() if value is not False}
    may_come_twice = schema.get("minProperties", 0) > 1 + len(required)
    keeps_most = names <= required
    keeps_least = keeps_most and not may_come_twice and logic.proves
    kept = {"minProperties": keeps_least, "maxProperties": keeps_most}
    return [name for name, is_kept in kept.items() if name in schema and not is_kept]


def _at_least_one(logic: Logic, schema: dict[str, Any], required: set[str]) -> Any:
    """One more than the required properties is there if one of the optional ones is, or one that is not listed."""
    optional = [name for name, value in schema["properties"].items() if value is not False and name not in required]
    if "maxProperties" in schema or schema["minProperties"] != len(required) + 1 or not optional:
        return None
    rest = {name: value for name, value in schema.items() if name != "minProperties"}
    gone = {"type": "object", "properties": dict.fromkeys(optional, False), "minProperties": len(required) + 1}
    others = {"type": type_names(frozenset(ATOMS) - {"object"})}
    branches = [*(present(name) for name in optional), gone, *([] if schema.get("type") == "object" else [others])]
    return all_of(logic.document.copy_of(schema, rest), {"anyOf": branches})


def _of_type_other_than_object(logic: Logic, schema: dict[str, Any]) -> Any:
    flat = logic.flat([schema, {"type": type_names(frozenset(ATOMS) - {"object"})}]) or []
    return False if logic.is_empty(flat) else all_of(*flat)
