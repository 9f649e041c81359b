"""Draws follow the softmax, and the noise behind them is uniform and independent. Seeds are fixed: nothing is flaky.

`MANTA_PROVE=1` multiplies the sample sizes by ten.
"""

from __future__ import annotations

import hashlib
import os
import struct

import numpy as np
import pytest
import torch
from scipy import stats

from manta.workers.sampling.noise import gumbel_noise, noise_keys
from manta.workers.sampling.sampling_state import SamplingState
from manta.workers.sampling_params import SamplingParams, child_seed
from manta.workers.step import SamplePoint, SequenceStart
from tests.workers.sampling import sampling_reference as reference
from tests.workers.sampling.samplers import sample

NUM_DRAWS = 200_000 if os.environ.get("MANTA_PROVE") == "1" else 20_000
VOCAB_SIZE = 60
ALPHA = 1e-3
"""A right sampler passes at nearly every seed; these are fixed, so a failure is a change of the noise for the worse."""


def logits_of_a_model() -> torch.Tensor:
    return torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 2


def p_value(token_ids: np.ndarray, probabilities: np.ndarray) -> float:
    """Of Pearson's χ² test; tokens expected less than 5 times are counted together."""
    counts = np.bincount(token_ids, minlength=len(probabilities)).astype(float)
    assert (counts[probabilities == 0] == 0).all()
    expected = probabilities * len(token_ids)
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] == 0:
        counts, expected = counts[:-1], expected[:-1]
    return float(stats.chisquare(counts, expected).pvalue)


def softmax_of_kept(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """The distribution that the definition gives, in float64."""
    scaled = logits.double().numpy() / params.temperature
    mass = np.exp(scaled - scaled.max())
    order = np.argsort(-mass)
    kept = order[: params.top_k] if params.top_k > 0 else order
    share = mass[kept] / mass[kept].sum()
    kept = kept[np.cumsum(share) - share < params.top_p]
    kept = kept[mass[kept] >= params.min_p]
    probabilities = np.zeros(len(mass))
    probabilities[kept] = mass[kept] / mass[kept].sum()
    return probabilities


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.9},
        {"top_p": 0.8},
        {"top_k": 7},
        {"min_p": 0.1},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 1.3},
    ],
    ids=str,
)
def test_draws_at_successive_positions_follow_the_softmax(fields: dict, implementation: str) -> None:
    params = SamplingParams(**fields)
    state = SamplingState(VOCAB_SIZE)
    state.start(SequenceStart(0, params, 7, [1] * NUM_DRAWS, 1))
    logits = logits_of_a_model()
    points = [SamplePoint(0, 0, position) for position in range(1, NUM_DRAWS + 1)]
    drawn = sample(logits[None].expand(NUM_DRAWS, -1), points, state)
    assert p_value(drawn.token_ids.numpy(), softmax_of_kept(logits, params)) > ALPHA


def test_draws_of_successive_seeds_follow_the_softmax(implementation: str) -> None:
    num_draws = NUM_DRAWS // 4
    state = SamplingState(VOCAB_SIZE)
    for seed in range(num_draws):
        state.start(SequenceStart(seed, SamplingParams(), seed, [1], 1))
    logits = logits_of_a_model()
    points = [SamplePoint(0, seed, 1) for seed in range(num_draws)]
    drawn = sample(logits[None].expand(num_draws, -1), points, state)
    assert p_value(drawn.token_ids.numpy(), softmax_of_kept(logits, SamplingParams())) > ALPHA


def test_child_draws_follow_the_softmax(implementation: str) -> None:
    num_draws = NUM_DRAWS // 4
    state = SamplingState(VOCAB_SIZE)
    for index in range(num_draws):
        state.start(SequenceStart(index, SamplingParams(), child_seed(7, index), [1], 1))
    logits = logits_of_a_model()
    drawn = sample(logits[None].expand(num_draws, -1), [SamplePoint(0, i, 1) for i in range(num_draws)], state)
    assert p_value(drawn.token_ids.numpy(), softmax_of_kept(logits, SamplingParams())) > ALPHA


# ---- The noise itself ------------------------------------------------------------------------------------------------


def noise(seeds: range | list[int], positions: range | list[int], num_ids: int) -> np.ndarray:
    """float32 [seeds x positions, num_ids]."""
    pairs = np.array([(seed, position) for seed in seeds for position in positions], dtype=np.int64)
    keys = torch.from_numpy(noise_keys(pairs[:, 0], pairs[:, 1]).view(np.int32))
    return gumbel_noise(keys, torch.arange(num_ids)).numpy()


def uniforms(seeds: range | list[int], positions: range | list[int], num_ids: int) -> np.ndarray:
    """The same noise as numbers in (0, 1)."""
    return np.exp(-np.exp(-noise(seeds, positions, num_ids).astype(np.float64)))


def independence_p_value(first: np.ndarray, second: np.ndarray) -> float:
    """χ² test that pairs of uniforms fill a 16 x 16 grid evenly."""
    cells = np.minimum(first.ravel() * 16, 15).astype(int) * 16 + np.minimum(second.ravel() * 16, 15).astype(int)
    return float(stats.chisquare(np.bincount(cells, minlength=256)).pvalue)


def test_noise_is_the_documented_function() -> None:
    ids = np.array([0, 1, 2, 31999, 151935])
    for seed, position in [(0, 0), (7, 1), (8, 1), (-1, 5), (2**63 - 1, 131071), (-(2**63), 3)]:
        keys = torch.from_numpy(noise_keys(np.array([seed]), np.array([position])).view(np.int32))
        expected = reference.gumbel(seed, position, ids)
        np.testing.assert_allclose(gumbel_noise(keys, torch.from_numpy(ids))[0].numpy(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("seeds", "positions", "num_ids"),
    [([7], [0], NUM_DRAWS), ([7], range(NUM_DRAWS // 16), 16), (range(NUM_DRAWS // 16), [3], 16)],
    ids=["over ids", "over positions", "over seeds"],
)
def test_noise_is_gumbel_distributed(seeds: range, positions: range, num_ids: int) -> None:
    values = noise(seeds, positions, num_ids).ravel()
    assert stats.kstest(values, "gumbel_r").pvalue > ALPHA
    bins = np.bincount((uniforms(seeds, positions, num_ids).ravel() * 64).astype(int), minlength=64)
    assert stats.chisquare(bins).pvalue > ALPHA


def test_noise_is_finite_and_has_a_fine_tail() -> None:
    """The tail decides whether improbable tokens can be drawn: P(noise > t) is 1 - exp(-exp(-t)), about exp(-t)."""
    values = np.concatenate([noise([seed], range(64), 32768).ravel() for seed in range(NUM_DRAWS // 10_000)])
    assert np.isfinite(values).all()
    for threshold in (8.0, 10.0, 12.0):
        expected = len(values) * -np.expm1(-np.exp(-threshold))
        count = (values > threshold).sum()
        assert stats.poisson.cdf(count, expected) > ALPHA
        assert stats.poisson.sf(count - 1, expected) > ALPHA


@pytest.mark.parametrize("shift", [1, 2, 16, 1024])
def test_neighbouring_noise_is_independent(shift: int) -> None:
    size = NUM_DRAWS // 16
    by_id = uniforms([7], range(16), size + shift)
    assert independence_p_value(by_id[:, :-shift], by_id[:, shift:]) > ALPHA
    by_position = uniforms([7], range(size + shift), 16)
    assert independence_p_value(by_position[:-shift], by_position[shift:]) > ALPHA
    by_seed = uniforms(range(-5, size + shift - 5), [3], 16)
    assert independence_p_value(by_seed[:-shift], by_seed[shift:]) > ALPHA


def test_noise_of_seeds_7_and_8_is_independent() -> None:
    positions = range(NUM_DRAWS // 200)
    seven, eight = uniforms([7], positions, 400), uniforms([8], positions, 400)
    assert independence_p_value(seven, eight) > ALPHA
    assert abs(stats.pearsonr(seven.ravel(), eight.ravel()).statistic) < 4 / np.sqrt(seven.size)
    assert independence_p_value(seven[1:], eight[:-1]) > ALPHA  # nor is one the other, moved by a position


def test_one_bit_key_changes_give_independent_noise() -> None:
    """The mixer must stand alone: real keys are hashes already, these are not."""
    base = torch.tensor([[0x12345678, 0x0BADCAFE]], dtype=torch.int32)
    ids = torch.arange(4 * NUM_DRAWS // 10)
    first = np.exp(-np.exp(-gumbel_noise(base, ids).double().numpy()))
    p_values = []
    for half in range(2):
        for bit in range(20, 31):  # lower bits of the first half only reorder the ids
            key = base.clone()
            key[0, half] ^= 1 << bit
            second = np.exp(-np.exp(-gumbel_noise(key, ids).double().numpy()))
            p_values.append(independence_p_value(first, second))
    assert min(p_values) > ALPHA / len(p_values)


def test_child_seeds_are_public_and_distinct() -> None:
    for seed, index in [(0, 0), (7, 0), (7, 63), (-3, 2)]:
        digest = hashlib.blake2b(struct.pack("<qq", seed, index), digest_size=8).digest()
        assert (child_seed(seed, index),) == struct.unpack("<q", digest)
    seeds = {child_seed(seed, index) for seed in range(-20, 20) for index in range(500)}
    assert len(seeds) == 40 * 500
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
