"""The Triton sampler draws what the torch sampler draws, in the interpreter or on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode

from manta.structured.masks import LATE, NO_MASK, MaskBatch, row_words
from manta.workers.kernels import torch_sampler
from manta.workers.kernels.triton import edits as edits_module
from manta.workers.kernels.triton import sampler
from manta.workers.kernels.triton.edits import Edits, edited_rows, edits_of
from manta.workers.kernels.triton.noise import gumbel_noise
from manta.workers.sampling import noise
from manta.workers.sampling.row_status import INFINITE, MASKED, NAN, OVERFLOW
from manta.workers.sampling.row_status import LATE as LATE_STATUS
from manta.workers.sampling.sampling_state import SequenceState
from manta.workers.sampling_params import SamplingParams
from manta.workers.step import SequenceStart
from tests.workers.sampling.test_sampler import CASES, EOS, some_logits, state_of
from tests.workers.triton_device import DEVICE, THOROUGH

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


def random_edits(random: np.random.Generator, vocab_size: int) -> SamplingParams:
    """Every kind of edit, or none, for tokens that come often and for any."""

    def tokens(most: int, least: int = 0) -> list[int]:
        bound = min(vocab_size, int(random.choice([13, vocab_size])))
        return random.integers(0, bound, int(random.integers(least, most))).tolist()

    def maybe(value: float, otherwise: float) -> float:
        return value if random.random() < 0.4 else otherwise

    return SamplingParams(
        allowed_token_ids=tuple(tokens(30, least=1)) if random.random() < 0.2 else None,
        bad_words_token_ids=tuple((*tokens(3), token) for token in tokens(4)),
        min_tokens=int(random.integers(0, 12)),
        logit_bias={token: float(random.normal() * 5) for token in tokens(20)} if random.random() < 0.5 else {},
        repetition_penalty=maybe(float(random.uniform(0.3, 3)), 1.0),
        presence_penalty=maybe(float(random.uniform(-2, 2)), 0.0),
        frequency_penalty=maybe(float(random.uniform(-2, 2)), 0.0),
    )


def edited_by_reference(
    logits: torch.Tensor, edits: Edits, sequences: list[SequenceState], positions: list[int], masks: MaskBatch
) -> torch.Tensor:
    rows = logits[edits.points.tolist()].float()
    for row, point in zip(rows, edits.points.tolist(), strict=True):
        torch_sampler.edit(row, sequences[point], positions[point])
        if point in masks.adjustments:
            ids, values = masks.adjustments[point]
            row[torch.from_numpy(ids).long()] += torch.from_numpy(values)
    return rows


@pytest.mark.parametrize("seed", range(BATCHES * 6))
def test_edited_rows_equal_the_reference(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit: sequences without output, with long ones, at two positions, and rows of -inf."""
    random = np.random.default_rng(seed)
    vocab_size = int(random.choice([37, 700, 4099, 151_669 if THOROUGH else 9001]))
    monkeypatch.setattr(edits_module, "_BLOCK", int(random.choice([16, 1024])))
    starts = []
    for index in range(int(random.integers(1, 9))):
        prompt, output = random.integers(0, 13, 5), random.integers(0, min(vocab_size, 60), random.choice([0, 6, 900]))
        tokens = np.concatenate([prompt, output]).tolist()
        starts.append(SequenceStart(index, random_edits(random, vocab_size), 0, tokens, len(prompt), (EOS,)))
    state = state_of(vocab_size, starts)
    held = [state.sequences[start.sequence_id] for start in starts]
    sequences = [*held, held[0]]
    positions = [*(sequence.num_tokens for sequence in held), max(5, held[0].num_tokens - 3)]
    logits = some_logits(vocab_size + 5, seed, rows=len(sequences))
    logits = logits.to([torch.float32, torch.bfloat16, torch.float16][seed % 3])
    logits[0, 3:] = float("-inf")
    ids = random.choice(vocab_size, 9, replace=False).astype(np.int32)
    adjustments = {int(random.integers(len(sequences))): (ids, random.normal(size=9).astype(np.float32))}
    masks = MaskBatch(0, [NO_MASK] * len(sequences), np.zeros((0, row_words(vocab_size)), np.int32), adjustments)
    rows = state.table[[sequence.row for sequence in sequences]]
    edits = edits_of(rows, sequences, np.array(positions), masks)
    assert edits is not None
    unedited = set(range(len(sequences))).difference(edits.points.tolist(), adjustments)
    assert all(not sequences[point].banned_by_words(positions[point]) for point in unedited)
    expected = edited_by_reference(logits[:, :vocab_size], edits, sequences, positions, masks)
    actual = edited_rows(logits.to(DEVICE), edits, vocab_size)
    torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0)


class Allocations(TorchDispatchMode):
    """Bytes of every tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.sizes[tensor.data_ptr()] = max(tensor.nbytes, self.sizes.get(tensor.data_ptr(), 0))
        return result


def test_an_edited_row_takes_four_bytes_a_token() -> None:
    """Its counts too."""
    vocab_size, names = 5000, ["repetition", "frequency", "logit_bias"]
    state = state_of(vocab_size, starts_of(names, 1))
    sequences = list(state.sequences.values())
    edits = edits_of(state.table[[sequence.row for sequence in sequences]], sequences, np.full(3, 8), None)
    assert edits is not None
    logits = some_logits(vocab_size, 1, rows=3).to(DEVICE)
    with Allocations() as made:
        edited_rows(logits, edits, vocab_size)
    made.sizes.pop(logits.data_ptr(), None)  # the interpreter looks at its arguments
    assert 12 * vocab_size <= sum(made.sizes.values()) < 16 * vocab_size


def test_many_rows_log_probabilities_come_in_parts() -> None:
    vocab_size, num_rows = 50, 3 * torch_sampler.LOGPROB_ROWS + 1
    logits, token_ids = some_logits(vocab_size, 1, rows=num_rows), torch.arange(num_rows) % vocab_size
    with Allocations() as made:
        reports = sampler.logprobs(logits, token_ids, 2)
    assert max(made.sizes.values()) <= 8 * torch_sampler.LOGPROB_ROWS * vocab_size
    logprobs, ranks, top_ids, top = reports
    expected = logits.log_softmax(1)
    torch.testing.assert_close(logprobs, expected.gather(1, token_ids[:, None])[:, 0])
    torch.testing.assert_close(top, expected.topk(2).values)
    assert top_ids.tolist() == expected.topk(2).indices.tolist()
    assert ranks.tolist() == (1 + (logits > logits.gather(1, token_ids[:, None])).sum(1)).tolist()


def test_a_step_without_edits_copies_no_row() -> None:
    names = ["greedy", "temperature", "top_k_top_p_min_p", "min_tokens_reached"]
    state = state_of(200, starts_of(names, 1))
    sequences = list(state.sequences.values())
    rows = state.table[[sequence.row for sequence in sequences]]
    assert edits_of(rows, sequences, np.full(4, 8), None) is None


@pytest.mark.parametrize("seed", range(BATCHES))
@pytest.mark.parametrize(("vocab_size", "dtype"), [(37, torch.float32), (700, torch.bfloat16)])
def test_mixed_rows_draw_the_same_tokens(vocab_size: int, dtype: torch.dtype, seed: int) -> None:
    names = list(CASES)
    starts = starts_of(names, seed)
    logits = some_logits(vocab_size + 5, seed, spread=2.0, rows=len(names)).to(dtype)
    compare(logits, starts, random_masks(len(names), vocab_size, seed) if dtype == torch.bfloat16 else None)


def test_several_chunks_draw_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CHUNK", "SEARCH_CHUNK"):
        monkeypatch.setattr(sampler, name, 128)
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


def test_overflowing_edits_differ_from_infinite_logits() -> None:
    starts = starts_of(["repetition", "reward_repetition", "logit_bias", "reward_repetition"], 1)
    logits = some_logits(205, 1, rows=4)
    logits[:, : starts_vocabulary(logits, None)] *= 1e37
    logits[:3] = logits[:3].clamp(-1e38, 1e38)
    logits[3, 150] = float("inf")
    masks = MaskBatch(0, [NO_MASK] * 4, np.zeros((1, row_words(200)), dtype=np.int32), {})
    logits[1, starts[1].token_ids] = 2e38
    assert compare(logits, starts) == compare(logits, starts, masks) == [0, OVERFLOW, 0, INFINITE]


def test_empty_masks_and_late_rows_are_distinguished() -> None:
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
