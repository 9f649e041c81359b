"""Verifies drafts: decides which tokens of a step each sequence keeps. Plain Python, on the host.

A step draws at every point as if all drafts were tokens of the sequence. A sequence keeps its draws up to and including
the first that differs from its draft, because each of these was drawn after the right tokens. The noise
(`workers/sampling/noise.py`) is a function of the position, so they are the tokens of a run without drafts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from manta.structured.masks import MaskBatch
from manta.workers.sampling.host_sample import HostSample
from manta.workers.sampling.sampling_state import SamplingState
from manta.workers.step import RowError, SamplePoint, StepInput, StepOutput


def drafts_of(step: StepInput) -> dict[int, list[int]]:
    """Returns the drafts that the step verifies, by sequence id."""
    return {item.sequence_id: item.draft_token_ids for item in step.scheduled if item.draft_token_ids}


class Draws(NamedTuple):
    """What a step draws."""

    points: list[SamplePoint]
    drafts: dict[int, list[int]]
    """The drafts that it verifies, by sequence id."""
    masks: MaskBatch | None


def draws_of(step: StepInput, masks: MaskBatch | None, overtaken: Collection[int]) -> Draws:
    """Returns what a step draws under its masks: nothing for sequences that are `overtaken`."""
    points, drafts = step.sample_points, drafts_of(step)
    if not overtaken:
        return Draws(points, drafts, masks)
    chosen = [index for index, point in enumerate(points) if point.sequence_id not in overtaken]
    if masks is not None:
        places = enumerate(chosen)
        adjustments = {place: masks.adjustments[index] for place, index in places if index in masks.adjustments}
        masks = masks._replace(slots=[masks.slots[index] for index in chosen], adjustments=adjustments)
    drafts = {sequence_id: drafted for sequence_id, drafted in drafts.items() if sequence_id not in overtaken}
    return Draws([points[index] for index in chosen], drafts, masks)


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
    gone: Collection[int] = (),
) -> None:
    """Gives each sequence its draws, by position, up to and including the first that differs from its draft. Puts
    tokens, log-probabilities and errors into `output`. Sequences that are `gone` from `state` gain nothing there.

    A sequence with `k` drafts has `k + 1` points, in the order of their positions. If one of them is late or fails, the
    tokens before it stay, and the next step draws at that point again.
    """
    indices: dict[int, list[int]] = {}
    for index, point in enumerate(points):
        indices.setdefault(point.sequence_id, []).append(index)
    state.rejecting.clear()
    for sequence_id, own in indices.items():
        if sequence_id in output.errors:
            state.rejecting.add(sequence_id)
            continue
        kept, error = _kept(own, drafts.get(sequence_id, ()), drawn)
        if len(kept) < len(own):
            state.rejecting.add(sequence_id)
        if kept:
            output.token_ids[sequence_id] = kept
            if sequence_id not in gone:
                state.append(sequence_id, kept)
            logprobs = [drawn.logprobs[index] for index in own[: len(kept)] if index in drawn.logprobs]
            if logprobs:
                output.logprobs[sequence_id] = logprobs
        elif error is not None:
            output.errors[sequence_id] = error


def _kept(indices: list[int], drafts: Sequence[int], drawn: HostSample) -> tuple[list[int], RowError | None]:
    """Returns the tokens that a sequence keeps of its draws at `indices`, and the error that stopped it, if any."""
    kept: list[int] = []
    for place, index in enumerate(indices):
        token_id = drawn.token_ids[index]
        if index in drawn.errors or token_id is None:
            return kept, drawn.errors.get(index)
        kept.append(token_id)
        if place < len(drafts) and drafts[place] != token_id:
            break
    return kept, None
