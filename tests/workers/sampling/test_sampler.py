"""The sampler draws what its definition says, in C++ and in torch alike, whatever else is in the batch."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import log_softmax

from manta.workers.sampling.sampling_state import SamplingState
from manta.workers.sampling_params import SamplingParams
from manta.workers.step import RowError, SamplePoint, SequenceStart
from manta.workers.torch_worker.sampler import HostSample
from tests.workers.sampling import sampling_reference as reference
from tests.workers.sampling.samplers import prompt_logprobs, sample

pytestmark = pytest.mark.usefixtures("implementation")

EOS = 3


def state_of(vocab_size: int, starts: list[SequenceStart]) -> SamplingState:
    state = SamplingState(vocab_size)
    for start in starts:
        state.start(start)
    return state


def draw_one(logits: torch.Tensor, params: SamplingParams, tokens: list[int] | None = None, **fields) -> HostSample:
    """Draws once from one row, after `tokens`, of which the first is the prompt."""
    tokens = tokens or [0]
    start = SequenceStart(0, params, fields.get("seed", 0), tokens, 1, (EOS,))
    state = state_of(fields.get("vocab_size", logits.shape[0]), [start])
    return sample(logits[None], [SamplePoint(0, 0, len(tokens))], state).to_host()


def some_logits(vocab_size: int, seed: int, spread: float = 3.0, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "low_temperature": {"temperature": 0.05},
    "top_k": {"top_k": 5},
    "top_k_1": {"top_k": 1},
    "top_k_large": {"top_k": 400},
    "top_k_beyond_vocabulary": {"top_k": 10**6},
    "top_p": {"top_p": 0.8},
    "top_p_tiny": {"top_p": 1e-6},
    "min_p": {"min_p": 0.05},
    "min_p_1": {"min_p": 1.0},
    "top_k_top_p_min_p": {"top_k": 40, "top_p": 0.7, "min_p": 0.02, "temperature": 1.5},
    "repetition": {"repetition_penalty": 1.7},
    "reward_repetition": {"repetition_penalty": 0.5},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.9},
    "all_penalties_top_p": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "top_p": 0.9,
    },
    "logit_bias": {"logit_bias": {5: 4.0, 6: -100.0, 7: 2.5}},
    "bad_words": {"bad_words_token_ids": ((4,), (7, 9), (1, 2, 4), (9, 9, 9))},
    "min_tokens": {"min_tokens": 30, "stop_token_ids": (8, 11)},
    "min_tokens_reached": {"min_tokens": 6, "stop_token_ids": (8, 11)},
    "allowed": {"allowed_token_ids": (2, 5, 7, 11, 12)},
    "everything": {
        "allowed_token_ids": tuple(range(16)),
        "bad_words_token_ids": ((4,), (7, 9)),
        "min_tokens": 12,
        "logit_bias": {5: 1.0},
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
        "temperature": 0.9,
        "top_k": 8,
        "top_p": 0.95,
        "min_p": 0.01,
    },
}


@pytest.mark.axes_in_turns
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_draws_what_sorting_and_summing_everything_gives(name: str, dtype: torch.dtype) -> None:
    params = SamplingParams(**CASES[name])
    chooser = random.Random(name)
    decided = 0
    for case, vocab_size in enumerate([16, 37, 600, 5003] * 6):
        likely = min(vocab_size, 16)  # few distinct tokens, so that words and counts repeat
        prompt = [chooser.randrange(likely) for _ in range(chooser.randrange(1, 6))]
        output = [chooser.randrange(likely) for _ in range(chooser.randrange(0, 12))]
        seed = chooser.randrange(-(2**63), 2**63)
        logits = some_logits(vocab_size, case, spread=chooser.choice([0.3, 1.0, 4.0])).to(dtype)
        logits[0, :likely] += 1
        start = SequenceStart(0, params, seed, prompt + output, len(prompt), (EOS,))
        position = len(prompt) + len(output)
        drawn = sample(logits, [SamplePoint(0, 0, position)], state_of(vocab_size, [start])).to_host()
        values = reference.processed_logits(logits[0].float().numpy(), params, prompt, output, (EOS,))
        expected = reference.draw(values, params, seed, position)
        assert drawn.errors == {}
        if not expected.is_close:
            decided += 1
            assert drawn.token_ids == [expected.token_id]
    assert decided >= 20


def mixed_batch() -> list[SequenceStart]:
    names = list(CASES)
    tokens = [[index % 13, 7, 9, 2, index % 5, 4] for index in range(16)]
    return [
        SequenceStart(index, SamplingParams(**CASES[names[index % len(names)]]), index - 8, tokens[index], 2, (EOS,))
        for index in range(16)
    ]


def generate(starts: list[SequenceStart], num_tokens: int, vocab_size: int = 999) -> dict[int, list[int]]:
    """Each next row of logits is a function of the sequence's own tokens, as a model's would be."""
    state = state_of(vocab_size, starts)
    outputs: dict[int, list[int]] = {start.sequence_id: [] for start in starts}
    for _ in range(num_tokens):
        ids = list(outputs)
        points = [SamplePoint(row, key, len(state.tokens(key))) for row, key in enumerate(ids)]
        rows = [some_logits(vocab_size, int(state.tokens(key).sum()) * 1000 + key)[0] for key in ids]
        drawn = sample(torch.stack(rows), points, state).to_host()
        for key, token_id in zip(ids, drawn.token_ids, strict=True):
            state.append(key, [token_id])
            outputs[key].append(token_id)
    return outputs


def test_same_tokens_alone_and_with_fifteen_others() -> None:
    batch = mixed_batch()
    together = generate(batch, 12)
    for start in batch:
        assert generate([start], 12)[start.sequence_id] == together[start.sequence_id]


def test_same_tokens_after_a_rebuild_from_tokens() -> None:
    batch = mixed_batch()
    whole = generate(batch, 12)
    first = generate(batch, 5)
    rebuilt = [
        SequenceStart(s.sequence_id, s.params, s.seed, s.token_ids + first[s.sequence_id], 2, s.eos_token_ids)
        for s in batch
    ]
    rest = generate(rebuilt, 7)
    assert {key: first[key] + rest[key] for key in whole} == whole


def test_an_earlier_point_ignores_later_tokens() -> None:
    """What verifying drafts needs: they are appended first, then each position draws as if it were the last."""
    tokens = [1, 2, 3, 9, 9, 9, 4]
    logits = some_logits(300, 5, spread=0.5)
    for case in ("all_penalties_top_p", "bad_words", "min_tokens_reached", "everything"):
        params = SamplingParams(**CASES[case])
        state = state_of(300, [SequenceStart(0, params, 5, tokens, 1, (EOS,))])
        points = [SamplePoint(0, 0, position) for position in range(1, len(tokens) + 1)]
        together = sample(logits.expand(len(points), -1), points, state).to_host().token_ids
        assert together == [draw_one(logits[0], params, tokens[: p.position], seed=5).token_ids[0] for p in points]


@pytest.mark.parametrize("case", ["greedy", "temperature", "top_p", "top_k", "min_p", "allowed", "all_penalties_top_p"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_row_of_invalid_logits_fails_alone(case: str, value: str) -> None:
    params = SamplingParams(**CASES[case])
    starts = [SequenceStart(index, params, index, [1, 2], 1) for index in range(3)]
    state = state_of(200, starts)
    points = [SamplePoint(index, index, 2) for index in range(3)]
    logits = some_logits(200, 1, rows=3)
    good = sample(logits, points, state).to_host()
    logits[1, 150] = float(value)  # not among the allowed ones, yet the row is not to be trusted
    drawn = sample(logits, points, state).to_host()
    kind = "NaN" if value == "nan" else "infinite"
    assert drawn.errors == {1: RowError(f"the model produced {kind} logits at position 2", is_corrupt=True)}
    assert (drawn.token_ids[0], drawn.token_ids[2]) == (good.token_ids[0], good.token_ids[2])


def test_a_fully_masked_row_fails_with_the_reason() -> None:
    params = SamplingParams(allowed_token_ids=(4, EOS), bad_words_token_ids=((4,),), min_tokens=2)
    assert "every token is masked at position 1" in draw_one(torch.zeros(50), params).errors[0].reason
    greedy = SamplingParams(temperature=0.0, allowed_token_ids=(EOS,), min_tokens=2)
    assert "every token is masked at position 1" in draw_one(torch.zeros(50), greedy).errors[0].reason


@pytest.mark.parametrize("case", ["greedy", "temperature", "top_p", "top_k", "top_k_large", "min_p", "presence"])
@pytest.mark.parametrize("padding", [1000.0, float("nan")])
def test_the_padded_tail_is_never_drawn(case: str, padding: float) -> None:
    vocab_size = 501
    logits = torch.full((vocab_size + 30,), padding)
    logits[:vocab_size] = some_logits(vocab_size, 3)[0]
    params = SamplingParams(**CASES[case], logprobs=2)
    for seed in range(20):
        drawn = draw_one(logits, params, vocab_size=vocab_size, seed=seed)
        assert drawn.errors == {}
        assert drawn.token_ids == draw_one(logits[:vocab_size], params, seed=seed).token_ids
        assert max(drawn.logprobs[0].top_token_ids) < vocab_size


def test_equal_logits_rank_by_token_id() -> None:
    logits = torch.zeros(1000)
    logits[[700, 31, 500]] = 2.0
    assert draw_one(logits, SamplingParams(temperature=0.0)).token_ids == [31]
    seeds = range(200)
    assert {draw_one(logits, SamplingParams(top_k=2), seed=seed).token_ids[0] for seed in seeds} == {31, 500}
    assert {draw_one(logits, SamplingParams(top_k=5), seed=seed).token_ids[0] for seed in seeds} == {31, 500, 700, 0, 1}
    sharp = SamplingParams(top_p=0.6, temperature=0.05)
    assert {draw_one(logits, sharp, seed=seed).token_ids[0] for seed in seeds} == {31, 500}
    report = draw_one(logits, SamplingParams(temperature=0.0, logprobs=5)).logprobs[0]
    assert report.top_token_ids == [31, 500, 700, 0, 1]
    assert report.rank == 1


def test_zeros_of_either_sign_are_equal() -> None:
    logits = torch.full((64,), -1.0)
    logits[[5, 9]] = torch.tensor([-0.0, 0.0])
    for params in (SamplingParams(temperature=0.0, logprobs=2), SamplingParams(top_k=1, logprobs=2)):
        drawn = draw_one(logits, params)
        assert drawn.token_ids == [5]
        assert drawn.logprobs[0].top_token_ids == [5, 9]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_logprobs_are_those_of_the_unmodified_distribution(dtype: torch.dtype) -> None:
    vocab_size = 3001
    logits = some_logits(vocab_size + 7, 2, rows=4).to(dtype)
    counts = [5, None, 0, 20]
    starts = [
        SequenceStart(i, SamplingParams(temperature=0.5, top_k=3, presence_penalty=2.0, logprobs=count), i, [1, 2], 1)
        for i, count in enumerate(counts)
    ]
    drawn = sample(logits, [SamplePoint(i, i, 2) for i in range(4)], state_of(vocab_size, starts)).to_host()
    assert set(drawn.logprobs) == {0, 2, 3}
    for index, report in drawn.logprobs.items():
        expected = log_softmax(logits[index, :vocab_size].double().numpy())
        order = np.lexsort((np.arange(vocab_size), -expected))
        count = counts[index]
        assert report.token_id == drawn.token_ids[index]
        assert report.logprob == pytest.approx(expected[report.token_id], abs=1e-4)
        assert order[report.rank - 1] == report.token_id
        assert report.top_token_ids == order[:count].tolist()
        assert report.top_logprobs == pytest.approx(expected[order[:count]].tolist(), abs=1e-4)


def test_prompt_logprobs_rank_the_given_tokens() -> None:
    logits = some_logits(700, 4, rows=5)
    targets = [0, 699, 350, 7, 7]
    reports = prompt_logprobs(logits, targets, 3, vocab_size=700)
    for row, target, report in zip(logits, targets, reports, strict=True):
        expected = log_softmax(row.double().numpy())
        assert report.token_id == target
        assert report.logprob == pytest.approx(expected[target], abs=1e-4)
        assert report.rank == 1 + (expected > expected[target]).sum()
        assert report.top_token_ids == np.argsort(-expected)[:3].tolist()


def test_state_keeps_the_tokens_of_many_sequences() -> None:
    state = SamplingState(100)
    tokens = {key: [key % 100, 5] for key in range(70)}  # more than the first table holds
    for key, ids in tokens.items():
        state.start(SequenceStart(key, SamplingParams(logprobs=key % 2 or None), key, list(ids), 1))
    for step in range(400):
        for key in (3, 69):
            state.append(key, [step % 100])
            tokens[key].append(step % 100)
    state.append(4, [7, 8, 9])
    tokens[4] += [7, 8, 9]
    state.forget(5)
    state.forget(5)
    del tokens[5]
    state.start(SequenceStart(1000, SamplingParams(), 0, [42], 1))
    tokens[1000] = [42]
    assert {key: state.tokens(key).tolist() for key in tokens} == tokens
    assert state.last_tokens(list(tokens)).tolist() == [ids[-1] for ids in tokens.values()]
    assert state.num_wanting_logprobs == 34


def test_parameters_survive_growth_of_the_table() -> None:
    starts = [SequenceStart(key, SamplingParams(top_k=1 + key), key, [1], 1) for key in range(70)]
    logits = some_logits(50, 1)
    points = [SamplePoint(key, key, 1) for key in range(70)]
    together = sample(logits.expand(70, -1), points, state_of(50, starts)).to_host().token_ids
    assert together == [draw_one(logits[0], s.params, [1], seed=s.seed).token_ids[0] for s in starts]


def test_wrong_input_is_named() -> None:
    state = state_of(50, [SequenceStart(0, SamplingParams(), 0, [1, 2], 1)])
    with pytest.raises(ValueError, match="position 3 of sequence 0 is beyond the 2 tokens"):
        sample(torch.zeros(1, 50), [SamplePoint(0, 0, 3)], state)
    with pytest.raises(ValueError, match="1 rows of logits for 2 tokens"):
        sample(torch.zeros(1, 50), [SamplePoint(0, 0, 2)] * 2, state)
    with pytest.raises(ValueError, match="40 wide, less than the vocabulary of 50"):
        sample(torch.zeros(1, 40), [SamplePoint(0, 0, 2)], state)
    with pytest.raises(ValueError, match="logit_bias: token id 50"):
        state.start(SequenceStart(1, SamplingParams(logit_bias={50: 1.0}), 0, [1], 1))
    with pytest.raises(ValueError, match="token_ids: token id -1"):
        state.start(SequenceStart(1, SamplingParams(), 0, [1, -1], 1))


def test_noise_and_state_import_no_torch() -> None:
    code = (
        "import sys, manta.workers.sampling.noise, manta.workers.sampling.sampling_state;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"repetition_penalty": 0.5}, "repetition_penalty"),
        ({"repetition_penalty": 0.5, "logit_bias": {2: 1.0}, "temperature": 0}, "logit_bias and repetition_penalty"),
    ],
)
def test_overflowing_edits_name_parameters_and_spare_caches(params: dict[str, Any], named: str) -> None:
    logits = some_logits(40, 1)[0]
    logits[7] = 3e38
    drawn = draw_one(logits, SamplingParams(**params), [7, 7])
    error = drawn.errors[0]
    assert not error.is_corrupt
    assert f"under {named};" in error.reason
    logits[8] = float("inf")
    assert draw_one(logits, SamplingParams(**params), [7, 7]).errors[0].is_corrupt
