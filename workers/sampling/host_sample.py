"""Turns a sampler's arrays on the host into tokens, error messages and log-probabilities.

The samplers of all frameworks convert their arrays to lists and call these functions. Imports no framework.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from manta.workers.sampling.row_status import LATE, row_error
from manta.workers.sampling.sampling_state import SequenceState
from manta.workers.step import RowError, SamplePoint, TokenLogprobs


@dataclasses.dataclass
class HostSample:
    """Drawn tokens on the host. A failed point has token 0 and an entry in `errors`; a late one is None."""

    token_ids: list[int | None]
    errors: dict[int, RowError]
    """Indices of failed sample points, each with the error of its row."""
    logprobs: dict[int, TokenLogprobs]
    """Indices of sample points with their log-probabilities, if requested."""


@dataclasses.dataclass
class ProcessorReport:
    """The results of logits processors, for the points that have some."""

    names: Mapping[int, str]
    """Point indices with the names of their processors."""
    failures: Mapping[int, str]
    """Point indices with the failure of a processor, if the logits were valid before it."""


NO_PROCESSORS = ProcessorReport({}, {})


def read_sample(
    points: Sequence[SamplePoint],
    sequences: Sequence[SequenceState],
    token_ids: list[int],
    status: list[int],
    processors: ProcessorReport = NO_PROCESSORS,
) -> HostSample:
    """Returns the drawn tokens with error messages. `status` has a code of `manta.workers.sampling.row_status` for each
    point.
    """
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
    """Adds the log-probabilities of drawn tokens to `sample`.

    `reported` has (point index, number of alternatives) entries. `columns` are the arrays of `token_logprobs` as lists,
    with one element for each entry.
    """
    counts = [num_top for _, num_top in reported]
    entries = token_logprobs([sample.token_ids[index] for index, _ in reported], counts, columns)
    for (index, _), entry in zip(reported, entries, strict=True):
        if index not in sample.errors and sample.token_ids[index] is not None:
            sample.logprobs[index] = entry


def token_logprobs(
    token_ids: Sequence[int | None], counts: Sequence[int], columns: Iterable[list[Any]]
) -> list[TokenLogprobs]:
    """Returns an entry for each token. `columns` are the log-probability, the rank, the ids of the best tokens and
    their log-probabilities; entry `i` gets the first `counts[i]` of these.
    """
    return [
        TokenLogprobs(token_id or 0, logprob, rank, top_ids[:count], top_logprobs[:count])
        for token_id, count, logprob, rank, top_ids, top_logprobs in zip(token_ids, counts, *columns, strict=True)
    ]
