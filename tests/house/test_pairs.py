"""Pairs of parameters of which `make test` runs some: every value of both axes is met."""

from __future__ import annotations

import types
from typing import Any

import pytest

from tests import pairs


def runs(parameters: list[Any]) -> list[Any]:
    """The values of those that `make test` runs."""
    return [each.values for each in parameters if not each.marks]


@pytest.mark.parametrize("num_always", [0, 1])
def test_every_value_is_met(num_always: int) -> None:
    found = pairs.in_turns("abcde", [1, 2, 3], num_always)
    assert [each.values for each in found] == [(first, second) for first in "abcde" for second in (1, 2, 3)]
    assert {first for first, _ in runs(found)} == set("abcde")
    assert {second for _, second in runs(found)} == {1, 2, 3}
    assert len(runs(found)) == 5 * (1 + num_always)
    assert all((first, 1) in runs(found) for first in "abcde") == bool(num_always)


class Item:
    """A case of a test, as pytest collects it."""

    def __init__(self, test: str, **parameters: Any) -> None:
        self.nodeid = f"{test}[{parameters}]"
        self.keywords = {"forms_in_turns", "few"}
        self.callspec = types.SimpleNamespace(params=parameters)

    def get_closest_marker(self, name: str) -> pytest.Mark:
        return getattr(pytest.mark, name)(4).mark

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.keywords.add(mark.name)


def test_each_case_has_the_first_form_and_another() -> None:
    forms = ["best", "older", "oldest"]
    items = [Item(test, form=form, case=case) for form in forms for test in ("a", "b") for case in range(2)]
    items += [Item("c", form=form) for form in forms] + [Item("d", case=0)]
    pairs.forms_take_turns(items)  # type: ignore[arg-type]
    met = [(each.nodeid[0], each.callspec.params.get("form")) for each in items if "prove" not in each.keywords]
    assert [form for _, form in met].count("best") == 5
    for test in "ab":
        assert {form for name, form in met if name == test} == set(forms)
    assert len([name for name, _ in met if name == "c"]) == 2
    assert ("d", None) in met


def test_a_few_cases_are_spread_over_all_values() -> None:
    """A part is as long as the inner axis."""
    items = [Item("a", outer=outer, inner=inner) for outer in range(4) for inner in range(3)]
    items += [Item("b", case=case) for case in range(3)]
    pairs.few_cases(items)  # type: ignore[arg-type]
    met = [(each.nodeid[0], each.callspec.params) for each in items if "prove" not in each.keywords]
    assert [params for name, params in met if name == "b"] == [{"case": 0}, {"case": 1}, {"case": 2}]
    assert {params["outer"] for name, params in met if name == "a"} == {0, 1, 2, 3}
    assert {params["inner"] for name, params in met if name == "a"} == {0, 1, 2}
