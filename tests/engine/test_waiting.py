"""Ready rows wait for missing masks, and lose never more than twice what the best decision in hindsight loses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.cluster.engine.step_masks import Waiting

SLICE = 1 / 64
"""Time between two looks."""


def loss(arrivals: list[float], end: float, step: float) -> float:
    """Returns what rows lose if the step goes on at `end`: those that are there waited, the others lose a step."""
    return sum(end - arrival if arrival <= end else step for arrival in arrivals)


def end_of(arrivals: list[float], step: float) -> float:
    """Returns when the step goes on."""
    waiting, now = Waiting(len(arrivals), step, 0.0), 0.0
    while not waiting.is_over(sum(arrival > now for arrival in arrivals), now):
        now += SLICE
    return now


@given(
    st.lists(st.integers(0, 640).map(lambda number: number * SLICE), min_size=1, max_size=40),
    st.floats(0.1, 8.0),
)
def test_waiting_loses_at_most_twice_the_least(arrivals: list[float], step: float) -> None:
    least = min(loss(arrivals, end, step) for end in arrivals)
    most_of_slices = 2 * SLICE * len(arrivals)
    assert loss(arrivals, end_of(arrivals, step), step) <= 2 * least + most_of_slices


@pytest.mark.parametrize(
    ("arrivals", "least", "most"),
    [
        ([0.0] * 16, 0.0, 0.0),
        ([0.0] * 15 + [99.0], 1 / 15, 1 / 15 + 2 * SLICE),
        ([0.0] * 8 + [0.9] * 8, 0.9, 0.9 + 2 * SLICE),
        ([0.0] * 8 + [99.0] * 8, 1.0, 1.0 + 2 * SLICE),
        ([7.0, 7.0], 7.0, 7.0 + 2 * SLICE),
    ],
    ids=["all are there", "one of many is slow", "half comes soon", "half is slow", "none is there"],
)
def test_the_wait_follows_the_number_of_missing_rows(arrivals: list[float], least: float, most: float) -> None:
    assert least <= end_of(arrivals, 1.0) <= most
