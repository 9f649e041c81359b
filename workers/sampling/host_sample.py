"""What a sampler's arrays say once they are on the host: tokens, errors in words, and log-probabilities.

Samplers of all frameworks read their arrays into lists and call these functions. Imports no framework.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from workers.sampling.row_status import LATE, row_error
from workers.sampling.sampling_state import SequenceState
from workers.step import RowError, SamplePoint, TokenLogprobs


@dataclasses.dataclass
class HostSample:
    """Drawn tokens on the host; a failed point has an entry in `errors` and token 0, a late one is None."""

    token_ids: list[int | None]
    errors: dict[int, RowError]
    """Sample point's index to what is wrong with its row."""
    logprobs: dict[int, TokenLogprobs]
    """Sample point's index to its logprobs, for sequences that asked."""


@dataclasses.dataclass
class ProcessorReport:
    """The points that have logits processors."""

    names: Mapping[int, str]
    """Point index to the names of its processors."""
    failures: Mapping[int, str]
    """Point index to how a processor failed, for points whose logits were valid before."""


NO_PROCESSORS = ProcessorReport({}, {})


def read_sample(
    points: Sequence[SamplePoint],
    sequences: Sequence[SequenceState],
    token_ids: list[int],
    status: list[int],
    processors: ProcessorReport = NO_PROCESSORS,
) -> HostSample:
    """Returns the drawn tokens with errors in words. `status` has a code of `workers.sampling.row_status` each."""
    tokens: list[int | None] = list(token_ids)
    errors = {}
    if any(status):
        for index, code in enumerate(status):
            if code == LATE:
                tokens[index] = None
            elif code:
                names = processors.names.get(index, "")
                errors[index] = row_error(code, points[index].position, sequences[index].params, names)
    for index, failure in processors.failures.items():
        tokens[index] = 0
        errors[index] = RowError(f"{failure} (position {points[index].position})")
    return HostSample(tokens, errors, {})


def report_logprobs(sample: HostSample, reported: list[tuple[int, int]], columns: Iterable[list[Any]]) -> None:
    """Puts the log-probabilities of drawn tokens into `sample`.

    `reported` has (point index, number of alternatives); `columns` are the arrays of `token_logprobs` as lists, with an
    entry for each.
    """
    counts = [num_top for _, num_top in reported]
    entries = token_logprobs([sample.token_ids[index] for index, _ in reported], counts, columns)
    for (index, _), entry in zip(reported, entries, strict=True):
        if index not in sample.errors and sample.token_ids[index] is not None:
            sample.logprobs[index] = entry


def token_logprobs(
    token_ids: Sequence[int | None], counts: Sequence[int], columns: Iterable[list[Any]]
) -> list[TokenLogprobs]:
    """Returns an entry for each token. `columns`: log-probability, rank, the ids of the best tokens and their
    log-probabilities, of which entry `i` gets the first `counts[i]`.
    """
    return [
        TokenLogprobs(token_id or 0, logprob, rank, top_ids[:count], top_logprobs[:count])
        for token_id, count, logprob, rank, top_ids, top_logprobs in zip(token_ids, counts, *columns, strict=True)
    ]
