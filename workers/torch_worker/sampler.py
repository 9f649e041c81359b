"""Draws the tokens of a step from its logits, and reports log-probabilities.

This module fixes the order of the processors and keeps no state. The model runner calls it with the platform's kernels.
`sample` never waits for the device; `Sampled.to_host` does.

A row is processed in this order, in float32:

1. `allowed_token_ids`: all other tokens are masked (-inf)
2. `bad_words`: the last token of each word is masked if the output ends with the word's other tokens
3. `min_tokens`: end-of-sequence and stop tokens are masked until the output has that many tokens
4. `logit_bias` is added
5. `repetition_penalty` divides positive and multiplies other logits of tokens in prompt or output; `frequency_penalty`
   times the occurrences in the output, and `presence_penalty` for tokens in the output, are subtracted
6. logits processors, in the order of the request (`logits_processors.py`), change the result of 1 to 5
7. the constraint: its adjustments are added, and all tokens that its mask forbids are masked
8. `temperature` divides; at 0 the largest logit wins and the rest is skipped
9. `top_k` keeps the k largest
10. `top_p` keeps the fewest tokens, most probable first, whose mass reaches top_p of the mass of those kept so far
11. `min_p` keeps tokens at least min_p times as probable as the best one
12. The largest sum of logit and Gumbel noise (`workers/sampling/noise.py`) wins.

Equal logits are ordered by id, lowest first, in 8 to 11 and in reported ranks. Of equal sums the lowest id wins.
"""

from __future__ import annotations

import dataclasses
import operator

import numpy as np
import torch

from manta.structured.masks import LATE as LATE_SLOT
from manta.structured.masks import MaskBatch
from manta.workers.kernels import torch_sampler
from manta.workers.kernels.protocol import SamplerKernels
from manta.workers.kernels.transfer import place, to_host
from manta.workers.sampling.host_sample import (
    NO_PROCESSORS,
    HostSample,
    ProcessorReport,
    read_sample,
    report_logprobs,
    token_logprobs,
)
from manta.workers.sampling.logits_processors import ProcessorFailed
from manta.workers.sampling.row_status import INFINITE, NAN, OK, OVERFLOW
from manta.workers.sampling.sampling_state import SamplingState, SequenceState
from manta.workers.step import SamplePoint, TokenLogprobs

LogprobTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""The result of `SamplerKernels.logprobs`."""


@dataclasses.dataclass
class Processed:
    """The logits of the R points with logits processors, after the processors have run."""

    names: dict[int, str]
    """Point indices with the names of their processors, in the order of the rows of `logits`."""
    logits: torch.Tensor
    """The processed logits, float32 [R, V]."""
    status: torch.Tensor
    """Status of the logits before the processors, uint8 [R]: that of the model's logits, or `OVERFLOW`."""
    raised: dict[int, str]
    """Point indices with the error that a processor raised."""
    checks: list[tuple[int, str, torch.Tensor]]
    """(point index, processor name, check): whether the processor's logits are neither NaN nor +inf."""

    def to_cpu(self) -> Processed:
        """Returns a copy in host memory; see `Sampled.to_cpu`."""
        checks = [(index, name, to_host(check)) for index, name, check in self.checks]
        return dataclasses.replace(self, status=to_host(self.status), checks=checks)

    def failures(self) -> dict[int, str]:
        """Returns point indices with the failure of a processor, if the logits were valid before. Waits for
        the device.
        """
        failures = dict(self.raised)
        if self.checks:
            is_valid = torch.stack([check for _, _, check in self.checks]).tolist()
            for (index, name, _), valid in zip(self.checks, is_valid, strict=True):
                if not valid:
                    failures.setdefault(index, f"logits processor {name!r} returned NaN or +inf")
        for index, code in zip(self.names, self.status.tolist(), strict=True):
            if code != OK:
                failures.pop(index, None)
        return failures


@dataclasses.dataclass
class Sampled:
    """Drawn tokens on the device: `token_ids` int64 [P] and `status` uint8 [P]."""

    token_ids: torch.Tensor
    status: torch.Tensor
    points: list[SamplePoint]
    sequences: list[SequenceState]
    """The sequence of each point."""
    reported: list[tuple[int, int]]
    """(point index, number of alternatives) of the points whose logprobs are reported."""
    logprobs: LogprobTensors | None
    processed: Processed | None = None

    def to_cpu(self) -> Sampled:
        """Returns a copy in host memory, which may be read when the device has finished its present work."""
        logprobs = self.logprobs
        if logprobs is not None:
            logprobs = to_host(logprobs[0]), to_host(logprobs[1]), to_host(logprobs[2]), to_host(logprobs[3])
        processed = None if self.processed is None else self.processed.to_cpu()
        return dataclasses.replace(
            self,
            token_ids=to_host(self.token_ids),
            status=to_host(self.status),
            logprobs=logprobs,
            processed=processed,
        )

    def to_host(self) -> HostSample:
        """Returns the tokens on the host, with error messages and log-probabilities. Waits for the device."""
        processors = NO_PROCESSORS
        if self.processed is not None:
            processors = ProcessorReport(self.processed.names, self.processed.failures())
        drawn = read_sample(self.points, self.sequences, self.token_ids.tolist(), self.status.tolist(), processors)
        if self.logprobs is not None:
            report_logprobs(drawn, self.reported, [tensor.tolist() for tensor in self.logprobs])
        return drawn


def sample(
    kernels: SamplerKernels,
    logits: torch.Tensor,
    points: list[SamplePoint],
    state: SamplingState,
    masks: MaskBatch | None = None,
) -> Sampled:
    """Draws one token for each point: row `i` of `logits` [P, width], in any dtype of a model, belongs to `points[i]`.

    `masks.slots[i]` is the mask of `points[i]`; a late point draws nothing. Log-probabilities are those of the unmasked
    distribution. Columns from `state.vocab_size` on are padding and never drawn.

    Noise, `min_tokens`, `bad_words` and penalties depend only on the point's position and the tokens before it, so a
    sequence may have points at several positions. Raises `ValueError` if a shape does not fit or a position is beyond
    the sequence's tokens.
    """
    _check_shape(logits, len(points), state.vocab_size)
    sequences = [state.sequences[point.sequence_id] for point in points]
    positions = [point.position for point in points]
    _check_points(points, sequences, positions, masks)
    processed = None
    if state.num_with_processors:
        processed = _processed(logits, sequences, positions, state, masks)
    if processed is None:
        token_ids, status = kernels.draw(logits, sequences, positions, state, masks)
    else:
        token_ids, status = _draw_processed(kernels, processed, logits, sequences, positions, state, masks)
    reported: list[tuple[int, int]] = []
    if state.num_wanting_logprobs:
        asked = ((index, sequence.params.logprobs) for index, sequence in enumerate(sequences))
        reported = [(index, num_top) for index, num_top in asked if num_top is not None]
    logprobs = _logprobs(kernels, logits, token_ids, reported, state.vocab_size) if reported else None
    return Sampled(token_ids, status, points, sequences, reported, logprobs, processed)


def _check_points(
    points: list[SamplePoint], sequences: list[SequenceState], positions: list[int], masks: MaskBatch | None
) -> None:
    lengths = [sequence.num_tokens for sequence in sequences]
    is_beyond = list(map(operator.gt, positions, lengths))
    if any(is_beyond):
        index = is_beyond.index(True)
        raise ValueError(
            f"position {positions[index]} of sequence {points[index].sequence_id} is beyond the {lengths[index]} "
            "tokens that it holds; append those before it first"
        )
    if masks is not None and len(masks.slots) != len(points):
        raise ValueError(f"{len(masks.slots)} masks for {len(points)} sample points; there must be one entry for each")


def _draw_processed(
    kernels: SamplerKernels,
    processed: Processed,
    logits: torch.Tensor,
    sequences: list[SequenceState],
    positions: list[int],
    state: SamplingState,
    masks: MaskBatch | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws from the processed logits at points that have them, and from the model's logits at the others."""
    chosen = list(processed.names)
    drawn, status = kernels.draw(
        processed.logits,
        [sequences[index] for index in chosen],
        [positions[index] for index in chosen],
        state,
        None if masks is None else _masks_of(masks, chosen),
    )
    is_invalid = (status == NAN) | (status == INFINITE)
    status = torch.where(is_invalid, OVERFLOW, status)  # the kernel takes its input for the model's logits
    status = torch.where(processed.status == OK, status, processed.status)
    if len(chosen) == len(sequences):
        return drawn, status
    # Drawing every row and replacing these results is cheaper than copying the other rows' logits.
    all_drawn, all_status = kernels.draw(logits, sequences, positions, state, masks)
    rows = place(np.array(chosen), logits.device)
    all_drawn[rows], all_status[rows] = drawn, status
    return all_drawn, all_status


def _logprobs(
    kernels: SamplerKernels,
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    reported: list[tuple[int, int]],
    vocab_size: int,
) -> LogprobTensors:
    """Returns the log-probabilities of the rows that `reported` names, each with its number of alternatives."""
    if len(reported) < len(logits):
        rows = place(np.array([index for index, _ in reported]), logits.device)
        logits, token_ids = logits[rows], token_ids[rows]
    return kernels.logprobs(logits[:, :vocab_size], token_ids, max(num_top for _, num_top in reported))


def _processed(
    logits: torch.Tensor,
    sequences: list[SequenceState],
    positions: list[int],
    state: SamplingState,
    masks: MaskBatch | None,
) -> Processed | None:
    """Runs the logits processors of points that are not late. Returns None if no such point has any."""
    chosen = points_with_processors(sequences, masks)
    if not chosen:
        return None
    rows = logits[place(np.array(chosen), logits.device), : state.vocab_size].float()
    return run_processors(rows, chosen, sequences, positions)


def points_with_processors(sequences: list[SequenceState], masks: MaskBatch | None) -> list[int]:
    """Returns the indices of the sample points that have logits processors and are not late."""
    return [
        index
        for index, sequence in enumerate(sequences)
        if sequence.processors is not None and (masks is None or masks.slots[index] != LATE_SLOT)
    ]


def run_processors(
    rows: torch.Tensor, chosen: list[int], sequences: list[SequenceState], positions: list[int]
) -> Processed:
    """Applies every step before the constraint to `rows` in place, float32 [R, V]. Row `i` belongs to point
    `chosen[i]`.
    """
    running = [(index, processors) for index in chosen if (processors := sequences[index].processors) is not None]
    status = torch_sampler.invalid(rows)
    for row, index in zip(rows, chosen, strict=True):
        torch_sampler.edit(row, sequences[index], positions[index])
    overflows = (status == OK) & (torch_sampler.invalid(rows) != OK)
    names = {index: processors.names for index, processors in running}
    result = Processed(names, rows, torch.where(overflows, OVERFLOW, status), {}, [])
    for row, (index, processors) in zip(rows, running, strict=True):
        sequence = sequences[index]
        try:
            checks = processors.run(sequence.tokens, sequence.num_prompt_tokens, positions[index], row)
        except ProcessorFailed as error:
            result.raised[index] = str(error)
        else:
            result.checks += [(index, name, check) for name, check in checks]
    return result


def _masks_of(masks: MaskBatch, indices: list[int]) -> MaskBatch:
    """Returns the masks of these points only."""
    adjustments = {row: masks.adjustments[index] for row, index in enumerate(indices) if index in masks.adjustments}
    return masks._replace(slots=[masks.slots[index] for index in indices], adjustments=adjustments)


def prompt_logprobs(
    kernels: SamplerKernels,
    logits: torch.Tensor,
    next_token_ids: list[int],
    num_top: int,
    vocab_size: int | None = None,
) -> list[TokenLogprobs]:
    """Returns the log-probabilities of `next_token_ids` [R] under `logits` [R, width], and of the `num_top` best
    tokens.

    The distribution is unmodified and covers the first `vocab_size` columns, by default all. Waits for the device.
    """
    if vocab_size is not None:
        logits = logits[:, :vocab_size]
    _check_shape(logits, len(next_token_ids), 1)
    targets = torch.tensor(next_token_ids, dtype=torch.int64).to(logits.device)
    reports = kernels.logprobs(logits, targets, num_top)
    columns = [tensor.tolist() for tensor in reports]
    return token_logprobs(next_token_ids, [num_top] * len(next_token_ids), columns)


def _check_shape(logits: torch.Tensor, num_rows: int, vocab_size: int) -> None:
    if logits.shape[0] != num_rows:
        raise ValueError(f"{logits.shape[0]} rows of logits for {num_rows} tokens; there must be one row for each")
    if logits.shape[1] < vocab_size:
        raise ValueError(f"logits are {logits.shape[1]} wide, less than the vocabulary of {vocab_size}")
