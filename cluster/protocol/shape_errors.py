"""Turns errors that msgspec and `SamplingParams` find in a body into refusals that name its field."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

from manta.cluster.errors import RequestRefused
from manta.cluster.protocol.choices import choices_at
from manta.workers.sampling_params import MAX_LOGPROBS

_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING_FIELD = re.compile(r"Object missing required field `(.*)`", re.DOTALL)


def shape_error(message: str, kind: Any = None) -> RequestRefused:
    """Returns msgspec's `Expected ..., got ... - at `$.path`` as an error that names the field.

    `kind` is the struct of the body. Its `fields_elsewhere`, if any, holds advice about fields of other bodies, under
    their paths without indices.
    """
    known, elsewhere = getattr(kind, "__struct_fields__", ()), getattr(kind, "fields_elsewhere", None)
    text, _, place = message.partition(" - at ")
    path = place.removeprefix("`key` in ").strip("`").removeprefix("$").removeprefix(".").replace("[...]", "")
    for pattern, code, what in (
        (_UNKNOWN_FIELD, "unknown_parameter", "is unknown; remove it"),
        (_MISSING_FIELD, "missing_required_parameter", "is required"),
    ):
        match = pattern.fullmatch(text)
        if match:
            param = f"{path}.{match[1]}" if path else match[1]
            if pattern is _UNKNOWN_FIELD:
                advice = (elsewhere or {}).get(re.sub(r"\[\d+\]", "", param))
                what = advice or (None if path else _meant(param, known)) or what
            return RequestRefused(f"{param} {what}", param, code)
    prefix = f"{path}: " if path else "the body: "
    is_choice = text.startswith(("Invalid enum value", "Invalid value"))
    choices = ", ".join(choices_at(kind, path)) if is_choice and path else ""
    remedy = f"; use one of {choices}" if choices else ""
    return RequestRefused(f"{prefix}{text[:1].lower()}{text[1:]}{remedy}", path or None, "invalid_type")


def _meant(name: str, known: Sequence[str]) -> str | None:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    return f"is unknown; did you mean {near[0]}?" if near else None


def bound_error(message: str, names: dict[str, str]) -> RequestRefused:
    """Returns an error of `SamplingParams`, whose messages begin with the field, under the body's name for that
    field.
    """
    name = re.match(r"\w*", message)[0]  # type: ignore[index]
    param = names.get(name, name)
    if param == "top_logprobs":
        return RequestRefused(f"top_logprobs must be between 0 and {MAX_LOGPROBS}", param, "invalid_value")
    return RequestRefused(param + message[len(name) :], param, "invalid_value")
