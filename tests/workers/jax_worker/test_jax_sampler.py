"""The sampler in JAX draws what torch's draws, for every parameter, mask and mixture of both."""

from __future__ import annotations

import tests.workers.jax_worker.devices  # isort: skip  # noqa: F401
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from manta.structured.masks import LATE, NO_MASK, MaskBatch
from manta.workers.jax_worker import sampler
from manta.workers.jax_worker.batch import padded
from manta.workers.jax_worker.edits import edit_tables, mask_rows, point_table
from manta.workers.kernels import torch_sampler
from manta.workers.sampling import noise
from manta.workers.sampling.row_status import INFINITE, MASKED, NAN, OK, OVERFLOW
from manta.workers.sampling.row_status import LATE as LATE_STATUS
from manta.workers.sampling_params import SamplingParams
from manta.workers.step import SequenceStart
from tests.workers.kernels.test_triton_sampler import random_edits, random_masks, starts_of
from tests.workers.sampling.test_sampler import CASES, EOS, some_logits, state_of

edit = jax.jit(sampler.edit)
draw = jax.jit(sampler.draw, static_argnums=0)
status_of = jax.jit(sampler.model_status)


def compare(logits: torch.Tensor, starts: list[SequenceStart], masks: MaskBatch | None = None) -> list[int]:
    """Draws with both samplers; returns the statuses."""
    vocab_size = logits.shape[1]
    state = state_of(vocab_size, starts)
    sequences = [state.sequences[start.sequence_id] for start in starts]
    positions = [len(start.token_ids) for start in starts]
    expected, expected_status = torch_sampler.draw(logits, sequences, positions, state, masks)
    size = padded(len(starts))
    rows = np.zeros((size, vocab_size), dtype=np.float32)
    rows[: len(starts)] = logits.numpy()
    table = point_table(size, sequences, positions, state)
    packed = mask_rows(table, sequences, masks, vocab_size)
    if packed is None:
        packed = np.zeros((size, -(-vocab_size // 32)), dtype=np.int32)
    edited = jnp.asarray(rows)
    of_model = status_of(edited)
    for edits in edit_tables(sequences, positions, masks, size):
        edited = edit(edited, edits)
    tokens, status = draw(size + 8, edited, of_model, table, packed)
    count = len(starts)
    assert np.asarray(status)[:count].tolist() == expected_status.tolist()
    assert np.asarray(tokens)[:count].tolist() == expected.tolist()
    assert not np.asarray(tokens)[size:].any()
    return expected_status.tolist()


@pytest.mark.parametrize("seed", [0, -1, 2**62])
def test_the_noise_is_that_of_every_sampler(seed: int) -> None:
    keys = noise.noise_keys(np.array([seed]), np.array([17])).view(np.int32)
    points = sampler.Points(*np.zeros((len(sampler.Points._fields), 1), dtype=np.int32))
    points = points._replace(key_low=keys[:, 0], key_high=keys[:, 1])
    drawn = np.asarray(sampler.gumbel_noise(points, jnp.zeros((1, 1 << 14))))
    expected = noise.gumbel_noise(torch.from_numpy(keys), torch.arange(1 << 14, dtype=torch.int32)).numpy()
    assert expected.max() > 8
    np.testing.assert_allclose(drawn, expected, atol=2e-6, rtol=5e-7)


@pytest.mark.axes_in_turns
@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("vocab_size", [37, 600, 5003])
def test_every_parameter_works_in_a_mixed_batch(vocab_size: int, spread: float) -> None:
    names = [name for name in CASES if vocab_size >= 37]
    logits = some_logits(vocab_size, vocab_size, spread=spread, rows=len(names))
    assert set(compare(logits, starts_of(names, vocab_size))) == {OK}


@pytest.mark.parametrize("seed", range(4))
def test_masks_adjustments_and_late_rows_match_points(seed: int) -> None:
    random = np.random.default_rng(seed)
    count, vocab_size = 24, 333
    starts = [
        SequenceStart(
            index,
            random_edits(random, vocab_size) if index % 2 else SamplingParams(temperature=float(index % 3)),
            index,
            random.integers(0, 13, 8).tolist(),
            2,
            (EOS,),
        )
        for index in range(count)
    ]
    statuses = compare(some_logits(vocab_size, seed, rows=count), starts, random_masks(count, vocab_size, seed))
    assert {OK, LATE_STATUS} <= set(statuses)


def test_equal_logits_rank_by_id_in_filters_too() -> None:
    logits = torch.full((6, 100), -3.0)
    logits[:, 40:90] = 1.25
    params = [
        {"top_k": 7},
        {"top_p": 0.33},
        {"top_k": 20, "top_p": 0.5},
        {"min_p": 1.0},
        {"temperature": 0.0},
        {"top_k": 1},
    ]
    starts = [SequenceStart(index, SamplingParams(**each), index, [1], 1) for index, each in enumerate(params)]
    assert set(compare(logits, starts)) == {OK}


def test_rows_that_cannot_be_drawn_say_why() -> None:
    logits = some_logits(64, 1, rows=5)
    logits[0, 3], logits[1, 3] = float("nan"), float("inf")
    logits[2, 5] = 3e38
    params = [SamplingParams()] * 2 + [SamplingParams(repetition_penalty=0.01), SamplingParams(), SamplingParams()]
    starts = [SequenceStart(index, each, 0, [5], 1) for index, each in enumerate(params)]
    masks = MaskBatch(0, [NO_MASK] * 3 + [0, LATE], np.zeros((1, 2), dtype=np.int32), {})
    assert compare(logits, starts, masks) == [NAN, INFINITE, OVERFLOW, MASKED, LATE_STATUS]


def test_log_probabilities_equal_torchs_with_ties() -> None:
    logits = some_logits(301, 3, rows=8)
    logits[:, 7], logits[:, 200] = 0.0, -0.0
    logits[0, 50:60] = 9.0
    tokens = torch.tensor([55, 1, 7, 200, 300, 0, 9, 10])
    expected = torch_sampler.logprobs(logits, tokens, 12)
    found = jax.jit(functools.partial(sampler.logprobs, 12))(jnp.asarray(logits.numpy()), jnp.asarray(tokens.numpy()))
    for ours, theirs in zip((found[0], found[3]), (expected[0], expected[3]), strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), atol=2e-6)
    assert np.asarray(found[1]).tolist() == expected[1].tolist()
    assert np.asarray(found[2]).tolist() == expected[2].tolist()
