"""A mask applied in the sampler gives what the same logits with -inf in them give, for its own row and no other."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
import torch

from manta.structured.masks import LATE, NO_MASK, BufferShape, MaskBatch, MaskBuffer, row_words
from manta.workers.sampling_params import SamplingParams
from manta.workers.step import SamplePoint, SequenceStart
from manta.workers.torch_worker.sampler import HostSample
from tests.workers.sampling.samplers import sample
from tests.workers.sampling.test_sampler import CASES, EOS, some_logits, state_of

pytestmark = pytest.mark.usefixtures("implementation")


def packed(allowed: np.ndarray) -> np.ndarray:
    """bool [R, V] to int32 [R, words]."""
    words = row_words(allowed.shape[1])
    padded = np.zeros((allowed.shape[0], 32 * words), dtype=bool)
    padded[:, : allowed.shape[1]] = allowed
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


def draw(logits: torch.Tensor, params: list[SamplingParams], masks: MaskBatch | None = None) -> HostSample:
    tokens = [1, 2, 3, 4, 5, 4]
    starts = [SequenceStart(row, one, row, tokens, 2, (EOS,)) for row, one in enumerate(params)]
    points = [SamplePoint(row, row, len(tokens)) for row in range(len(params))]
    return sample(logits, points, state_of(logits.shape[1], starts), masks).to_host()


@pytest.mark.axes_in_turns
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_a_mask_is_minus_infinity_where_it_forbids(name: str, dtype: torch.dtype) -> None:
    chooser = np.random.default_rng(len(name))
    for case, vocab_size in enumerate([16, 37, 600, 5003] * 3):
        logits = some_logits(vocab_size, case, rows=2).to(dtype)
        allowed = chooser.random((2, vocab_size)) < [0.9, 0.3, 0.05][case % 3]
        allowed[:, 2] = True  # what no case but one forbids
        hidden = logits.masked_fill(torch.from_numpy(~allowed), -torch.inf)
        params = [SamplingParams(**CASES[name])] * 2
        expected = draw(hidden, params)
        found = draw(logits, params, MaskBatch(0, [1, 0], packed(allowed)[::-1].copy(), {}))
        assert found.token_ids == expected.token_ids
        assert found.errors == expected.errors


def test_each_row_gets_its_own_mask() -> None:
    """Row `i` allows one token alone; every order of rows and slots gives each row its own."""
    num_rows, vocab_size = 12, 999
    logits = some_logits(vocab_size, 5, rows=num_rows)
    chooser = random.Random(1)
    for _ in range(20):
        slots = chooser.sample(range(40), num_rows)
        only = chooser.sample(range(vocab_size), num_rows)
        allowed = np.zeros((40, vocab_size), dtype=bool)
        allowed[slots, only] = True
        found = draw(logits, [SamplingParams()] * num_rows, MaskBatch(0, slots, packed(allowed), {}))
        assert found.token_ids == only


def test_unconstrained_and_late_rows_beside_constrained_ones() -> None:
    logits = some_logits(777, 3, rows=4)
    params = [SamplingParams(seed=row, logprobs=2) for row in range(4)]
    alone = draw(logits, params)
    allowed = np.zeros((1, 777), dtype=bool)
    allowed[0, 700] = True
    found = draw(logits, params, MaskBatch(0, [NO_MASK, 0, LATE, NO_MASK], packed(allowed), {}))
    assert found.token_ids == [alone.token_ids[0], 700, None, alone.token_ids[3]]
    assert found.errors == {}
    assert sorted(found.logprobs) == [0, 1, 3]
    # reported log-probabilities are the model's own, before the mask
    assert found.logprobs[1].rank == 1 + int((logits[1] > logits[1, 700]).sum())


@pytest.mark.parametrize("name", CASES)
def test_each_point_of_a_sequence_has_its_mask(name: str) -> None:
    """As drafts have: a point is drawn as if the sequence ended there, and one after a refused draft is not drawn."""
    logits = some_logits(600, 8, rows=4)
    params = SamplingParams(**CASES[name])
    tokens = [1, 2, 3, 4, 5, 4, 9, 5, 4]
    allowed = np.random.default_rng(3).random((3, 600)) < 0.3
    allowed[:, 2] = True
    state = state_of(600, [SequenceStart(0, params, 11, tokens, 2, (EOS,))])
    masks = MaskBatch(0, [2, 0, 1, LATE], packed(allowed), {})
    found = sample(logits, [SamplePoint(row, 0, 6 + row) for row in range(4)], state, masks).to_host()
    for row, slot in enumerate(masks.slots[:3]):
        alone = state_of(600, [SequenceStart(0, params, 11, tokens[: 6 + row], 2, (EOS,))])
        one = MaskBatch(0, [slot], masks.rows, {})
        expected = sample(logits[row : row + 1], [SamplePoint(0, 0, 6 + row)], alone, one).to_host()
        assert found.token_ids[row] == expected.token_ids[0]
        assert found.errors.get(row) == expected.errors.get(0)
    assert found.token_ids[3] is None


def test_adjustments_are_added_before_the_mask() -> None:
    logits = some_logits(64, 4, rows=2)
    allowed = np.ones((1, 64), dtype=bool)
    allowed[0, 9] = False
    ids, values = np.array([9, 11], np.int32), np.array([80.0, 60.0], np.float32)
    masks = MaskBatch(0, [0, NO_MASK], packed(allowed), {0: (ids, values)})
    params = [SamplingParams(temperature=0)] * 2
    assert draw(logits, params, masks).token_ids == [11, draw(logits, params).token_ids[1]]


def test_an_empty_row_fails_alone_and_shows_nan() -> None:
    logits = some_logits(100, 4, rows=3)
    logits[2, 50] = torch.nan
    allowed = np.zeros((2, 100), dtype=bool)
    allowed[1, 7] = True
    found = draw(logits, [SamplingParams()] * 3, MaskBatch(0, [0, 1, 1], packed(allowed), {}))
    assert found.token_ids[1] == 7
    assert sorted(found.errors) == [0, 2]
    assert "every token is masked" in found.errors[0].reason
    assert "NaN" in found.errors[2].reason


def test_a_pickled_batch_holds_used_rows_only() -> None:
    logits = some_logits(600, 5, rows=5)
    allowed = np.random.default_rng(9).random((500, 600)) < 0.3
    allowed[:, 2] = True
    ids, values = np.array([2], np.int32), np.array([3.0], np.float32)
    masks = MaskBatch(7, [420, NO_MASK, 3, LATE, 420], packed(allowed), {2: (ids, values)})
    sent = pickle.dumps(masks)
    received = pickle.loads(sent)
    assert isinstance(received, MaskBatch)
    assert (received.step_id, received.slots) == (7, [1, NO_MASK, 0, LATE, 1])
    assert received.rows.shape == (2, masks.rows.shape[1])
    assert len(sent) < masks.rows[:10].nbytes
    params = [SamplingParams(seed=1)] * 5
    assert draw(logits, params, received).token_ids == draw(logits, params, masks).token_ids


def test_masks_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="2 masks for 1 sample points"):
        draw(some_logits(10, 0), [SamplingParams()], MaskBatch(0, [NO_MASK] * 2, np.zeros((1, 1), np.int32), {}))


def test_another_process_maps_the_same_buffer() -> None:
    buffer = MaskBuffer(BufferShape(3, 5, 2), shared=True)
    other = MaskBuffer(buffer.shape)
    other.rows[2, 4] = 77
    other.set_error(1, "kaputt: ä" + 600 * "x")
    assert buffer.rows[2, 4] == 77
    assert buffer.error(1).startswith("kaputt: ä")
    assert len(buffer.error(1)) < 500
