"""Drafts from earlier answers to the same client: what is found is what a search finds, and nobody else's is told."""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgspec
import numpy as np
import pytest

from manta.cluster.engine.engine import Engine
from manta.cluster.engine.request import EngineRequest
from manta.specdecode.history import LONGEST, MOST_HISTORIES, PIECE, RUN, AnswerHistory
from manta.specdecode.speculative_config import SpeculativeConfig
from manta.workers.sampling_params import SamplingParams
from tests.checkpoints import checkpoint, reference_greedy
from tests.engine.test_engine import HISTORIES, drain, run
from tests.specdecode.test_speculative import greedy, make_prompts, make_speculative, watch

HISTORY = SpeculativeConfig(proposers=("history",), adaptive=False)
PROMPT = [9, 8, 7, 6, 5]
NUM_TOKENS = 24


def array(token_ids: list[int]) -> np.ndarray:
    return np.array(token_ids, dtype=np.int32)


def test_what_followed_the_longest_match_is_proposed() -> None:
    index = AnswerHistory(64)
    assert index.propose(array([1, 2, 3, 4]), 3) == []
    index.add(array([9, 1, 2, 3, 4, 5, 6, 7]))
    index.add(array([8, 1, 2, 3, 4, 50]))
    assert index.propose(array([1, 2, 3, 4]), 3) == [50], "the latest, up to its end"
    assert index.propose(array([9, 1, 2, 3, 4]), 2) == [5, 6], "the longest match"
    assert index.propose(array([2, 3, 4]), 2) == []
    assert index.propose(array([4, 3, 2, 1]), 2) == []
    assert index.propose(array([6, 7, 8, 1]), 2) == [], "no match goes over the border of two answers"


def num_equal(one: list[int], other: list[int]) -> int:
    """Returns how many of their last tokens are equal."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@pytest.mark.parametrize("capacity", [64, 256, pytest.param(1024, marks=pytest.mark.prove)])
def test_the_index_equals_a_search(capacity: int) -> None:
    """Answers of five letters, of which the oldest are overwritten. A text ends like a place in what is left, and the
    proposal is what followed there, or at another place with the longest match.
    """
    chooser = random.Random(capacity)
    index, kept = AnswerHistory(capacity), list[int]()
    for _ in range(100):
        answer = [chooser.randrange(5) for _ in range(chooser.randrange(2 * RUN, capacity // 2))]
        index.add(array(answer))
        kept = [*kept, -1, *answer][-(capacity - 1) :]
        end = chooser.choice([p for p in range(RUN + 1, len(kept)) if -1 not in kept[p - RUN : p + 1]])
        text = [chooser.randrange(5) for _ in range(3)] + kept[end - RUN : end]

        lengths = {p: num_equal(kept[:p], text) for p in range(RUN, len(kept)) if kept[p] != -1}
        places = [place for place, length in lengths.items() if length == max(lengths.values())]
        proposed = index.propose(array(text), 3)
        assert proposed in [[*kept[p : p + 3], -1][: [*kept[p : p + 3], -1].index(-1)] for p in places]


def ask(engine: Engine, prompt: list[int], num_tokens: int = NUM_TOKENS, **fields: Any) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    engine.add_request(EngineRequest(request_id="0", prompt_token_ids=prompt, params=params, **fields))
    return [token for delta in drain(engine) for token in delta.token_ids]


def test_a_question_that_comes_again_is_answered_by_drafts() -> None:
    engine = make_speculative("llama", HISTORY)
    counts = watch(engine)
    expected = reference_greedy(checkpoint("llama"), PROMPT, NUM_TOKENS)
    assert ask(engine, PROMPT) == expected
    assert counts["accepted"] < NUM_TOKENS // 2
    before = dict(counts)
    assert ask(engine, PROMPT) == expected
    assert counts["accepted"] - before["accepted"] > NUM_TOKENS * 0.7
    assert counts["drafted"] - before["drafted"] < NUM_TOKENS * 1.2


@pytest.mark.parametrize("other", [{"client": "b", "cache_root": b"b" * 16}, {"client": "a", "cache_root": b"s" * 16}])
def test_nobody_elses_answer_is_proposed(other: dict[str, Any]) -> None:
    """Nor that of a request of the same client with another salt: how fast an answer comes would reveal it."""
    engine = make_speculative("llama", HISTORY)
    counts = watch(engine)
    expected = ask(engine, PROMPT, client="a", cache_root=b"a" * 16)
    first = counts["drafted"]
    assert ask(engine, PROMPT, **other) == expected
    assert counts["drafted"] == 2 * first, "as if it was the first"
    assert ask(engine, PROMPT, client="a", cache_root=b"a" * 16) == expected
    assert counts["accepted"] > NUM_TOKENS * 0.7


@pytest.mark.parametrize("shares_answers", [False, True])
def test_the_operator_may_let_clients_share_answers(shares_answers: bool) -> None:
    engine = make_speculative("llama", HISTORY)
    counts = watch(engine)
    fields = {"cache_root": b"a" * 16, "shares_answers": shares_answers}
    expected = ask(engine, PROMPT, client="a", **fields)
    before = counts["accepted"]
    assert ask(engine, PROMPT, client="b", **fields) == expected
    assert (counts["accepted"] - before > NUM_TOKENS * 0.7) == shares_answers


def test_answers_that_still_run_are_proposed() -> None:
    """Up to their last `PIECE` tokens; no shorter answer has ended meanwhile."""
    engine = make_speculative("llama", HISTORY)
    length = 2 * PIECE + NUM_TOKENS
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    engine.add_request(EngineRequest(request_id="first", prompt_token_ids=PROMPT, params=params))
    found: dict[str, list[int]] = {"first": [], "second": []}
    while len(found["first"]) < PIECE + NUM_TOKENS:
        for delta in engine.step():
            found["first"] += delta.token_ids
    counts = watch(engine)
    short = msgspec.structs.replace(params, max_tokens=NUM_TOKENS)
    engine.add_request(EngineRequest(request_id="second", prompt_token_ids=PROMPT, params=short))
    accepted = 0
    while len(found["second"]) < NUM_TOKENS:
        for delta in engine.step():
            found[delta.request_id] += delta.token_ids
            if delta.request_id == "second" and delta.usage is not None:
                accepted = delta.usage.num_accepted_drafts
    assert len(found["first"]) < length, "it has not ended"
    assert accepted > NUM_TOKENS * 0.6
    assert counts["accepted"] >= accepted
    for delta in drain(engine):
        found[delta.request_id] += delta.token_ids
    assert found["first"] == reference_greedy(checkpoint("llama"), PROMPT, length)
    assert found["second"] == found["first"][:NUM_TOKENS]


def test_a_client_of_many_salts_displaces_its_own() -> None:
    engine = make_speculative("llama", HISTORY)
    counts = watch(engine)
    ask(engine, PROMPT, client="a", cache_root=b"a" * 16)
    for salt in range(MOST_HISTORIES + 2):
        ask(engine, PROMPT, RUN + 1, client="b", cache_root=bytes([salt]) * 16)
    before = dict(counts)
    ask(engine, PROMPT, client="a", cache_root=b"a" * 16)
    assert counts["accepted"] - before["accepted"] > NUM_TOKENS * 0.7


@pytest.mark.parametrize("name", HISTORIES)
def test_answers_stay_those_of_transformers(name: str) -> None:
    """Chunked, preempted, and beside others, before and after their texts are known."""
    prompts = make_prompts()
    expected = [reference_greedy(checkpoint("llama"), prompt, 40) for prompt in prompts]
    engine = make_speculative("llama", HISTORY, **HISTORIES[name])
    counts = watch(engine)
    for _ in range(2):
        assert run(engine, prompts, greedy()) == expected
    assert counts["accepted"] > 20 * len(prompts)


@pytest.mark.parametrize(("history_tokens", "is_known"), [(1024, False), (1 << 12, True)])
def test_the_configured_number_of_tokens_is_remembered(history_tokens: int, is_known: bool) -> None:
    engine = make_speculative("llama", msgspec.structs.replace(HISTORY, history_tokens=history_tokens))
    counts = watch(engine)
    ask(engine, PROMPT)
    for number in range(50):  # with the ends of their prompts more than 1,024 tokens
        ask(engine, [20 + number, *PROMPT[1:]], NUM_TOKENS)
    before = counts["accepted"]
    ask(engine, PROMPT)
    assert (counts["accepted"] - before > NUM_TOKENS * 0.7) == is_known


def test_choices_of_one_request_have_its_history() -> None:
    engine = make_speculative("llama", HISTORY)
    params = SamplingParams(temperature=0, n=3, max_tokens=NUM_TOKENS, ignore_eos=True)
    for _ in range(2):
        counts = watch(engine)
        engine.add_request(EngineRequest(request_id="0", prompt_token_ids=PROMPT, params=params))
        answers: dict[int, list[int]] = {}
        for delta in drain(engine):
            answers.setdefault(delta.index, []).extend(delta.token_ids)
        assert list(answers.values()) == [reference_greedy(checkpoint("llama"), PROMPT, NUM_TOKENS)] * 3
    assert counts["accepted"] > 3 * NUM_TOKENS * 0.6


def test_a_long_answer_is_kept_by_its_end() -> None:
    index = AnswerHistory(64)
    index.add(array(list(range(1000))))
    assert index.propose(array([990, 991, 992, 993]), 4) == [994, 995, 996, 997]
    assert index.propose(array([100, 101, 102, 103]), 4) == []
    assert LONGEST < 64
