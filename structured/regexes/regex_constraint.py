"""The `regex` constraint of a request as the grammar backends read it, or its refusal."""

from __future__ import annotations

import msgspec

from manta.structured.constraint import ConstraintError, ConstraintSpec
from manta.structured.regexes.automata import TooLarge
from manta.structured.regexes.ecma import Unreadable, parse
from manta.structured.regexes.languages import expression

_BACKENDS = ("auto", "llguidance", "xgrammar")
"""Backends that take the text of `regex` for a regular expression; what a registered one takes it for is its own."""
TOO_LARGE = "its automaton is too large"


def with_plain_regex(spec: ConstraintSpec) -> ConstraintSpec:
    """The constraint with `for_whole_answer` of its regular expression. Raises `ConstraintError`."""
    if spec.kind != "regex" or spec.backend not in _BACKENDS:
        return spec
    return msgspec.structs.replace(spec, text=for_whole_answer(spec.text))


def for_whole_answer(pattern: str) -> str:
    """An expression for the texts that `pattern` matches from their beginning to their end, in the spelling that all
    backends read. Raises `ConstraintError` where there is none.
    """
    try:
        parse(pattern)
        text = expression(f"^(?:{pattern})$")
    except Unreadable as error:
        raise refused(error, "regex") from error
    except (TooLarge, RecursionError) as error:
        remedy = "simplify the pattern, or write it without looking around"
        raise ConstraintError.because("not_enforced", "regex", cause=TOO_LARGE, remedy=remedy) from error
    if text is None:
        raise ConstraintError.because("unsatisfiable", "regex")
    return text


def refused(error: Unreadable, place: str) -> ConstraintError:
    """The refusal of a pattern that stands at `place`."""
    if error.kind == "not_regular":
        return ConstraintError.because("not_enforced", f"{place}: {error}", remedy=error.remedy)
    cause = f"{error} is not one of ECMA-262 with the u flag"
    return ConstraintError.because("unfit", place, cause=cause, remedy=error.remedy)
