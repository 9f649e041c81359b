"""Drafts from a request's prediction: they follow the output, find it again after a change, and never alter it."""

from __future__ import annotations

import tracemalloc
import types

import numpy as np
import pytest

from manta.specdecode.prediction import Follower, PredictedText, PredictionProposer
from manta.specdecode.proposers import DraftRequest
from manta.specdecode.speculative_config import SpeculativeConfig
from manta.workers.sampling_params import SamplingParams
from tests.engine.test_engine import make_engine, run
from tests.engine_parts import device_of
from tests.specdecode.test_speculative import greedy, make_prompts

PREDICTION = SpeculativeConfig(proposers=("prediction",), adaptive=False)


def follower(text: str, size: int = 2) -> Follower:
    return Follower(PredictedText(tuple(map(ord, text)), size))


def proposed(follower: Follower, output: str, count: int = 4) -> str:
    return "".join(map(chr, follower.propose([*map(ord, output)], count)))


def test_drafts_end_with_the_prediction() -> None:
    following = follower("abcdef")
    assert proposed(following, "a") == "bcde"
    assert proposed(following, "abcd") == "ef"
    assert proposed(following, "abcdef") == ""


def test_a_lost_place_is_found_behind_the_change() -> None:
    following = follower("the cat sat; the dog sat; the end")
    assert proposed(following, "the c") == "at s"
    assert proposed(following, "the cow") == ""
    assert proposed(following, "the cow s") == "at; "  # the first " s" behind the change, of two
    assert proposed(following, "the cow sat; the d") == "og s"
    assert (
        proposed(following, "the cow sat; the dog sat; the end. A hat") == "; th"
    )  # only before it: the last of three


def test_a_step_copies_only_the_new_tokens() -> None:
    output = np.arange(100_000, dtype=np.int32)
    params = SamplingParams(prediction_token_ids=tuple(range(100_100)))
    state = types.SimpleNamespace(params=params, tokens=output, num_prompt_tokens=0, num_tokens=len(output) - 1)
    proposer = PredictionProposer(2)
    proposer.propose([DraftRequest(1, state, 3)])
    state.num_tokens += 1
    tracemalloc.start()
    try:
        drafts = proposer.propose([DraftRequest(1, state, 3)])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert drafts == {1: [100_000, 100_001, 100_002]}
    assert peak_bytes < 100_000


def num_steps(engine) -> list[int]:
    """Counts the engine's steps in the returned list's only entry."""
    executor, count = device_of(engine), [0]
    execute = executor.execute

    def counted(step):
        count[0] += 1
        execute(step)

    executor.execute = counted
    return count


@pytest.mark.parametrize("n", [1, 3])
def test_only_right_predictions_save_steps(n: int) -> None:
    prompt = make_prompts()[2]
    fields = {"temperature": 1, "seed": 4, "n": n} if n > 1 else {"temperature": 0}
    plain_engine = make_engine("llama")
    plain_steps = num_steps(plain_engine)
    plain = run(plain_engine, [prompt], greedy(**fields))
    engine = make_engine("llama", speculative=PREDICTION)
    for changes, at_most in (([], 0.4), ([20], 0.5), (range(40), 1)):
        steps = num_steps(engine)
        tokens = [*plain[0]]
        for place in changes:
            tokens[place] = (tokens[place] + 1) % 50 + 5
        found = run(engine, [prompt], greedy(**fields, prediction_token_ids=tuple(tokens)))
        assert found == plain
        assert n > 1 or steps[0] <= at_most * plain_steps[0] + 1


def test_token_ids_of_a_prediction_are_checked() -> None:
    with pytest.raises(ValueError, match="prediction_token_ids: token id -1"):
        SamplingParams(prediction_token_ids=(-1,))
    with pytest.raises(ValueError, match=r"prediction_token_ids: token id 99 is outside the vocabulary \[0, 99\)"):
        SamplingParams(prediction_token_ids=(5, 99)).validate_vocabulary(99)
