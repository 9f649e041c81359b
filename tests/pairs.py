"""Parameters of tests that have two axes: `make test` runs enough pairs that every value of both is met, and
`make prove` runs the whole product.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def in_turns(firsts: Iterable[Any], seconds: Sequence[Any], num_always: int = 0) -> list[Any]:
    """Makes parameters of all pairs. `make test` runs each first value with the first `num_always` second values and
    with one of the others, which take turns.
    """
    others = len(seconds) - num_always

    def runs(number: int, place: int) -> bool:
        return place < num_always or place - num_always == number % others

    return [
        pytest.param(first, second, marks=[] if runs(number, place) else pytest.mark.prove)
        for number, first in enumerate(firsts)
        for place, second in enumerate(seconds)
    ]


def every(values: Iterable[Any], step: int) -> list[Any]:
    """Makes parameters of all values. `make test` runs every `step`-th of them."""
    return [
        pytest.param(value, marks=[] if number % step == 0 else pytest.mark.prove)
        for number, value in enumerate(values)
    ]


FORM_PARAMETERS = {"form", "kernels"}
"""Names of parameters that choose a form of the kernels."""


def forms_take_turns(items: Iterable[pytest.Item]) -> None:
    """Marks tests of the marker `forms_in_turns` so that `make test` runs each case with the first form of the kernels
    and with one of the others. Which one differs from case to case and from test to test.
    """
    cases: dict[str, dict[str, list[pytest.Item]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for item in items:
        if "forms_in_turns" in item.keywords and "prove" not in item.keywords and hasattr(item, "callspec"):
            others = {name: value for name, value in item.callspec.params.items() if name not in FORM_PARAMETERS}
            if others.keys() != item.callspec.params.keys():
                cases[item.nodeid.partition("[")[0]][repr(others)].append(item)
    for number, of_test in enumerate(cases.values()):
        for place, (_, *rest) in enumerate(of_test.values()):
            for turn, item in enumerate(rest):
                if turn != (number + place) % len(rest):
                    item.add_marker(pytest.mark.prove)
