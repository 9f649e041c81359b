"""The Triton sampler draws what the torch sampler draws, in the interpreter or on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from structured.masks import LATE, NO_MASK, MaskBatch, row_words
from tests.test_sampler import CASES, EOS, some_logits, state_of
from tests.triton_device import DEVICE, THOROUGH
from workers.kernels import torch_sampler
from workers.kernels.protocol import INFINITE, MASKED, NAN
from workers.kernels.protocol import LATE as LATE_STATUS
from workers.kernels.triton import sampler
from workers.kernels.triton.noise import gumbel_noise
from workers.sampling import noise
from workers.sampling_params import SamplingParams
from workers.step import SequenceStart

BATCHES = 30 if THOROUGH else 1


@triton.jit
def _noise_of(tokens, keys, output, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    values = gumbel_noise(tl.load(tokens + place), tl.load(keys), tl.load(keys + 1))
    tl.store(output + place, values)


@pytest.mark.parametrize("seed", [0, -1, 2**62])
def test_the_noise_is_that_of_every_sampler(seed: int) -> None:
    """To the last bits, also where it is largest, which decides who wins."""
    tokens = torch.arange(1 << 14, dtype=torch.int32)
    keys = torch.from_numpy(noise.noise_keys(np.array([seed]), np.array([17])).view(np.int32))
    output = torch.empty(len(tokens), device=DEVICE)
    _noise_of[(1,)](tokens.to(DEVICE), keys.to(DEVICE), output, SIZE=len(tokens))
    expected = noise.gumbel_noise(keys, tokens)[0]
    assert expected.max() > 8
    torch.testing.assert_close(output.cpu(), expected, atol=2e-6, rtol=2e-7)


def compare(logits: torch.Tensor, starts: list[SequenceStart], masks: MaskBatch | None = None) -> list[int]:
    """Draws with both samplers; returns the statuses."""
    state = state_of(starts_vocabulary(logits, masks), starts)
    sequences = [state.sequences[start.sequence_id] for start in starts]
    positions = [len(start.token_ids) for start in starts]
    expected = torch_sampler.draw(logits, sequences, positions, state, masks)
    token_ids, status = sampler.draw(logits.to(DEVICE), sequences, positions, state, masks)
    assert status.tolist() == expected[1].tolist()
    assert token_ids.tolist() == expected[0].tolist()
    return status.tolist()


def starts_vocabulary(logits: torch.Tensor, masks: MaskBatch | None) -> int:
    """Some columns of the logits are padding."""
    return logits.shape[1] - 5


def starts_of(names: list[str], seed: int) -> list[SequenceStart]:
    random = np.random.default_rng(seed)
    return [
        SequenceStart(
            index, SamplingParams(**CASES[name]), int(random.integers(-(2**63), 2**63)),
            random.integers(0, 13, 8).tolist(), 2, (EOS,),
        )
        for index, name in enumerate(names)
    ]  # fmt: skip


def random_masks(count: int, vocab_size: int, seed: int) -> MaskBatch:
    """Some rows without a mask, some late, some that share a mask, and one with adjustments."""
    random = np.random.default_rng(seed)
    rows = random.integers(-(2**31), 2**31, (4, row_words(vocab_size))).astype(np.int32)
    slots = random.choice([NO_MASK, LATE, 0, 1, 3], count).tolist()
    adjusted = next(index for index in range(count) if slots[index] >= 0)
    ids = random.choice(vocab_size, 9, replace=False).astype(np.int32)
    return MaskBatch(0, slots, rows, {adjusted: (ids, random.normal(size=9).astype(np.float32) * 4)})


@pytest.mark.parametrize("seed", range(BATCHES))
@pytest.mark.parametrize(("vocab_size", "dtype"), [(37, torch.float32), (700, torch.bfloat16)])
def test_a_batch_of_every_kind_of_row_draws_the_same_tokens(vocab_size: int, dtype: torch.dtype, seed: int) -> None:
    names = list(CASES)
    starts = starts_of(names, seed)
    logits = some_logits(vocab_size + 5, seed, spread=2.0, rows=len(names)).to(dtype)
    compare(logits, starts, random_masks(len(names), vocab_size, seed) if dtype == torch.bfloat16 else None)


def test_a_vocabulary_of_several_chunks_draws_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "CHUNK", 128)
    names = ["greedy", "temperature", "top_k", "top_k_top_p_min_p", "logit_bias"]
    logits = some_logits(300, 3, rows=len(names))
    compare(logits, starts_of(names, 3), random_masks(len(names), 295, 3))


@pytest.mark.parametrize("name", ["greedy", "top_p", "allowed"])
def test_a_row_of_invalid_logits_fails_alone(name: str) -> None:
    starts = starts_of([name] * 5, 1)
    logits = some_logits(205, 1, rows=5)
    logits[1, 150], logits[2, 150], logits[3, :200] = float("nan"), float("inf"), float("-inf")
    logits[4, 200:] = float("nan")  # padding
    assert compare(logits, starts) == [0, NAN, INFINITE, MASKED, 0]


def test_a_mask_that_forbids_all_and_a_late_one_are_told_apart() -> None:
    starts = starts_of(["temperature"] * 4, 2)
    rows = np.zeros((2, row_words(200)), dtype=np.int32)
    rows[1, 3] = 4
    masks = MaskBatch(0, [0, LATE, NO_MASK, 1], rows, {})
    assert compare(some_logits(205, 1, rows=4), starts, masks) == [MASKED, LATE_STATUS, 0, 0]


def test_equal_logits_rank_by_token_id() -> None:
    """Of many tokens that are equal top_k and top_p keep the first."""
    params = [{"top_k": 2}, {"top_k": 5}, {"top_p": 0.01}, {"top_p": 0.5}, {"top_k": 300, "top_p": 0.3}, {}]
    starts = [SequenceStart(index, SamplingParams(**one), index, [1], 1) for index, one in enumerate(params)]
    logits = torch.zeros(len(starts), 605)
    logits[:, [31, 200, 400]] = 2.0
    logits[0, 5] = -0.0
    compare(logits, starts)
