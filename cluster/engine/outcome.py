"""Applies the ranks' answer to one sequence: its new tokens, its end, and the output for its caller.

The scheduler is the only caller, and owns queues and blocks. Imports neither torch nor ray.
"""

from __future__ import annotations

from manta.cluster.engine.request import FinishStatus, SequenceOutput
from manta.cluster.engine.sequence import Sequence
from manta.cluster.engine.stats import DraftCounts
from manta.specdecode.acceptance import num_accepted
from manta.workers.step import ScheduledSequence, StepInput, StepOutput, TokenLogprobs


def computed_by(step: StepInput) -> list[ScheduledSequence]:
    """Returns what the step computed for each sequence, forks last.

    A fork has 0 computed tokens, because it draws from the last row of its parent's prompt.
    """
    if not step.forked:
        return step.scheduled
    ends = {point.sequence_id: point.position for point in step.sample_points}
    forks = [ScheduledSequence(fork.sequence_id, ends[fork.sequence_id], 0, []) for fork in step.forked]
    return step.scheduled + forks


def advance(
    sequence: Sequence, computed: ScheduledSequence, output: StepOutput, draft_counts: DraftCounts
) -> SequenceOutput | None:
    """Adds to the sequence what it gained. Returns the change, or None if it gained nothing.

    The scheduler counted the computed tokens when it planned the step. If the change has a `finish`, the caller must
    end the sequence.
    """
    sequence_id, drafts, proposer = sequence.sequence_id, computed.draft_token_ids, computed.draft_proposer
    if output.draft_token_ids or sequence.draft_token_ids:
        sequence.propose(output.draft_token_ids.get(sequence_id, []), output.draft_proposers.get(sequence_id, ""))
    prompt_logprobs = None
    if output.prompt_logprobs:
        prompt_logprobs = _new_prompt_logprobs(sequence, computed.start, output)
    known_end = computed.start + computed.num_tokens - len(drafts)
    if known_end < len(sequence.token_ids):  # a prefill chunk before the last
        return _change(sequence, [], prompt_logprobs=prompt_logprobs) if prompt_logprobs else None
    token_ids = output.token_ids.get(sequence_id)
    if not token_ids:  # its mask was late
        sequence.gain([], len(drafts))
        return _change(sequence, [], prompt_logprobs=prompt_logprobs) if prompt_logprobs else None
    logprobs = output.logprobs.get(sequence_id) if output.logprobs else None
    if sequence.num_branches:
        sequence.report()
        return _change(sequence, [], logprobs)
    gained, finish = sequence.gain(token_ids, len(drafts))
    if drafts:
        count = num_accepted(drafts, gained)
        draft_counts.add(proposer, len(drafts), count)
        sequence.num_accepted_drafts += count
        sequence.num_rejected_drafts += len(drafts) - count
        if sequence.params.token_origins and logprobs is not None:
            for entry in logprobs[:count]:
                entry.origin = entry.origin or proposer
    if logprobs is not None:
        logprobs = logprobs[: len(gained)]
    change = SequenceOutput(sequence.request_id, sequence.index, gained, logprobs, prompt_logprobs)
    if finish is not None or drafts or sequence.num_output_tokens == len(gained):
        change.usage = sequence.usage
    if finish is not None:
        change.finish = finish
        if finish is FinishStatus.FINISHED_STOPPED:
            change.stop_token_id = gained[-1]
    return change


def _change(
    sequence: Sequence,
    token_ids: list[int],
    logprobs: list[TokenLogprobs] | None = None,
    prompt_logprobs: list[TokenLogprobs] | None = None,
) -> SequenceOutput:
    return SequenceOutput(sequence.request_id, sequence.index, token_ids, logprobs, prompt_logprobs)


def _new_prompt_logprobs(sequence: Sequence, start: int, output: StepOutput) -> list[TokenLogprobs] | None:
    """Returns the entries for prompt positions that were not reported before a preemption, or None."""
    entries = output.prompt_logprobs.get(sequence.sequence_id)
    if not entries:
        return None
    num_reported_before = max(0, sequence.num_prompt_logprobs - start)
    new = entries[num_reported_before:]
    sequence.num_prompt_logprobs = max(sequence.num_prompt_logprobs, start + len(entries))
    return new or None
