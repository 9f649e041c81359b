"""Draws the tokens of a step from its logits, and reports log-probabilities.

Owns the order of the processors and the choice of implementation (a C++ kernel on the CPU, torch elsewhere); keeps no
state. Called by the model runner. It never waits for the device: that is `Sampled.to_host`.

A row is processed in this order, in float32:

1. `allowed_token_ids`: all other tokens are masked (-inf)
2. `bad_words`: the last token of each word is masked where the output ends with the tokens before it
3. `min_tokens`: end-of-sequence and stop tokens are masked until the output has that many tokens
4. `logit_bias` is added
5. `repetition_penalty` divides positive and multiplies other logits of tokens in prompt or output; `frequency_penalty`
   times the occurrences in the output, and `presence_penalty` for tokens in the output, are subtracted
6. the constraint: its adjustments are added, and all tokens that its mask forbids are masked
7. `temperature` divides; at 0 the largest logit wins and the rest is skipped
8. `top_k` keeps the k largest
9. `top_p` keeps the fewest, most probable first, whose mass reaches top_p of the mass of those kept so far
10. `min_p` keeps those at least min_p times as probable as the best one
11. The largest sum of logit and Gumbel noise (`workers/noise.py`) wins.

Equal logits rank by id, lowest first, in 7 to 10 and in reported ranks; ties of the sum go to the lowest id.
"""

from __future__ import annotations

import dataclasses

import torch

from structured.masks import MaskBatch
from workers.kernels import cpu_sampler, torch_sampler
from workers.sampling_state import SamplingState
from workers.step import RowError, SamplePoint, TokenLogprobs

LogprobTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclasses.dataclass
class HostSample:
    """Drawn tokens on the host; a failed point has an entry in `errors` and token 0, a late one is None."""

    token_ids: list[int | None]
    errors: dict[int, RowError]
    """Point index to what is wrong with its row."""
    logprobs: dict[int, TokenLogprobs]
    """Point index to the report, for sequences that asked."""


@dataclasses.dataclass
class Sampled:
    """Drawn tokens on the device: `token_ids` int64 [P] and `status` uint8 [P]."""

    token_ids: torch.Tensor
    status: torch.Tensor
    points: list[SamplePoint]
    reported: list[tuple[int, int]]
    """(point index, number of alternatives) of the points whose logprobs are reported."""
    logprobs: LogprobTensors | None

    def to_host(self) -> HostSample:
        """Waits for the device."""
        token_ids = self.token_ids.tolist()
        errors = {}
        if any(status := self.status.tolist()):
            for index, code in enumerate(status):
                if code == torch_sampler.LATE:
                    token_ids[index] = None
                elif code:
                    errors[index] = self._error(index, code)
        if self.logprobs is None:
            return HostSample(token_ids, errors, {})
        entries = _entries(
            self.logprobs, [token_ids[index] for index, _ in self.reported], [n for _, n in self.reported]
        )
        reports = {
            index: entry
            for (index, _), entry in zip(self.reported, entries, strict=True)
            if index not in errors and token_ids[index] is not None
        }
        return HostSample(token_ids, errors, reports)

    def _error(self, index: int, code: int) -> RowError:
        position = self.points[index].position
        if code == torch_sampler.NAN:
            return RowError(f"the model produced NaN logits at position {position}", is_corrupt=True)
        if code == torch_sampler.INFINITE:
            return RowError(f"the model produced infinite logits at position {position}", is_corrupt=True)
        return RowError(
            f"every token is masked at position {position}: allowed_token_ids, bad_words, min_tokens and the "
            "constraint leave none; loosen one of them"
        )


def sample(
    logits: torch.Tensor, points: list[SamplePoint], state: SamplingState, masks: MaskBatch | None = None
) -> Sampled:
    """Draws one token for each point: row `i` of `logits` [P, width] (bfloat16 or float32) belongs to `points[i]`.

    This is `apply` of the two-phase step on every platform: `masks.slots[i]` is the mask of `points[i]`, and a late
    point draws nothing. Log-probabilities are those of the unmasked distribution.

    Columns from `state.vocab_size` on are padding and never drawn. Noise, `min_tokens`, `bad_words` and penalties
    depend on the point's position and the tokens before it only, so a sequence may have points at several positions.
    Raises `ValueError` where a shape does not fit or a position is beyond the sequence's tokens.
    """
    _check_shape(logits, len(points), state.vocab_size)
    sequences = [state.sequences[point.sequence_id] for point in points]
    positions = [point.position for point in points]
    for sequence, point in zip(sequences, points, strict=True):
        if point.position > sequence.num_tokens:
            raise ValueError(
                f"position {point.position} of sequence {point.sequence_id} is beyond the {sequence.num_tokens} tokens "
                "that it holds; append those before it first"
            )
    implementation = cpu_sampler if cpu_sampler.serves(logits) else torch_sampler
    if masks is not None and len(masks.slots) != len(points):
        raise ValueError(f"{len(masks.slots)} masks for {len(points)} sample points; there must be one entry for each")
    token_ids, status = implementation.draw(logits, sequences, positions, state, masks)
    reported: list[tuple[int, int]] = []
    if state.num_wanting_logprobs:
        asked = ((index, sequence.params.logprobs) for index, sequence in enumerate(sequences))
        reported = [(index, num_top) for index, num_top in asked if num_top is not None]
    if not reported:
        return Sampled(token_ids, status, points, reported, None)
    targets = token_ids
    if len(reported) < len(points):
        rows = torch.tensor([index for index, _ in reported]).to(logits.device)
        logits, targets = logits[rows], token_ids[rows]
    num_top = max(num_top for _, num_top in reported)
    reports = implementation.logprobs(logits[:, : state.vocab_size], targets, num_top)
    return Sampled(token_ids, status, points, reported, reports)


def prompt_logprobs(
    logits: torch.Tensor, next_token_ids: list[int], num_top: int, vocab_size: int | None = None
) -> list[TokenLogprobs]:
    """Log-probabilities of `next_token_ids` [R] under `logits` [R, width] and of the `num_top` best; waits for the
    device.

    They are those of the unmodified distribution over the first `vocab_size` columns (all by default).
    """
    if vocab_size is not None:
        logits = logits[:, :vocab_size]
    _check_shape(logits, len(next_token_ids), 1)
    targets = torch.tensor(next_token_ids, dtype=torch.int64).to(logits.device)
    implementation = cpu_sampler if cpu_sampler.serves(logits) else torch_sampler
    reports = implementation.logprobs(logits, targets, num_top)
    return _entries(reports, next_token_ids, [num_top] * len(next_token_ids))


def _entries(reports: LogprobTensors, token_ids: list[int], counts: list[int]) -> list[TokenLogprobs]:
    columns = zip(token_ids, counts, *(tensor.tolist() for tensor in reports), strict=True)
    return [
        TokenLogprobs(token_id, logprob, rank, top_ids[:count], top_logprobs[:count])
        for token_id, count, logprob, rank, top_ids, top_logprobs in columns
    ]


def _check_shape(logits: torch.Tensor, num_rows: int, vocab_size: int) -> None:
    if logits.shape[0] != num_rows:
        raise ValueError(f"{logits.shape[0]} rows of logits for {num_rows} tokens; there must be one row for each")
    if logits.shape[1] < vocab_size:
        raise ValueError(f"logits are {logits.shape[1]} wide, less than the vocabulary of {vocab_size}")
