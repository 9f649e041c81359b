"""Constraints that generated requests carry: every kind, each with the backends that enforce it."""

from __future__ import annotations

import json
from typing import Any

from manta.structured.constraint import ConstraintSpec, Kind


def _spec(kind: Kind, text: Any, **fields: Any) -> ConstraintSpec:
    return ConstraintSpec(kind=kind, text=text if isinstance(text, str) else json.dumps(text), **fields)


def example(**options: Any) -> ConstraintSpec:
    """Of the backend in `tests/plugin`, which fails and dawdles when it is told to."""
    return _spec("regex", {"allowed": list(range(20, 90)), **options}, backend="example")


_RECORD = {
    "type": "object",
    "properties": {
        "identification": {"enum": ["A", "B", "C"]},
        "is_active": {"type": "boolean"},
        "items": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 700}, "maxItems": 3},
    },
    "required": ["identification", "is_active", "items"],
    "additionalProperties": False,
}
_FIXED = {
    "type": "object",
    "properties": {"language_of_the_customer": {"enum": ["English", "Greek"]}, "is_active": {"type": "boolean"}},
    "required": ["language_of_the_customer", "is_active"],
    "additionalProperties": False,
}
"""Mostly forced text; both backends are proven to enforce it."""
_TRIGGERED = {
    "type": "structural_tag",
    "triggers": ["a"],
    "structures": [{"begin": "a=", "schema": {"enum": [1, 22, 333]}, "end": ")"}],
}
"""The letter `a` may only begin `a=number)`."""
_TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<x>",
        "content": {"type": "json_schema", "json_schema": {"type": "integer", "minimum": 1, "maximum": 3}},
        "end": "</x>",
    },
}

CATALOGUE: tuple[ConstraintSpec, ...] = (
    _spec("json_schema", _RECORD, any_whitespace=False),
    _spec("json_schema", _FIXED, any_whitespace=False, backend="llguidance"),
    _spec("json_schema", _FIXED, any_whitespace=False, backend="xgrammar"),
    _spec("json_schema", _FIXED),
    _spec("json_object", ""),
    _spec("regex", r"total: [0-9]{2,4} euro( and [a-f]{1,9})?\.", backend="llguidance"),
    _spec("regex", r"total: [0-9]{2,4} euro( and [a-f]{1,9})?\.", backend="xgrammar"),
    _spec("regex", "[a-f]{40}"),
    _spec("regex", "(ab|c[0-9]){30}"),
    _spec("choice", ["yes", "yes, but no", "nö"], backend="llguidance"),
    _spec("choice", ["a long answer", "a longer answer"], backend="xgrammar"),
    _spec("choice", ["a long answer", "a longer answer"], begin_after=(50,)),
    _spec("lark", 'start: "a" b\nb: /[0-9]{2}/ | "(" b ")"'),
    _spec("ebnf", 'root ::= "item " [0-9] ", " root | "end"', backend="xgrammar"),
    _spec("structural_tag", _TRIGGERED, backend="llguidance", any_whitespace=False),
    _spec("structural_tag", _TAG, backend="xgrammar"),
    example(),
    example(length=9),
    example(length=12, favour={"33": 20.0}),
    example(length=20, at={"3": 0.03, "9": 0.1}),
    example(length=20, on={"40": 0.02}),
    example(at={"5": "raise"}),
    example(on={"41": "raise"}),
)

HANGING = example(at={"3": "hang"})
"""A grammar that hangs. Its worker is replaced after the mask's budget, which takes seconds, so it is rare."""
