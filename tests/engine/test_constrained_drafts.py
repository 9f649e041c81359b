"""Drafts under a constraint: no token changes, no text breaks, and if the grammar forces much it takes fewer steps.

Random float32 models, which take every way that a mask leaves open; the same engine without drafts is what they are
compared with. Rows behind drafts on their own: `tests/structured/test_grammar_pool_drafts.py`.
"""

from __future__ import annotations

import collections
import json
import os
import random
import re
import time
from collections.abc import Callable

import jsonschema
import numpy as np
import pytest
from scipy import stats

from manta.cluster.engine.request import FinishStatus
from manta.cluster.engine.sequence import Sequence
from manta.cluster.llm import LLM, CompletionOutput, SamplingParams
from manta.specdecode.lengths import StepCost
from tests.checkpoints import VOCAB_SIZE
from tests.engine.test_constrained_engine import ORDER, constrained, example, make_llm, settled, spec
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.usefixtures("plugin")

EOS = 2
BACKENDS = ("llguidance", "xgrammar")
NUM_DRAWS = 5000 if os.environ.get("MANTA_PROVE") == "1" else 500
ALPHA = 1e-3
"""Seeds are fixed, so nothing is flaky."""

LONG_KEYS = {
    "type": "object",
    "properties": {
        "customer_identification_number": {"enum": ["A", "B", "C"]},
        "is_an_active_subscription": {"type": "boolean"},
        "preferred_language_of_the_customer": {"enum": ["English", "German", "Greek"]},
    },
    "required": [
        "customer_identification_number",
        "is_an_active_subscription",
        "preferred_language_of_the_customer",
    ],
    "additionalProperties": False,
}
"""Mostly fixed text; both backends are proven to enforce it."""

CONSTRAINTS = [
    spec("json_schema", ORDER, any_whitespace=False),
    *(spec("json_schema", LONG_KEYS, any_whitespace=False, backend=name) for name in BACKENDS),
    *(spec("regex", r"total: [0-9]{2,4} euro( and [a-f]{1,9})?\.", backend=name) for name in BACKENDS),
    *(spec("choice", ["yes", "yes, but no", "nö"], backend=name) for name in BACKENDS),
    spec("ebnf", 'root ::= "item " [0-9] ", " root | "end"', backend="xgrammar"),
    spec("json_schema", LONG_KEYS, any_whitespace=True),
    spec("choice", ["a long answer", "a longer answer"], begin_after=(50,)),
]


@pytest.fixture(scope="module")
def plain() -> LLM:
    return make_llm()


@pytest.fixture(scope="module")
def drafting() -> LLM:
    return make_llm(speculative={"proposers": ["forced"], "adaptive": False})


def mixed_params(**fields: object) -> list[SamplingParams]:
    """Every constraint with two seeds, at temperature 1, and rows without one between them."""
    params = []
    for seed in range(2):
        for index, one in enumerate(CONSTRAINTS):
            bias = {50: 5.0} if one.begin_after else {}
            options = {"temperature": 1.0, "seed": 100 * seed + index, "max_tokens": 160, "logit_bias": bias, **fields}
            params.append(constrained(one, **options))
        params.append(SamplingParams(temperature=1.0, seed=1000 + seed, max_tokens=60, ignore_eos=True))
    return params


def answers(llm: LLM, params: list[SamplingParams]) -> list[CompletionOutput]:
    prompts = [[7 + index % 3] * (1 + index) for index in range(len(params))]
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


def assert_same(found: list[CompletionOutput], expected: list[CompletionOutput]) -> None:
    assert [choice.token_ids for choice in found] == [choice.token_ids for choice in expected]
    assert [choice.finish_reason for choice in found] == [choice.finish_reason for choice in expected]
    assert [choice.text for choice in found] == [choice.text for choice in expected]


def nothing_left(llm: LLM) -> None:
    """No block, no session, no slot."""
    settled(llm)
    pool = llm.engine.masks.pool
    assert pool is not None
    deadline = time.monotonic() + PATIENCE_S
    while pool.num_slots_in_use:
        assert time.monotonic() < deadline, f"{pool.num_slots_in_use} slots leaked"
        time.sleep(0.01)


def propose(llm: LLM, proposals: Callable[[Sequence], list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives every running sequence drafts, in the place of those that it has."""
    schedule = llm.engine.scheduler.schedule

    def with_drafts():
        for sequence in llm.engine.scheduler.running:
            if not sequence.waits_for_mask and not sequence.unforked:
                sequence.draft_token_ids = proposals(sequence)
                sequence.draft_proposer = "ngram"
        return schedule()

    monkeypatch.setattr(llm.engine.scheduler, "schedule", with_drafts)


def num_drafts(llm: LLM, proposer: str) -> tuple[int, int]:
    """Drafted and accepted."""
    counts = llm.engine.stats().drafts
    return sum(counts.drafted.get(proposer, [])), sum(counts.accepted.get(proposer, []))


def test_forced_drafts_change_no_token(plain: LLM, drafting: LLM) -> None:
    for fields in ({}, {"temperature": 0.0}, {"top_p": 0.8, "frequency_penalty": 0.7, "logprobs": 2}):
        params = mixed_params(**fields)
        expected, found = answers(plain, params), answers(drafting, params)
        assert_same(found, expected)
        for one, other in zip(found, expected, strict=True):
            if one.logprobs is not None:
                assert other.logprobs is not None
                assert [entry.token_id for entry in one.logprobs] == [entry.token_id for entry in other.logprobs]
    drafted, accepted = num_drafts(drafting, "forced")
    assert 0 < accepted <= drafted
    nothing_left(drafting)


def test_texts_are_valid_and_whole(drafting: LLM) -> None:
    judges = {
        "json_schema": lambda text, schema: jsonschema.validate(json.loads(text), json.loads(schema)),
        "choice": lambda text, choices: text in json.loads(choices) or pytest.fail(text),
        "regex": lambda text, regex: re.fullmatch(regex, text) or pytest.fail(text),
        "ebnf": lambda text, _: re.fullmatch(r"(item \d, )*end", text) or pytest.fail(text),
    }
    num_whole = 0
    params = [one for one in mixed_params(max_tokens=400) if one.constraint and not one.constraint.begin_after]
    for one, choice in zip(params, answers(drafting, params), strict=True):
        if choice.finish_reason is FinishStatus.FINISHED_STOPPED:
            num_whole += 1
            assert one.constraint is not None
            judges[one.constraint.kind](choice.text, one.constraint.text)
    assert num_whole > len(params) // 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_fixed_text_takes_fewer_steps(plain: LLM, drafting: LLM, backend: str) -> None:
    """xgrammar lets a random model spell a forced text as it likes; a bias keeps it to the tokenizer's own way."""
    one = spec("json_schema", LONG_KEYS, any_whitespace=False, backend=backend)
    num_steps = {}
    texts = []
    bias = {i: min(100.0, 30.0 * len(drafting.tokenizer.decode([i]))) for i in range(259, VOCAB_SIZE)}
    params = constrained(one, temperature=1.0, seed=3, logit_bias=bias if backend == "xgrammar" else {})
    for llm in (plain, drafting):
        before = llm.engine.stats().num_steps
        choice = llm.generate([[7]], params, use_tqdm=False)[0].outputs[0]
        num_steps[llm] = llm.engine.stats().num_steps - before
        texts.append(choice.token_ids)
        jsonschema.validate(json.loads(choice.text), LONG_KEYS)
    assert texts[0] == texts[1]
    assert num_steps[plain] >= len(texts[0])
    assert 2 * num_steps[drafting] < num_steps[plain], f"{len(texts[0])} tokens: {num_steps.values()}"


@pytest.mark.parametrize(
    ("cost", "most"),
    [
        ([(1, 0.55), (101, 15.55)], 0.8),  # with four rows a token more costs 0.6 of what one costs on average
        ([(1, 1.0), (101, 101.0)], 0.2),  # as much as every other token: nothing is to be gained but by probing
    ],
)
def test_differently_spelled_forced_tokens_are_proposed_less(
    plain: LLM, drafting: LLM, cost: list[tuple[int, float]], most: float
) -> None:
    one = spec("json_schema", LONG_KEYS, any_whitespace=False, backend="xgrammar")
    params = [constrained(one, temperature=1.0, seed=seed) for seed in range(4)]
    adaptive = make_llm(speculative={"proposers": ["forced"]})
    forced = adaptive.engine.masks.forced
    assert forced is not None
    assert forced.step_cost is not None, "measured at the start"
    forced.step_cost = StepCost(cost)
    expected = answers(plain, params)
    drafted = []
    for llm in (drafting, adaptive):
        before = num_drafts(llm, "forced")[0]
        assert_same(answers(llm, params), expected)
        drafted.append(num_drafts(llm, "forced")[0] - before)
    assert 0 < drafted[1] < most * drafted[0]
    nothing_left(adaptive)


@pytest.mark.few(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_free_parts_between_forced_ones_keep_their_distribution(plain: LLM, drafting: LLM, backend: str) -> None:
    """χ² of two samples of other seeds, whole texts as categories."""
    regex = "answer: [abc] and then [0-2]!"
    tables = []
    before = num_drafts(drafting, "forced")
    for first_seed, llm in ((0, plain), (10**6, drafting)):
        one = spec("regex", regex, backend=backend)
        params = [constrained(one, temperature=1.0, seed=first_seed + index) for index in range(NUM_DRAWS)]
        outputs = llm.generate([[7, 8]] * NUM_DRAWS, params, use_tqdm=False)
        tables.append(collections.Counter(output.outputs[0].text for output in outputs))
    categories = sorted(set(tables[0]) | set(tables[1]))
    assert all(re.fullmatch(regex, text) for text in categories)
    counts = np.array([[table[text] for text in categories] for table in tables])
    often = counts.sum(axis=0) >= 10
    counts = np.column_stack([counts[:, often], counts[:, ~often].sum(axis=1)])
    counts = counts[:, counts.sum(axis=0) > 0]
    assert counts.shape[1] >= 4
    assert stats.chi2_contingency(counts).pvalue > ALPHA
    assert num_drafts(drafting, "forced")[1] > before[1]


def test_hostile_drafts_change_no_token(plain: LLM, drafting: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right ones, wrong ones, ends, special tokens and padding, at any place."""
    params = mixed_params()
    expected = answers(plain, params)
    by_seed = {one.seed: choice.token_ids for one, choice in zip(params, expected, strict=True)}
    chooser = random.Random(5)

    def hostile(sequence: Sequence) -> list[int]:
        known = by_seed[sequence.seed][sequence.num_output_tokens :]
        drafts = [*known, *(chooser.randrange(VOCAB_SIZE) for _ in range(8))][: chooser.randrange(9)]
        for index in range(len(drafts)):
            if chooser.random() < 0.15:
                drafts[index] = chooser.choice([EOS, 0, 1, 50, VOCAB_SIZE - 1, chooser.randrange(VOCAB_SIZE)])
        return drafts

    propose(drafting, hostile, monkeypatch)
    before = num_drafts(drafting, "ngram")
    assert_same(answers(drafting, params), expected)
    drafted, accepted = (count - old for count, old in zip(num_drafts(drafting, "ngram"), before, strict=True))
    assert drafted > accepted > len(params)
    monkeypatch.undo()
    nothing_left(drafting)


def test_the_end_inside_a_draft_ends_the_sequence(plain: LLM, drafting: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the grammar's end, an end token, a stop token, a stop string and max_tokens; drafts go on after each."""
    seven_ones = spec("regex", "1{7}")
    some = spec("regex", "[0-9]{3,30}")
    params = [
        constrained(seven_ones, temperature=1.0, seed=1),
        constrained(spec("regex", "1{7}", backend="xgrammar"), temperature=1.0, seed=2),
        constrained(some, temperature=1.0, seed=3, logit_bias={EOS: 9.0}),
        constrained(some, temperature=1.0, seed=4, logit_bias={40: 9.0}, stop_token_ids=(40,)),
        constrained(spec("regex", "[ab]{90}"), temperature=1.0, seed=5, stop=("ab",)),
        constrained(some, temperature=1.0, seed=6, max_tokens=4),
        constrained(example(length=6, allowed=[33]), temperature=1.0, seed=7),
    ]
    expected = answers(plain, params)
    by_seed = {one.seed: choice.token_ids for one, choice in zip(params, expected, strict=True)}
    beyond = [token_id for text in ("1", "a") for token_id in plain.tokenizer.encode(text)] * 8

    def knowing(sequence: Sequence) -> list[int]:
        return [*by_seed[sequence.seed], *beyond][sequence.num_output_tokens :][:8]

    before = drafting.engine.stats()
    propose(drafting, knowing, monkeypatch)
    assert_same(answers(drafting, params), expected)
    after = drafting.engine.stats()
    num_late = after.num_late_rows - before.num_late_rows  # each may cost a step, on a busy machine
    assert after.num_steps - before.num_steps - num_late < max(len(choice.token_ids) for choice in expected)
    monkeypatch.undo()
    nothing_left(drafting)


def test_preempted_forked_and_cut_sequences_with_drafts(plain: LLM) -> None:
    tight = make_llm(num_blocks=20, speculative={"proposers": ["forced", "ngram"]}, max_num_batched_tokens=24)
    params = [
        constrained(one, temperature=1.0, seed=index, max_tokens=90, n=1 + index % 3)
        for index, one in enumerate(CONSTRAINTS[:6])
    ]
    prompts = [[5 + index] * (3 + 9 * index) for index in range(len(params))]
    expected = plain.generate(prompts, params, use_tqdm=False)
    found = tight.generate(prompts, params, use_tqdm=False)
    assert tight.engine.stats().num_preemptions > 0
    for one, other in zip(found, expected, strict=True):
        assert_same(one.outputs, other.outputs)
    nothing_left(tight)


@pytest.mark.parametrize("how", ["raise", "hang"])
def test_a_backend_failure_on_drafts_is_isolated(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(speculative={"proposers": ["forced"]}, grammar_pool={"mask_seconds": 1.5})
    good = [constrained(spec("regex", "[a-f]{20}ghijklmnop[a-f]{9}"), temperature=1.0, seed=seed) for seed in range(4)]
    good += [SamplingParams(temperature=1.0, seed=10 + seed, max_tokens=30, ignore_eos=True) for seed in range(3)]
    expected = answers(llm, good)
    bad = constrained(example(length=20, at={"6": how}), seed=50, max_tokens=30)
    propose(llm, lambda sequence: [33, 34, 35, 36] if sequence.seed == 50 else [], monkeypatch)
    *found, victim = answers(llm, [*good, bad])
    assert_same(found, expected)
    assert victim.finish_reason is FinishStatus.FINISHED_INTERNAL_ERROR
    assert "the constraint failed" in (victim.error or "")
    if how == "raise":  # no draft was to blame: it fails where it would without them
        assert len(victim.token_ids) == 6
        monkeypatch.undo()
        nothing_left(llm)
    else:
        assert len(victim.token_ids) <= 6
        settled(llm)


@pytest.mark.parametrize("allowed", [range(20, 60), range(30, 34)], ids=["many choices", "few choices"])
def test_a_raising_draft_token_harms_nobody_unless_drawn(
    plain: LLM, drafting: LLM, monkeypatch: pytest.MonkeyPatch, allowed: range
) -> None:
    """Proposed, or, if there are few choices, tried for what it forces."""
    constraint = example(length=15, allowed=list(allowed), on={"33": "raise"})
    params = [constrained(constraint, seed=1, logit_bias={33: -100.0})]
    expected = answers(plain, params)
    assert expected[0].finish_reason is FinishStatus.FINISHED_STOPPED
    known = expected[0].token_ids
    assert_same(answers(drafting, params), expected)
    propose(drafting, lambda sequence: [*known[sequence.num_output_tokens :][:2], 33, 34], monkeypatch)
    assert_same(answers(drafting, params), expected)
    monkeypatch.undo()
    nothing_left(drafting)
