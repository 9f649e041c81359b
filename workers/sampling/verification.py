"""Verifies drafts: decides which tokens of a step each sequence keeps. Plain Python, on the host.

A step draws at every point as if all drafts were tokens of the sequence. A sequence keeps its draws up to and including
the first that differs from its draft, because each of these was drawn after the right tokens. The noise
(`workers/sampling/noise.py`) is a function of the position, so they are the tokens of a run without drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from workers.sampling.host_sample import HostSample
from workers.sampling.sampling_state import SamplingState
from workers.step import SamplePoint, StepInput, StepOutput


def drafts_of(step: StepInput) -> dict[int, list[int]]:
    """Returns the drafts that the step verifies, by sequence id."""
    return {item.sequence_id: item.draft_token_ids for item in step.scheduled if item.draft_token_ids}


@contextmanager
def drafts_as_tokens(drafts: dict[int, list[int]], state: SamplingState) -> Iterator[None]:
    """Appends drafts to their sequences within the context, and removes them afterwards."""
    for sequence_id, token_ids in drafts.items():
        state.append(sequence_id, token_ids)
    try:
        yield
    finally:
        for sequence_id, token_ids in drafts.items():
            state.truncate(sequence_id, len(state.tokens(sequence_id)) - len(token_ids))


def keep_verified(
    points: Sequence[SamplePoint],
    drafts: Mapping[int, list[int]],
    drawn: HostSample,
    state: SamplingState,
    output: StepOutput,
) -> None:
    """Gives each sequence its draws, by position, up to and including the first that differs from its draft. Puts
    tokens, log-probabilities and errors into `output`.

    If a later point is late or fails, the kept tokens stay, and the next step draws at that point again.
    """
    settled = set(output.errors)
    for index in sorted(range(len(points)), key=lambda index: points[index].position):
        sequence_id = points[index].sequence_id
        if sequence_id in settled:
            continue
        kept = output.token_ids.get(sequence_id)
        error, token_id = drawn.errors.get(index), drawn.token_ids[index]
        if error is not None or token_id is None:
            settled.add(sequence_id)
            if error is not None and kept is None:
                output.errors[sequence_id] = error
            continue
        if kept is None:
            kept = output.token_ids[sequence_id] = []
        kept.append(token_id)
        state.append(sequence_id, (token_id,))
        logprobs = drawn.logprobs.get(index)
        if logprobs is not None:
            output.logprobs.setdefault(sequence_id, []).append(logprobs)
        if sequence_id in drafts and not _is_draft(drafts[sequence_id], kept):
            settled.add(sequence_id)


def _is_draft(drafts: list[int], kept: list[int]) -> bool:
    """Returns whether the last kept token equals its draft, so that the next draw counts too."""
    place = len(kept) - 1
    return place < len(drafts) and drafts[place] == kept[-1]
