"""Random cases against the plain engine, and the fuzzer's own promises: pure, exact, and able to find a fault.

A failing case is written to `.fuzz/`, whole and shrunk, and printed; `make fuzz CASE=file` runs it again.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator

import msgspec
import pytest

from tests.fuzz import campaign as campaigns
from tests.fuzz.campaign import Campaign, check_engine
from tests.fuzz.cases import Case, load, save
from tests.fuzz.generate import generate, generate_exact, generate_recurrent
from tests.fuzz.shrink import shrink

pytestmark = pytest.mark.usefixtures("plugin", "quiet")

NUM_SEEDS = 24
"""Number of seeds in the suite, in groups small enough for a slow machine."""
GROUP = 6
SHRINK_SECONDS = 30.0
"""Seconds for shrinking each failure. `make fuzz SEED=... ARGS="--count 1"` takes longer."""
NUM_PROVEN = 50
"""Seeds within which every feature must occur."""
NUM_RECURRENT, NUM_RECURRENT_PROVEN, RECURRENT_GROUP = 4, 1000, 100
"""Seeds of the recurrent model in the suite, and in groups among the long tests."""
NUM_EXACT, NUM_EXACT_PROVEN, EXACT_GROUP = 1, 420, 70
"""Seeds of exact engines, whose models have one mixer after the other, in the suite and among the long tests."""
FIRST_LONG_SEED = 1_000_000
NUM_LONG_PARTS, LONG_PART_SECONDS = 12, 300.0
"""An hour together; each part is recorded by itself when it has passed."""


@pytest.fixture(scope="module")
def quiet() -> Iterator[None]:
    """Injected faults are logged, as they should be; not here. The Ray of the few cases with actors ends in the end."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


def run(
    seeds: Iterator[int] | range, seconds: float = float("inf"), make: Callable[[int], Case] = generate
) -> Campaign:
    campaign = Campaign(check_engine, make, shrink_seconds=SHRINK_SECONDS)
    campaign.run(seeds, seconds)
    assert not campaign.failed, f"seeds {campaign.failed} fail; their cases lie in {campaigns.FOLDER}"
    return campaign


@pytest.mark.few(1)
@pytest.mark.parametrize("first", range(0, NUM_SEEDS, GROUP))
def test_random_cases_equal_the_plain_engine(first: int) -> None:
    run(seed for seed in range(first, first + GROUP) if generate(seed).settings.pool_form == "threads")


def test_random_cases_of_a_recurrent_model_equal_the_plain_engine() -> None:
    run(range(NUM_RECURRENT), make=generate_recurrent)


@pytest.mark.prove
@pytest.mark.parametrize("first", range(0, NUM_RECURRENT_PROVEN, RECURRENT_GROUP))
def test_a_thousand_histories_of_a_recurrent_model(first: int, record_property) -> None:
    campaign = run(range(first, first + RECURRENT_GROUP), make=generate_recurrent)
    for name in ("cases", "requests", "tokens", "preemptions", "late rows", "prefix cache hits", "near ties"):
        record_property(name, campaign.counts[name])


def test_random_cases_of_exact_engines_equal_the_plain_one() -> None:
    run(range(NUM_EXACT), make=generate_exact)


@pytest.mark.prove
@pytest.mark.parametrize("first", range(0, NUM_EXACT_PROVEN, EXACT_GROUP))
def test_hundreds_of_histories_of_exact_engines(first: int, record_property) -> None:
    campaign = run(range(first, first + EXACT_GROUP), make=generate_exact)
    for name in ("cases", "requests", "tokens", "preemptions", "late rows", "prefix cache hits"):
        record_property(name, campaign.counts[name])


@pytest.mark.prove
def test_every_feature_occurs_within_fifty_seeds(record_property) -> None:
    campaign = run(range(NUM_SEEDS, NUM_SEEDS + NUM_PROVEN))
    for name in ("cases", "requests", "tokens", "steps", "preemptions", "late rows"):
        record_property(name, campaign.counts[name])
    assert not campaign.missing, campaign.table()


@pytest.mark.prove
@pytest.mark.parametrize("part", range(NUM_LONG_PARTS))
def test_an_hour_of_random_cases(part: int, record_property) -> None:
    first = FIRST_LONG_SEED * (1 + part)
    campaign = run(range(first, first + FIRST_LONG_SEED), LONG_PART_SECONDS)
    for name in ("cases", "requests", "tokens", "steps", "near ties"):
        record_property(name, campaign.counts[name])


def test_a_case_is_reproduced_by_seed_and_file(tmp_path) -> None:
    for seed in range(200):
        case = generate(seed)
        assert generate(seed) == case
        save(case, tmp_path / "case.json")
        assert load(tmp_path / "case.json") == case
    assert len({msgspec.json.encode(generate(seed)) for seed in range(200)}) == 200


def test_shrinking_keeps_only_what_the_failure_needs() -> None:
    case = next(case for case in map(generate, range(1000)) if any(is_guilty(each) for each in case.requests))

    def fails(candidate: Case) -> bool:
        return any(is_guilty(each) for each in candidate.requests) and candidate.settings.block_size == case_size

    case_size = case.settings.block_size
    small = shrink(case, fails, seconds=60)
    assert fails(small)
    (request,) = small.requests
    assert small.faults == ()
    assert len(request.prompt) <= 3
    changed = [name for name in ("top_p", "constraint", "n", "stop", "logprobs") if getattr(request.params, name)]
    assert changed == ["top_p", "constraint", "n"], "top_p and n have defaults that are true"


def is_guilty(request) -> bool:
    constraint = request.params.constraint
    return constraint is not None and constraint.kind == "lark"
