"""What trials of drafts may cost: by a simulated clock, whatever steps cost and however drafts are accepted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from manta.specdecode.lengths import Costs, StepCost
from manta.specdecode.pace import LEAST_STEPS, MOST_LOSS
from manta.specdecode.proposers import DraftRequest, ProposerChain
from manta.specdecode.trial_budget import LOSS_SHARE, TrialBudget
from manta.workers.step import SamplePoint, ScheduledSequence, StepInput, StepOutput

DRAFT, OTHER = 1, 2
"""The token that proposers draft, and one that is drawn in its place."""


@pytest.mark.parametrize("seed", range(3))
def test_losses_stay_within_the_share(seed: int) -> None:
    """The bound is the sum of what the budget had, the share of the time, and one step."""
    noise = np.random.default_rng(seed)
    budget, now, lost, worst, num_tried = TrialBudget(5.0), 0.0, 0.0, 0.0, 0
    for _ in range(2000):
        now += float(noise.exponential(1.0))
        if not budget.allows_trial(now):
            continue
        num_tried += 1
        loss = float(noise.normal(0.2, noise.choice([0.1, 0.3, 1.0])))
        budget.spend(loss, now, 5.0)
        lost, worst = lost + loss, max(worst, loss)
        assert lost <= 5.0 + LOSS_SHARE * now + worst + 1e-9
        if budget.is_spent(now) or noise.random() < 0.1:
            budget.end_trial(now)
    assert num_tried > 20


class Regime(NamedTuple):
    """What drafts are like for some steps."""

    acceptance: float
    """Probability that a draft is accepted if those before it are."""
    draft_seconds: float
    """What a draft for every sequence takes."""
    verify_seconds: float
    """What a step takes longer for each draft. A step without drafts takes one second."""


class Drafter:
    """A proposer whose calls take simulated time. With `catch_up_calls` it cannot draft in the first calls after a
    rest.
    """

    def __init__(self, clock: Any, name: str = "draft", members: Iterable[int] = range(64)) -> None:
        self.name = name
        self.wanted = True
        self.seconds = 0.0
        self.spent = 0.0
        self.catch_up_calls = 0
        self.members = set(members)
        self._clock = clock
        self._num_calls = 0

    def begin(self, step: StepInput) -> None:
        if not self.wanted:
            self._num_calls = 0

    def propose(self, requests: Sequence[DraftRequest]) -> dict[int, list[int]]:
        self._num_calls += 1
        spent = self.seconds * max(each.count for each in requests)
        self.spent += spent
        self._clock.now += spent
        if self._num_calls <= self.catch_up_calls:
            return {}
        return {each.sequence_id: [DRAFT] * each.count for each in requests if each.sequence_id in self.members}

    def take_upkeep_seconds(self) -> float:
        return 0.0

    def reset(self) -> None:
        self._num_calls = 0


class Simulation:
    """An engine of `num_sequences`, whose plain steps take a second of a simulated clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_sequences: int) -> None:
        self.now = 0.0
        self.noise = np.random.default_rng(num_sequences)
        self.lost = 0.0
        self.worst = 0.0
        """The most that one step has lost."""
        self.num_steps = 0
        self.num_drafted = 0
        """Steps with drafts."""
        self._ids = range(num_sequences)
        self._drafts: dict[int, list[int]] = {}
        self._proposers: dict[int, str] = {}
        monkeypatch.setattr("manta.specdecode.proposers.time", SimpleNamespace(perf_counter=lambda: self.now))

    def chain(self, proposers: list[Any], free: Sequence[str] = ()) -> ProposerChain:
        state = SimpleNamespace(
            stop_ids=np.zeros(0, int), params=SimpleNamespace(max_tokens=None), num_prompt_tokens=1, num_tokens=10
        )
        sampling: Any = SimpleNamespace(sequences=dict.fromkeys(self._ids, state))
        drafts = {each.name: StepCost([(1, 0.1)]) for each in proposers if each.name not in free}
        return ProposerChain(proposers, sampling, 4, 10**9, Costs(StepCost([(1, 1.0), (64, 2.0)]), drafts))

    def step(self, chain: ProposerChain, drafter: Drafter, regime: Regime) -> None:
        drafter.seconds = regime.draft_seconds
        drafted = {each: self._drafts.get(each, []) for each in self._ids}
        scheduled = [
            ScheduledSequence(each, 0, 1 + len(drafts), [], drafts, self._proposers.get(each, ""))
            for each, drafts in drafted.items()
        ]
        step = StepInput(self.num_steps, scheduled=scheduled)
        step.sample_points = [SamplePoint(row, 0, 0) for row in range(step.num_tokens)]
        output, seconds, num_drafts = StepOutput(step.step_id), 1.0, sum(map(len, drafted.values()))
        for each, drafts in drafted.items():
            is_sure = self._proposers.get(each) == "ngram"
            wrong = [not is_sure and self.noise.random() >= regime.acceptance for _ in drafts]
            num_accepted = wrong.index(True) if True in wrong else len(drafts)
            output.token_ids[each] = [DRAFT] * num_accepted + [OTHER]
        seconds += regime.verify_seconds * num_drafts
        self.num_steps += 1
        self.num_drafted += num_drafts > 0
        began, self.now = self.now, self.now + seconds
        chain.observe(step, output, seconds)
        chain.propose(step, output)
        chain.begin(StepInput(0))
        self._drafts, self._proposers = output.draft_token_ids, output.draft_proposers
        gained = sum(map(len, output.token_ids.values())) / len(drafted)
        lost = self.now - began - gained
        self.lost, self.worst = self.lost + lost, max(self.worst, lost)


@pytest.mark.parametrize("seed", [1, 3, 5, 10])
def test_drafting_never_loses_more_than_its_share(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Beyond it are the first trial, a trial's budget, and the step that exceeds it. Regimes change at random."""
    noise = np.random.default_rng(seed)
    simulation = Simulation(monkeypatch, num_sequences=seed)
    drafter, first = Drafter(simulation), 0.0
    chain = simulation.chain([drafter])
    choices = (0, 0.3, 0.95, 0.95), (0, 0.1, 0.5, 3), (0, 0.05)
    for _ in range(10):
        drafter.catch_up_calls = int(noise.choice([0, 0, 3, 10**9]))
        regime = Regime(*(float(noise.choice(each)) for each in choices))
        for _ in range(int(noise.integers(10, 800))):
            simulation.step(chain, drafter, regime)
            first = max(simulation.lost, 0.0) if simulation.num_steps <= LEAST_STEPS + 1 else first
            assert simulation.lost <= first + MOST_LOSS + LOSS_SHARE * simulation.now + 2 * simulation.worst


def test_drafts_that_become_good_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for draft_seconds, catch_up_calls in ((0.5, 0), (0.1, 16)):
        simulation = Simulation(monkeypatch, 1)
        drafter = Drafter(simulation)
        drafter.catch_up_calls, chain = catch_up_calls, simulation.chain([drafter])
        for _ in range(1500):
            simulation.step(chain, drafter, Regime(0.0, draft_seconds, 0.02))
        assert simulation.lost < MOST_LOSS + LOSS_SHARE * simulation.now
        before = simulation.num_drafted
        for _ in range(2500):
            simulation.step(chain, drafter, Regime(0.95, 0.1, 0.02))
        begun = simulation.num_drafted - before
        assert begun > 0
        for _ in range(500):
            simulation.step(chain, drafter, Regime(0.95, 0.1, 0.02))
        assert simulation.num_drafted - before - begun > 450


def test_a_proposer_behind_a_good_one_is_tried_for_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequence 0 has drafts that are always accepted and cost nothing."""
    simulation = Simulation(monkeypatch, 4)
    sure, drafter = Drafter(simulation, "ngram", members=[0]), Drafter(simulation)
    chain = simulation.chain([sure, drafter], free=["ngram"])
    for _ in range(100):
        simulation.step(chain, drafter, Regime(0.0, 0.3, 0.02))
    began, spent = simulation.now, drafter.spent
    for _ in range(1500):
        simulation.step(chain, drafter, Regime(0.0, 0.3, 0.02))
    assert 0 < drafter.spent - spent < LOSS_SHARE * (simulation.now - began) + 4 * 0.3
    assert not drafter.wanted
    for _ in range(600):
        simulation.step(chain, drafter, Regime(0.95, 0.05, 0.0))
    spent = drafter.spent
    for _ in range(100):
        simulation.step(chain, drafter, Regime(0.95, 0.05, 0.0))
    assert drafter.spent - spent > 0.05 * 90
    assert drafter.wanted


def test_what_proposers_read_of_prompts_is_charged_to_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that compute prompts are not compared."""
    simulation = Simulation(monkeypatch, 1)
    drafter, charged = Drafter(simulation), list[float]()
    chain = simulation.chain([drafter])
    monkeypatch.setattr(chain.pace, "learn_drafted", lambda *arguments: charged.append(arguments[4]))
    prefill = StepInput(0, scheduled=[ScheduledSequence(0, 0, 9, [])], sample_points=[SamplePoint(8, 0, 9)])
    for drafter.seconds in (2.0, 0.0):
        output = StepOutput(0, token_ids={0: [OTHER]})
        chain.observe(prefill, output, 1.0)
        chain.propose(prefill, output)
    reading = drafter.spent
    for _ in range(60):
        simulation.step(chain, drafter, Regime(0.0, 0.0, 0.0))
    assert max(charged) == pytest.approx(reading / 8)
    assert sum(charged) == pytest.approx(reading, rel=0.01)
