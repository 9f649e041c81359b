"""How many drafts are proposed: what pays by the numbers, and what it comes to in an engine and in its accounts."""

from __future__ import annotations

import numpy as np
import pytest

from manta.cluster.engine.request import EngineRequest
from manta.cluster.engine.stats import DraftCounts
from manta.cluster.http.exchange.metrics import Metrics
from manta.specdecode.acceptance import Acceptance, AcceptanceRecord, num_accepted
from manta.specdecode.lengths import Load, StepCost, choose_lengths
from manta.specdecode.pace import Pace
from manta.specdecode.speculative_config import SpeculativeConfig
from tests.engine.test_engine import drain, make_engine
from tests.engine_parts import speculative_worker_of
from tests.specdecode.test_speculative import ask_oracle, greedy, make_prompts, watch

FLAT = StepCost([(1, 1.0), (8, 1.0), (64, 1.0)])
"""Bound by reading weights."""
STEEP = StepCost([(1, 1.0), (2, 2.0), (64, 64.0)])
"""Bound by arithmetic: a draft costs what a token costs."""


def rate(counts: np.ndarray, acceptance: np.ndarray, cost: StepCost, draft_cost: StepCost | None) -> float:
    """Tokens a second by the definition."""
    gain = sum(p**step for p, count in zip(acceptance, counts, strict=True) for step in range(1, count + 1))
    seconds = float(cost.seconds(len(counts) + counts.sum()))
    if draft_cost is not None:
        seconds += counts.max() * float(draft_cost.seconds(len(counts)))
    return (len(counts) + gain) / seconds


@pytest.mark.parametrize("draft_cost", [None, StepCost([(1, 0.08)])], ids=["free", "drafted"])
@pytest.mark.parametrize("slope", [0.0, 0.02, 0.1, 0.5, 1.0])
def test_chosen_lengths_are_the_best_of_all(slope: float, draft_cost: StepCost | None) -> None:
    cost = StepCost([(1, 1.0), (50, 1.0 + 49 * slope)])
    for acceptance in ([0.9, 0.3], [0.99, 0.0], [0.5, 0.5], [0.7, 0.95], [0.05, 0.1]):
        means, limits = np.array(acceptance), np.array([4, 3])
        chosen = choose_lengths(means, limits, Load(2, 2), cost, draft_cost)
        every = [np.array([a, b]) for a in range(5) for b in range(4)]
        best = max(rate(counts, means, cost, draft_cost) for counts in every)
        assert (chosen <= limits).all()
        got = rate(chosen, means, cost, draft_cost)
        assert got > best / 1.021, "within the margin that estimates are given"
        assert chosen.any() == (best > 1.02 * rate(np.zeros(2, int), means, cost, draft_cost))


def test_full_batches_speculate_less_and_bound_ones_never() -> None:
    cost = StepCost([(1, 1.0), (16, 1.1), (32, 1.6), (64, 3.0), (128, 6.0)])
    drafted = []
    for rows in (1, 8, 16, 32, 64):
        counts = choose_lengths(np.full(rows, 0.7), np.full(rows, 8), Load(rows, rows), cost)
        drafted.append(counts.sum() / rows)
    assert drafted == sorted(drafted, reverse=True)
    assert drafted[0] > 4
    assert drafted[-1] == 0
    assert choose_lengths(np.array([0.8]), np.array([8]), Load(1, 1), STEEP).sum() == 0
    assert choose_lengths(np.array([0.8]), np.array([8]), Load(1, 1), FLAT).sum() == 8
    assert choose_lengths(np.array([0.8]), np.array([8]), Load(1, 1), FLAT, StepCost([(1, 3.0)])).sum() == 0


def test_acceptance_follows_recent_trials() -> None:
    own = Acceptance(0.5)
    assert own.mean == 0.5
    for _ in range(20):
        own.learn(4, 4)
    assert own.mean > 0.9
    for _ in range(40):
        own.learn(0, 4)
    assert own.mean < 0.2
    for _ in range(100):
        own.fade()
    assert own.mean == pytest.approx(0.5, abs=0.1), "what is not tried is forgotten"
    record = AcceptanceRecord(0.5)
    for _ in range(300):
        record.learn(1, [5, 6, 7], [5, 6, 7, 8])
    assert record.means([1, 2])[1] > 0.8
    record.forget([1])
    assert record.means([1])[0] == record.means([2])[0]


@pytest.mark.parametrize(
    ("drafts", "drawn", "count"),
    [([5, 6, 7], [5, 6, 7, 8], 3), ([5, 6, 7], [5, 9], 1), ([5, 6, 7], [5, 6], 2), ([5], [], 0), ([], [5], 0)],
)
def test_only_drafts_before_the_first_mismatch_count(drafts: list[int], drawn: list[int], count: int) -> None:
    assert num_accepted(drafts, drawn) == count


def test_drafts_without_a_draw_say_nothing() -> None:
    for is_alike in (True, False):
        late, whole = AcceptanceRecord(0.5, is_alike), AcceptanceRecord(0.5, is_alike)
        late.learn(1, [5, 6, 7], [5])
        whole.learn(1, [5], [5, 6])
        late.learn(2, [5], [])
        assert late.means([1, 2]).tolist() == whole.means([1, 2]).tolist()
        assert (whole.means([2])[0] > 0.5) == is_alike


def test_costs_are_learned() -> None:
    cost = StepCost([(1, 1.0), (2, 1.2)])
    assert cost.seconds(4) == pytest.approx(1.6)
    for _ in range(200):
        cost.learn(1, 1.5)
    assert cost.seconds(np.array([1, 2])) == pytest.approx([1.5, 1.7], abs=1e-3)
    assert cost.of_table(1) == 1.0


@pytest.mark.parametrize("num_sequences", [1, 8])
def test_a_proposer_that_finds_nothing_soon_rests(num_sequences: int) -> None:
    """Its steps gain one token each for certain, so that their time alone decides."""
    pace, noise, num_asked = Pace(), np.random.default_rng(3), 0
    for _ in range(300):
        if pace.drafts(num_sequences):
            num_asked += 1
            pace.learn_drafted(num_sequences, num_sequences, 1.0, noise.normal(1.1, 0.02))
        else:
            pace.learn_plain(num_sequences, 1.0, noise.normal(1.0, 0.02))
    assert num_asked < 300 * 0.2


def run_pace(pace: Pace, num_sequences: int, speeds: list[float], noise: np.random.Generator) -> tuple[float, float]:
    """Steps by what a pace says, where drafting is so many times as fast as not, one value a step.

    Returns (the speed of all steps in relation to steps without drafts, the share of steps with drafts).
    """
    tokens, seconds, num_drafted = 0, 0.0, 0
    for speed in speeds:
        drafted = pace.drafts(num_sequences)
        gained = int(noise.integers(num_sequences, 3 * num_sequences + 1)) if drafted else num_sequences
        # A step takes 1.3 of what is thought, and the drafts' part is in proportion to what they yield on average
        taken = 1.3 * (2.0 / speed if drafted else 1.0) * float(noise.uniform(0.9, 1.1))
        pause = 20.0 if noise.random() < 0.01 else 0.0  # another process had the machine
        if drafted:
            pace.learn_drafted(num_sequences, gained, 1.0, taken + pause, 0.0, num_sequences)
        else:
            pace.learn_plain(num_sequences, 1.0, taken + pause)
        tokens += gained
        seconds += taken
        num_drafted += drafted
    return tokens / num_sequences / seconds * 1.3, num_drafted / len(speeds)


@pytest.mark.parametrize("num_sequences", [1, 4, 16, 32])
def test_drafting_that_the_clock_finds_slower_rests(num_sequences: int) -> None:
    noise = np.random.default_rng(num_sequences)
    for speed in (0.5, 0.7, 0.85, 0.9):
        relative, share = run_pace(Pace(), num_sequences, [speed] * 6000, noise)
        assert share < 0.25
        assert relative > 0.96
    for speed in (1.2, 1.5, 2.0, 4.0):
        relative, share = run_pace(Pace(), num_sequences, [speed] * 6000, noise)
        assert share > 0.85
        assert relative > 0.95 * speed


def test_drafting_is_retried_when_it_got_faster() -> None:
    noise = np.random.default_rng(7)
    pace = Pace()
    _, share = run_pace(pace, 16, [0.6] * 2000, noise)
    assert share < 0.1
    run_pace(pace, 16, [2.0] * 1500, noise)
    _, share = run_pace(pace, 16, [2.0] * 1000, noise)
    assert share > 0.95
    _, share = run_pace(pace, 16, [0.6] * 1000, noise)
    assert share < 0.2


def test_an_adaptive_engine_keeps_only_good_drafts() -> None:
    prompts = make_prompts()[:3]
    plain = make_engine("llama")
    texts, shares = [], []
    for index, prompt in enumerate(prompts):
        plain.add_request(EngineRequest(request_id=str(index), prompt_token_ids=prompt, params=greedy(max_tokens=90)))
        texts.append([*prompt, *(token for delta in drain(plain) for token in delta.token_ids)])
    for every in (1000, 1):
        engine = make_engine("llama", speculative=SpeculativeConfig(proposers=("ngram",)))
        chain = speculative_worker_of(engine).chain
        chain.costs = chain.costs._replace(step=StepCost([(1, 1.0), (128, 5.0)]))
        chain.observe = lambda *_: None  # this machine's own times do not matter here
        ask_oracle(engine, texts, every)
        counts = watch(engine)
        for index, prompt in enumerate(prompts):
            engine.add_request(
                EngineRequest(request_id=str(index), prompt_token_ids=prompt, params=greedy(max_tokens=90))
            )
        deltas = drain(engine)
        for index, text in enumerate(texts):
            tokens = [token for delta in deltas if delta.request_id == str(index) for token in delta.token_ids]
            assert prompts[index] + tokens == text
        shares.append(counts["drafted"] / 270)
        drafts = engine.stats().drafts
        assert sum(drafts.drafted["ngram"]) == counts["drafted"]
        assert sum(drafts.accepted["ngram"]) == counts["accepted"]
        usages = [delta.usage for delta in deltas if delta.finish]
        assert sum(usage.num_accepted_drafts for usage in usages) == counts["accepted"]
        assert sum(usage.num_rejected_drafts for usage in usages) == counts["drafted"] - counts["accepted"]
    assert shares[0] > 0.5
    assert shares[1] < 0.2


def test_drafts_are_counted_by_proposer_and_position() -> None:
    counts = DraftCounts()
    counts.add("ngram", 3, 1)
    counts.add("ngram", 2, 2)
    counts.add("draft", 1, 0)
    assert counts.drafted == {"ngram": [2, 2, 1], "draft": [1]}
    assert counts.accepted == {"ngram": [2, 1, 0], "draft": [0]}
    stats = make_engine("llama").stats()
    stats.drafts = counts
    metrics = Metrics("m")
    for _ in range(2):
        text = metrics.render([stats]).decode()
    for line in (
        'manta:spec_decode_num_draft_tokens_total{model_name="m",position="1",proposer="ngram"} 2.0',
        'manta:spec_decode_num_accepted_tokens_total{model_name="m",position="1",proposer="ngram"} 1.0',
        'manta:spec_decode_num_accepted_tokens_total{model_name="m",position="0",proposer="draft"} 0.0',
    ):
        assert line in text
