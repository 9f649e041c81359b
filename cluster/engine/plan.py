"""A step while it is planned. It opens when the step before it closes, so that whatever ends in between is told to the
ranks with it. The scheduler fills it and is its only caller.
"""

from __future__ import annotations

from cluster.engine.sequence import Sequence
from workers.step import SamplePoint, ScheduledSequence, SequenceFork, StepInput


class StepPlan:
    """`budget` tokens may still be scheduled."""

    def __init__(self, step_id: int, budget: int) -> None:
        self.step = StepInput(step_id)
        self.budget = budget
        self.completed_prompts: list[tuple[Sequence, int]] = []
        """Parents of forks whose prompt the step completes, and the row of their last token."""
        self._num_rows = 0
        """Flat token rows so far."""
        self._copies: list[tuple[Sequence, int, int]] = []
        """Sequences that share an unfull block of another one, and the copy (source, destination) that they need."""
        self._branches: list[Sequence] = []
        """Sequences that the ranks have not heard of, though what they hold is computed."""

    def finish(self, sequence: Sequence) -> None:
        """The ranks forget the sequence."""
        self.step.finished.append(sequence.sequence_id)

    def copy(self, sequence: Sequence, copies: list[tuple[int, int]]) -> None:
        """Blocks to be copied before the step, unless the sequence has left them by then."""
        self._copies += [(sequence, source, destination) for source, destination in copies]

    def branch(self, sequence: Sequence) -> None:
        """The ranks meet the sequence, unless it has left its blocks by then."""
        self._branches.append(sequence)

    def start_branches(self) -> None:
        """Once running sequences are scheduled, and with them whoever had to leave."""
        self.step.started += [branch.start() for branch in self._branches if branch.block_table]

    def start(self, sequence: Sequence) -> None:
        """The ranks meet the sequence, or meet it again."""
        self.step.started.append(sequence.start())

    def schedule(self, sequence: Sequence, count: int) -> None:
        """Puts the next `count` tokens of a sequence into the step; its blocks have room for them."""
        start, known = sequence.num_computed_tokens, len(sequence.token_ids)
        end = start + count
        unsent = sequence.block_table[sequence.num_sent_blocks :]
        sequence.num_sent_blocks += len(unsent)
        drafts = sequence.draft_token_ids[: max(0, end - known)] if sequence.draft_token_ids else []
        self.step.scheduled.append(
            ScheduledSequence(sequence.sequence_id, start, count, unsent, drafts, sequence.draft_proposer)
        )
        if end >= known:
            first_row = self._num_rows - start
            for position in range(known, end + 1):
                self.step.sample_points.append(SamplePoint(first_row + position - 1, sequence.sequence_id, position))
            if sequence.unforked:
                self.completed_prompts.append((sequence, first_row + known - 1))
        self._num_rows += count
        self.budget -= count

    def fork(self, parent: Sequence, fork: Sequence, row: int) -> None:
        """The fork draws its first token from the logits of its parent's last one."""
        self.step.forked.append(SequenceFork(parent.sequence_id, fork.sequence_id, fork.noise_seed))
        self.step.sample_points.append(SamplePoint(row, fork.sequence_id, fork.num_prompt_tokens))

    def close(self) -> None:
        """Everybody who is in the step is; forks alone follow."""
        self.step.block_copies = [(src, dst) for sequence, src, dst in self._copies if dst in sequence.block_table]
