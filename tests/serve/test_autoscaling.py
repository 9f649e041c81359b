"""A real server whose engines come and go with the load: 1, 3, 1, 0, 1 and 0, and no request is lost."""

from __future__ import annotations

import itertools

import pytest

from tests.serve.load_trace import MANY, MAX_ENGINES, Trace, trace

pytestmark = pytest.mark.prove


@pytest.fixture(scope="module")
def found() -> Trace:
    return trace(hold_s=2.0, num_tokens=200)


def test_no_request_is_lost(found: Trace) -> None:
    assert not found.problems
    assert len(found.answers) > 2 * MANY


def test_engines_follow_the_load(found: Trace) -> None:
    steps = [later - earlier for earlier, later in itertools.pairwise(found.counts)]
    assert found.counts[0] == found.counts[-2] == 1
    assert max(found.counts) == MAX_ENGINES
    assert found.counts[-1] == 0
    turns = [number for number, (step, after) in enumerate(itertools.pairwise(steps)) if step * after < 0]
    assert len(turns) == 3, found.counts  # up, down to none, up, down


def test_who_finds_no_engine_waits_for_one(found: Trace) -> None:
    last = found.answers[-1]
    (at,) = [at for at, name in found.marks if name == "one"]
    assert last.at >= at
    assert last.ttft_s > max(answer.ttft_s for answer in found.between("few", "many"))


def test_each_start_tells_its_phases(found: Trace) -> None:
    assert len(found.starts) == MAX_ENGINES + 1
    assert all({"process", "imports", "weights", "first_health"} <= set(seconds) for seconds in found.starts)
