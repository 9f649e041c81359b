"""When steps are planned ahead of drafts: the expected yields against simulated sequences, and what pays."""

from __future__ import annotations

import numpy as np
import pytest

from manta.specdecode.run_ahead import DECIDED_EVERY, LEAST_TIMED, TIMED_EVERY, RunAhead, gained, gained_ahead


def simulated(acceptance: float, count: int, is_ahead: bool, num_steps: int = 4000) -> float:
    """Tokens a step of one sequence, token by token: whether the proposer knows each next one is drawn at random. If
    steps are planned ahead, one with informed drafts is followed by a plain one, and one with a rejected draft by one
    that yields nothing.
    """
    noise, num_tokens, kind = np.random.default_rng(count), 0, "informed"
    for _ in range(num_steps):
        knows = noise.random(count + 1) < acceptance
        num_drafts = 0 if kind in ("plain", "nothing") else count
        accepted = 0
        while kind != "wrong guess" and accepted < num_drafts and knows[accepted]:
            accepted += 1
        if kind != "nothing":
            num_tokens += accepted + 1
        if not is_ahead:
            continue
        if kind == "nothing":
            kind = "informed"
        elif accepted < num_drafts:
            kind = "nothing"
        elif kind == "informed":
            kind = "plain"
        else:  # the proposer guesses the token behind the drafts
            kind = "right guess" if knows[count] else "wrong guess"
    return num_tokens / num_steps


@pytest.mark.parametrize("acceptance", [0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("count", [1, 4])
def test_expected_yields_are_those_of_simulated_sequences(acceptance: float, count: int) -> None:
    chances, counts = np.array([acceptance]), np.array([count])
    assert gained(chances, counts)[0] == pytest.approx(simulated(acceptance, count, is_ahead=False), rel=0.05)
    assert gained_ahead(chances, counts)[0] == pytest.approx(simulated(acceptance, count, is_ahead=True), rel=0.05)


def test_sequences_without_drafts_yield_one_token_either_way() -> None:
    chances, counts = np.array([0.2, 1.0]), np.array([0, 0])
    assert gained(chances, counts).tolist() == gained_ahead(chances, counts).tolist() == [1.0, 1.0]


def decision(run_ahead: RunAhead, acceptance: list[float], counts: list[int]) -> bool:
    run_ahead.decide(len(counts), np.array(acceptance), np.array(counts))
    return run_ahead.is_ahead


def test_steps_are_planned_ahead_where_that_is_expected_to_pay() -> None:
    run_ahead = RunAhead()
    assert not decision(run_ahead, [0.999, 0.999], [4, 4]), "no gap has been timed"
    for _ in range(LEAST_TIMED):
        run_ahead.learn(2, 1.0, gap=0.15, waited=0.5)
    assert decision(run_ahead, [0.999, 0.999], [4, 4])
    assert not decision(run_ahead, [0.8, 0.999], [4, 4])
    assert decision(run_ahead, [0.8, 0.999], [0, 4])
    assert not decision(run_ahead, [0.999] * 64, [4] * 64), "no gap has been timed at this load"
    for _ in range(LEAST_TIMED):
        run_ahead.learn(64, 1.0, gap=0.15, waited=0.0)
    assert not decision(run_ahead, [0.999] * 64, [4] * 64), "the device waits for the host anyway"


def test_gaps_are_timed_again() -> None:
    run_ahead = RunAhead()
    for _ in range(LEAST_TIMED):
        run_ahead.learn(1, 1.0, gap=0.1, waited=0.5)
    steps = [run_ahead.is_due() for _ in range(TIMED_EVERY + DECIDED_EVERY)]
    planned = [decision(run_ahead, [1.0], [4]) for is_due in steps if is_due]
    assert planned == [True] * (TIMED_EVERY // DECIDED_EVERY) + [False]
    run_ahead.learn(1, 1.0, gap=0.1, waited=0.5)
    assert decision(run_ahead, [1.0], [4])
