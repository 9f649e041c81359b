"""A step while it is planned, and how many tokens it may have. A plan is opened when the one before it is closed, so
that the ranks hear with it of all sequences that end in between; the scheduler fills it and is its only caller. The
budget is the engine's, which hears how steps end.
"""

from __future__ import annotations

from cluster.engine.sequence import Sequence
from workers.step import SamplePoint, SequenceFork, StepInput

FIRST_PATIENCE, MOST_PATIENCE = 16, 4096
"""Full steps that must go well before one may have twice as many tokens: after the first failure, and at most. Each
failure doubles their number: what a device lacks always it will lack again, and all sequences are then recomputed.
"""


class StepBudget:
    """`num_tokens` may be in a step: as many as are configured, or for a while fewer, after one found too little memory
    on the device.
    """

    def __init__(self, most_tokens: int) -> None:
        self.num_tokens = most_tokens
        self._most_tokens = most_tokens
        self._patience = FIRST_PATIENCE // 2
        self._num_full_steps = 0
        """That went well with this budget."""

    def shrink(self, num_tokens: int) -> None:
        """A step of so many tokens, more than 1, had too little memory: the next ones have at most half as many."""
        self.num_tokens = num_tokens // 2
        self._patience = min(2 * self._patience, MOST_PATIENCE)
        self._num_full_steps = 0

    def count(self, step: StepInput) -> None:
        """A step went well. One that leaves some of the budget says nothing of larger ones."""
        if self.num_tokens == self._most_tokens or step.num_tokens < self.num_tokens:
            return
        self._num_full_steps += 1
        if self._num_full_steps >= self._patience:
            self.num_tokens = min(2 * self.num_tokens, self._most_tokens)
            self._num_full_steps = 0


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
        """Sequences that share a block of another one that is not full, and the copy (source, destination) they
        need.
        """
        self._branches: list[Sequence] = []
        """Sequences that the ranks do not know yet, although their tokens are computed."""

    def finish(self, sequence: Sequence) -> None:
        """Has the ranks forget the sequence. Nothing counts that they answer to earlier steps."""
        sequence.first_step = self.step.step_id
        self.step.finished.append(sequence.sequence_id)

    def copy(self, sequence: Sequence, copies: list[tuple[int, int]]) -> None:
        """Has blocks copied before the step, unless the sequence has given them up by then."""
        self._copies += [(sequence, source, destination) for source, destination in copies]

    def branch(self, sequence: Sequence) -> None:
        """Has the ranks start the sequence, unless it has given up its blocks by then."""
        self._branches.append(sequence)

    def start_branches(self) -> None:
        """Called once running sequences are scheduled: by then it is known which branches were preempted."""
        self.step.started += [branch.start() for branch in self._branches if branch.block_table]

    def start(self, sequence: Sequence) -> None:
        """Has the ranks start the sequence, or rebuild it."""
        self.step.started.append(sequence.start())

    def schedule(self, sequence: Sequence, count: int) -> None:
        """Puts the next `count` tokens of a sequence into the step; its blocks have room for them. It draws after the
        last known one and after each draft.
        """
        known = len(sequence.token_ids) + sequence.num_pending_tokens
        item = sequence.schedule(count)
        self.step.scheduled.append(item)
        end = item.start + count
        if end >= known:
            first_row = self._num_rows - item.start
            for position in range(known, end + 1):
                self.step.sample_points.append(SamplePoint(first_row + position - 1, item.sequence_id, position))
            if sequence.unforked:
                self.completed_prompts.append((sequence, first_row + known - 1))
        self._num_rows += count
        self.budget -= count

    def fork(self, parent: Sequence, fork: Sequence, row: int) -> None:
        """Has the fork draw its first token from the logits of its parent's last prompt token."""
        fork.await_first_token()
        self.step.forked.append(SequenceFork(parent.sequence_id, fork.sequence_id, fork.noise_seed))
        self.step.sample_points.append(SamplePoint(row, fork.sequence_id, fork.num_prompt_tokens))

    def close(self) -> None:
        """Called when all sequences of the step are scheduled; only forks follow."""
        self.step.block_copies = [(src, dst) for sequence, src, dst in self._copies if dst in sequence.block_table]
