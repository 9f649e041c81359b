"""n > 1: one prefill, forks that share its blocks, and choices that are the draws of requests of their own."""

from __future__ import annotations

import collections
import itertools
import os
import tracemalloc

import pytest
from scipy import stats

from manta.cluster.engine.request import EngineRequest, FinishStatus
from manta.cluster.engine.sequence import Sequence
from manta.structured.constraint import ConstraintSpec
from manta.workers.sampling_params import SamplingParams, child_seed
from tests.engine.test_engine import drain, make_engine

FAMILY = "llama"
NUM_DRAWS = 40_000 if os.environ.get("MANTA_PROVE") == "1" else 4_000
PROMPTS = ([7] * 16, [5, 9, 11], list(range(6, 55)))
"""One that fills its block, a short one, one of three blocks and a bit."""


def choices(engine, prompt: list[int], params: SamplingParams, name: str = "request") -> list[list[int]]:
    engine.add_request(EngineRequest(request_id=name, prompt_token_ids=prompt, params=params))
    outputs: list[list[int]] = [[] for _ in range(params.n)]
    ended = collections.Counter()
    for delta in drain(engine):
        assert delta.error is None
        outputs[delta.index] += delta.token_ids
        ended[delta.index] += delta.finish is not None
    assert ended == dict.fromkeys(range(params.n), 1)
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    return outputs


def sampled(seed: int | None, n: int, **fields) -> SamplingParams:
    return SamplingParams(**{"n": n, "seed": seed, "max_tokens": 24, "ignore_eos": True, **fields})


@pytest.mark.parametrize("prompt", PROMPTS, ids=["full", "short", "long"])
@pytest.mark.parametrize(
    "options",
    [{}, {"enable_prefix_caching": False}, {"max_num_batched_tokens": 6}, {"num_blocks": 9}],
    ids=["plain", "no-cache", "chunked", "preempted"],
)
def test_choices_equal_single_requests_with_the_derived_seeds(prompt: list[int], options: dict) -> None:
    engine = make_engine(FAMILY, **options)
    together = choices(engine, prompt, sampled(7, 4))
    num_preemptions = engine.stats().num_preemptions
    assert bool(num_preemptions) == (options.get("num_blocks") == 9 and len(prompt) > 16)
    alone = [choices(engine, prompt, sampled(child_seed(7, index), 1))[0] for index in range(4)]
    assert together == alone


@pytest.mark.parametrize(
    "fields",
    [{"top_p": 0.9, "top_k": 40}, {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_p": 0.01}],
    ids=["top", "penalties"],
)
def test_choices_carry_every_parameter(fields: dict) -> None:
    engine = make_engine(FAMILY)
    together = choices(engine, PROMPTS[2], sampled(3, 3, **fields))
    assert together == [
        choices(engine, PROMPTS[2], sampled(child_seed(3, index), 1, **fields))[0] for index in range(3)
    ]


def test_the_prompt_is_computed_once() -> None:
    engine = make_engine(FAMILY, enable_prefix_caching=False)
    engine.add_request(EngineRequest(request_id="a", prompt_token_ids=PROMPTS[2], params=sampled(1, 8)))
    step = engine.scheduler.schedule()
    assert [item.num_tokens for item in step.scheduled] == [len(PROMPTS[2])]
    assert len(step.forked) == 7
    assert {point.row for point in step.sample_points} == {len(PROMPTS[2]) - 1}


def test_choices_share_full_prompt_blocks() -> None:
    engine = make_engine(FAMILY)
    engine.add_request(EngineRequest(request_id="a", prompt_token_ids=PROMPTS[2], params=sampled(1, 6)))
    engine.step()
    engine.step()
    tables = [sequence.block_tables[0] for sequence in engine.scheduler.running]
    assert len({tuple(table[:3]) for table in tables}) == 1
    assert len({table[3] for table in tables}) == 6, "a choice writes into the last block of another"
    assert [engine.scheduler.blocks._references[block] for block in tables[0][:3]] == [6, 6, 6]
    assert engine.stats().num_free_blocks == engine.stats().num_blocks - 3 - 6
    engine.check_integrity()
    engine.abort("a")
    engine.check_integrity()
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_neighbouring_seeds_share_no_child_seed() -> None:
    seeds = [child_seed(seed, index) for seed in (7, 8, -1) for index in range(200)]
    assert len(set(seeds)) == len(seeds)
    engine = make_engine(FAMILY)
    of_7, of_8 = (choices(engine, PROMPTS[1], sampled(seed, 8)) for seed in (7, 8))
    assert len({tuple(output) for output in [*of_7, *of_8]}) == 16
    unseeded = [choices(engine, PROMPTS[1], sampled(None, 8)) for _ in range(2)]
    assert len({tuple(output) for outputs in unseeded for output in outputs}) == 16


def test_choices_are_independent_draws() -> None:
    """χ² of pairs of first tokens: over many requests each pair of choices is as often as the product says."""
    allowed = (5, 6, 7)
    params = SamplingParams(n=4, max_tokens=1, allowed_token_ids=allowed, temperature=2.0)
    engine = make_engine(FAMILY)
    num_requests = NUM_DRAWS // 4
    counts = collections.Counter()
    singles = collections.Counter()
    for first in range(0, num_requests, 50):
        drawn: dict[str, list[int]] = {}
        for number in range(first, first + 50):
            one = SamplingParams(
                **{name: getattr(params, name) for name in params.__struct_fields__} | {"seed": number}
            )
            engine.add_request(EngineRequest(request_id=str(number), prompt_token_ids=[9, 10, 11], params=one))
            drawn[str(number)] = [0] * 4
        for delta in drain(engine):
            if delta.token_ids:
                drawn[delta.request_id][delta.index] = delta.token_ids[0]
        for tokens in drawn.values():
            singles.update(tokens)
            counts.update((tokens[a], tokens[b]) for a, b in ((0, 1), (2, 3)))
    table = [[counts[a, b] for b in allowed] for a in allowed]
    assert stats.chi2_contingency(table).pvalue > 1e-4
    assert min(singles.values()) > num_requests / 10


def test_constrained_choices_have_sessions_of_their_own() -> None:
    engine = make_engine(FAMILY)
    spec = ConstraintSpec(kind="regex", text="[a-z]{3,9}")
    params = sampled(11, 5, constraint=spec)
    resolved = engine.constraints.resolve(spec).result()

    def run(one: SamplingParams) -> list[list[int]]:
        engine.add_request(EngineRequest(request_id="c", prompt_token_ids=[7] * 16, params=one), resolved)
        outputs: list[list[int]] = [[] for _ in range(one.n)]
        for delta in drain(engine):
            outputs[delta.index] += delta.token_ids
        return outputs

    together = run(params)
    assert together == [run(sampled(child_seed(11, index), 1, constraint=spec))[0] for index in range(5)]
    assert len({tuple(output) for output in together}) == 5


def test_one_choice_ends_alone_an_abort_ends_all() -> None:
    engine = make_engine(FAMILY)
    engine.add_request(EngineRequest(request_id="a", prompt_token_ids=PROMPTS[1], params=sampled(1, 4)))
    engine.step()
    (ended,) = engine.finish("a", 2, 1)
    assert (ended.index, ended.finish) == (2, FinishStatus.FINISHED_STOPPED)
    assert ended.usage is not None
    assert ended.usage.num_output_tokens == 1
    engine.step()
    aborted = engine.abort("a")
    assert sorted(output.index for output in aborted) == [0, 1, 3]
    engine.check_integrity()
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_an_abort_during_prefill_ends_every_choice() -> None:
    engine = make_engine(FAMILY, max_num_batched_tokens=6)
    engine.add_request(EngineRequest(request_id="a", prompt_token_ids=PROMPTS[2], params=sampled(1, 4)))
    engine.step()
    assert sorted(output.index for output in engine.abort("a")) == [0, 1, 2, 3]
    engine.check_integrity()


def test_a_deadline_during_prefill_ends_every_choice() -> None:
    engine = make_engine(FAMILY)
    request = EngineRequest(request_id="a", prompt_token_ids=PROMPTS[2], params=sampled(1, 4), deadline_s=1e-9)
    engine.add_request(request)
    assert [(output.index, output.error) for output in engine.step()] == [(i, "the deadline passed") for i in range(4)]
    engine.check_integrity()


def test_choices_that_wait_share_their_prompt() -> None:
    engine = make_engine(FAMILY, max_num_sequences=64)
    tracemalloc.start()
    for number in range(50):
        prompt = [5 + number, *range(10, 300)]
        engine.add_request(EngineRequest(request_id=str(number), prompt_token_ids=prompt, params=sampled(1, 64)))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 2**20, "choices hold something before they run"
    assert sorted(output.index for output in engine.abort("7")) == list(range(64))
    engine.check_integrity()


def test_more_choices_than_places_are_refused() -> None:
    engine = make_engine(FAMILY, max_num_sequences=4)
    with pytest.raises(ValueError, match=r"n 5 exceeds the 4 sequences.*max_num_sequences"):
        engine.add_request(EngineRequest(request_id="a", prompt_token_ids=[5], params=sampled(1, 5)))
    engine.check_integrity()
    assert len(choices(engine, [5], sampled(1, 4))) == 4


def test_choices_wait_until_there_are_places_for_all() -> None:
    engine = make_engine(FAMILY, max_num_sequences=4)
    for name in "abc":
        engine.add_request(EngineRequest(request_id=name, prompt_token_ids=[5, 6], params=sampled(1, 3)))
    outputs = collections.defaultdict(list)
    while engine.has_unfinished:
        for delta in engine.step():
            outputs[delta.request_id, delta.index] += delta.token_ids
        assert len(engine.scheduler.running) <= 4
    assert {key: len(tokens) for key, tokens in outputs.items()} == dict.fromkeys(
        itertools.product("abc", range(3)), 24
    )
    assert outputs["a", 1] == outputs["b", 1] == outputs["c", 1]


def test_prompt_logprobs_are_reported_once() -> None:
    engine = make_engine(FAMILY)
    params = sampled(1, 3, prompt_logprobs=0, logprobs=1)
    engine.add_request(EngineRequest(request_id="a", prompt_token_ids=PROMPTS[1], params=params))
    deltas = drain(engine)
    assert [len(delta.prompt_logprobs) for delta in deltas if delta.prompt_logprobs] == [len(PROMPTS[1]) - 1]
    assert all(delta.logprobs for delta in deltas if delta.token_ids)


def test_sequences_of_a_request_stay_in_choice_order() -> None:
    first, second = (Sequence(index, "a", [1], SamplingParams(), 0, index=index) for index in range(2))
    assert first.order < second.order
