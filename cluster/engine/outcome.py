"""Applies the ranks' answer to one sequence: its new tokens, its end, and what its caller is told of both.

Queues and blocks belong to the scheduler, which is the only caller. Imports neither torch nor ray.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from cluster.engine.request import FinishStatus, SequenceOutput
from cluster.engine.sequence import Sequence
from cluster.engine.stats import DraftCounts
from specdecode.acceptance import num_accepted
from workers.step import StepInput, StepOutput, TokenLogprobs


class Computed(msgspec.Struct, gc=False):
    """What a step computed of one sequence: positions `[start, known_end)` of its tokens, and its drafts."""

    sequence_id: int
    start: int
    known_end: int
    draft_token_ids: list[int]
    is_fork: bool = False
    """The sequence was forked in this step: it computed nothing, and drew from the last row of its parent's prompt."""


def giving_way(step: StepInput, running: list[Sequence]) -> list[Sequence]:
    """Who goes back to the queue if the device had no memory for a step: who came or was forked in it, for what they
    share with others may be uncomputed; who has drafts; and of the rest the later half.
    """
    lost = {start.sequence_id for start in step.started} | {fork.sequence_id for fork in step.forked}
    lost |= {item.sequence_id for item in step.scheduled if item.draft_token_ids}
    rest = [sequence for sequence in running if sequence.sequence_id not in lost]
    kept = {sequence.sequence_id for sequence in rest[: -(-len(rest) // 2)]}
    return [sequence for sequence in running if sequence.sequence_id not in kept]


def computed_by(step: StepInput, sequences: Mapping[int, Sequence]) -> list[Computed]:
    """What the step computed, forks last. Forks that have ended, and so are not in `sequences` (by id), are left
    out.
    """
    computed = [
        Computed(
            item.sequence_id,
            item.start,
            item.start + item.num_tokens - len(item.draft_token_ids),
            item.draft_token_ids,
        )
        for item in step.scheduled
    ]
    for fork in step.forked:
        sequence = sequences.get(fork.sequence_id)
        if sequence is not None:
            end = sequence.num_prompt_tokens
            computed.append(Computed(fork.sequence_id, end, end, [], is_fork=True))
    return computed


def advance(
    sequence: Sequence, computed: Computed, output: StepOutput, draft_counts: DraftCounts
) -> SequenceOutput | None:
    """Gives the sequence what it gained, and returns that; None if it gained nothing. If the result has a `finish`, the
    caller must end the sequence.
    """
    token_ids = output.token_ids.get(sequence.sequence_id)
    proposer, drafts = sequence.draft_proposer, computed.draft_token_ids
    sequence.draft_token_ids = output.draft_token_ids.get(sequence.sequence_id, [])
    sequence.draft_proposer = output.draft_proposers.get(sequence.sequence_id, "")
    prompt_logprobs = _new_prompt_logprobs(sequence, computed.start, output)
    if not token_ids:
        # A row whose token was not drawn because its mask was late computes its last position again.
        late = computed.known_end == len(sequence.token_ids)
        sequence.num_computed_tokens = computed.known_end - late
        if prompt_logprobs:
            return SequenceOutput(sequence.request_id, sequence.index, [], prompt_logprobs=prompt_logprobs)
        return None
    if sequence.num_branches:
        sequence.num_computed_tokens, sequence.is_paused = computed.known_end, True
        return SequenceOutput(sequence.request_id, sequence.index, [], output.logprobs.get(sequence.sequence_id))
    gained, finish = _accept(sequence, token_ids)
    if drafts:
        count = num_accepted(drafts, gained)
        draft_counts.add(proposer, len(drafts), count)
        sequence.num_accepted_drafts += count
        sequence.num_rejected_drafts += len(drafts) - count
    sequence.num_computed_tokens = computed.known_end + len(gained) - 1
    logprobs = output.logprobs.get(sequence.sequence_id)
    change = SequenceOutput(
        sequence.request_id,
        sequence.index,
        gained,
        None if logprobs is None else logprobs[: len(gained)],
        prompt_logprobs,
    )
    if finish is not None or drafts or sequence.num_output_tokens == len(gained):
        change.usage = sequence.usage
    if finish is not None:
        change.finish = finish
        if finish is FinishStatus.FINISHED_STOPPED:
            change.stop_token_id = gained[-1]
    return change


def _accept(sequence: Sequence, token_ids: list[int]) -> tuple[list[int], FinishStatus | None]:
    """Appends tokens up to the one that ends the sequence, if one does."""
    for count, token_id in enumerate(token_ids, start=1):
        sequence.token_ids.append(token_id)
        if token_id in sequence.stop_ids:
            return token_ids[:count], FinishStatus.FINISHED_STOPPED
        if len(sequence.token_ids) >= sequence.max_length:
            return token_ids[:count], FinishStatus.FINISHED_LENGTH
    return token_ids, None


def _new_prompt_logprobs(sequence: Sequence, start: int, output: StepOutput) -> list[TokenLogprobs] | None:
    """Entries for prompt positions that were not reported before a preemption."""
    entries = output.prompt_logprobs.get(sequence.sequence_id)
    if not entries:
        return None
    new = entries[max(0, sequence.num_prompt_logprobs - start) :]
    sequence.num_prompt_logprobs = max(sequence.num_prompt_logprobs, start + len(entries))
    return new or None
