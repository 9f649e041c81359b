"""Parameters of tests that have several axes: `make test` runs enough cases that every value of each axis is met, and
`make prove` runs the whole product.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence
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


def few_cases(items: Iterable[pytest.Item]) -> None:
    """Marks tests of the marker `few(n)` so that `make test` runs n of each one's cases at most, spread over all.

    A step of the cases' number over n would meet the same value of an inner axis each time, so that each case lies one
    further in its part than the one before.
    """
    cases: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        if "few" in item.keywords and "prove" not in item.keywords:
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_test in cases.values():
        marker = of_test[0].get_closest_marker("few")
        assert marker is not None
        count = min(marker.args[0], len(of_test))
        part = len(of_test) // count
        chosen = {place * len(of_test) // count + place % part for place in range(count)}
        for place, item in enumerate(of_test):
            if place not in chosen:
                item.add_marker(pytest.mark.prove)


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


ACTORS_EACH = 6
"""One in so many tests of grammar pools runs over actors in `make test`. Each actor takes a second of a core to start.
"""


def pool_forms_take_turns(items: Iterable[pytest.Item]) -> None:
    """Marks the cases over actors of tests of the fixture `make_pool` so that `make test` runs few of them. Those that
    run over actors alone all stay.
    """
    forms: dict[str, dict[str, list[pytest.Item]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for item in items:
        if hasattr(item, "callspec") and "make_pool" in item.callspec.params:
            forms[item.nodeid.partition("[")[0]][item.callspec.params["make_pool"]].append(item)
    over_actors = [item for of_test in forms.values() if len(of_test) > 1 for item in of_test["actors"]]
    for number, item in enumerate(over_actors):
        if number % ACTORS_EACH:
            item.add_marker(pytest.mark.prove)


def values_on_axes(item: pytest.Item) -> Iterator[str]:
    """Names the value of a case on each axis. An axis is one `parametrize`, or a fixture with parameters."""
    params = dict(item.callspec.params)  # type: ignore[attr-defined]
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].replace(" ", "").split(",") if isinstance(mark.args[0], str) else mark.args[0]
        yield repr([(name, params.pop(name)) for name in names])
    yield from (repr(param) for param in params.items())


def axes_take_turns(items: Iterable[pytest.Item]) -> None:
    """Marks tests of the marker `axes_in_turns` so that `make test` runs only as many cases of a test as it takes to
    meet every value of each of its axes: those of the longest axis, while the values of the others, and their pairs,
    take turns.
    """
    cases: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        if "axes_in_turns" in item.keywords and "prove" not in item.keywords:
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_test in cases.values():
        values = {item: list(values_on_axes(item)) for item in of_test}
        missing = set(itertools.chain(*values.values()))
        times: collections.Counter[Any] = collections.Counter()
        while missing:
            usual = {item: sum(times[each] for each in with_pairs(having)) for item, having in values.items()}
            chosen = max(usual, key=lambda item: (len(missing.intersection(values[item])), -usual[item]))
            times.update(with_pairs(values[chosen]))
            missing.difference_update(values.pop(chosen))
        for item in values:
            item.add_marker(pytest.mark.prove)


def with_pairs(values: Sequence[Any]) -> Iterator[Any]:
    """Gives the values and their pairs."""
    return itertools.chain(values, itertools.combinations(values, 2))
