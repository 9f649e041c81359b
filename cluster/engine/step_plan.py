"""The plan of a step, and the token budget of steps.

The scheduler is the only caller of `StepPlan`. The scheduler opens a plan when it closes the previous one, so that the
next step tells the ranks about every sequence that ends in between. The engine owns the `StepBudget`, because it learns
how steps end.
"""

from __future__ import annotations

from manta.cluster.engine.sequence import Sequence
from manta.workers.step import SamplePoint, SequenceFork, StepInput

FIRST_PATIENCE, MOST_PATIENCE = 16, 4096
"""Successful full steps before the budget doubles: 16 after the first failure, at most 4096. Each failure doubles the
number, because a device that lacks the memory permanently fails again, and each failure recomputes all sequences.
"""


LEAST_CHUNK = 64
"""Tokens from which a sequence's share of a step is a chunk of a prompt. No chunk is cut below this for its context."""
LEAST_EVEN_CONTEXT = 4096
"""Shortest context for which a chunk is cut. Small models spend most of a step on attention sooner, but their steps are
short.
"""


class StepBudget:
    """The token budget of the next steps: `num_tokens`, which is `most_tokens` or, after a step that ran out of memory,
    less.
    """

    def __init__(self, most_tokens: int) -> None:
        self.num_tokens = most_tokens
        self._most_tokens = most_tokens
        self._patience = FIRST_PATIENCE // 2
        self._num_full_steps = 0
        """Steps that used the whole current budget and succeeded."""

    def shrink(self, num_tokens: int) -> None:
        """Halves the budget after a step of `num_tokens` (at least 2) ran out of memory."""
        self.num_tokens = num_tokens // 2
        self._patience = min(2 * self._patience, MOST_PATIENCE)
        self._num_full_steps = 0

    def count(self, step: StepInput) -> None:
        """Counts a step that succeeded, and doubles the budget after enough of them. A step below the budget proves
        nothing.
        """
        if self.num_tokens == self._most_tokens or step.num_tokens < self.num_tokens:
            return
        self._num_full_steps += 1
        if self._num_full_steps >= self._patience:
            self.num_tokens = min(2 * self.num_tokens, self._most_tokens)
            self._num_full_steps = 0


class StepPlan:
    """The next step while the scheduler fills it. `budget` is the number of tokens that may still be scheduled.
    `even_context` is `ModelInfo.even_context`.
    """

    def __init__(self, step_id: int, budget: int, even_context: int | None = None) -> None:
        self.step = StepInput(step_id)
        self.budget = budget
        self._even_context = None if even_context is None else max(even_context, LEAST_EVEN_CONTEXT)
        self.completed_prompts: list[tuple[Sequence, int]] = []
        """(parent, row): a sequence with unforked choices whose prompt the step completes, and the row of its last
        prompt token.
        """
        self._num_rows = 0
        """Flat token rows scheduled so far."""
        self._copies: list[tuple[Sequence, int, int]] = []
        """(sequence, source, destination): the copy of a partly filled block that a sequence shares with another one.
        """
        self._branches: list[Sequence] = []
        """Sequences that the ranks do not know yet, although their parents have computed their tokens."""

    def finish(self, sequence: Sequence) -> None:
        """Makes the ranks forget the sequence with this step. The driver ignores what earlier steps return for it."""
        sequence.first_step = self.step.step_id
        self.step.finished.append(sequence.sequence_id)

    def overtake(self, sequence: Sequence) -> None:
        """Makes the driver ignore what the steps under way return for the sequence."""
        sequence.first_step = self.step.step_id
        sequence.drop_pending()

    def copy(self, sequence: Sequence, copies: list[tuple[int, int]]) -> None:
        """Requests block copies before the step; `close` drops those whose sequence has given up its blocks."""
        self._copies += [(sequence, source, destination) for source, destination in copies]

    def branch(self, sequence: Sequence) -> None:
        """Makes the ranks start the sequence with this step, unless it gives up its blocks before `start_branches`."""
        self._branches.append(sequence)

    def start_branches(self) -> None:
        """Starts the branches that still hold blocks. Called after running sequences are scheduled, when no other is
        preempted.
        """
        self.step.started += [branch.start() for branch in self._branches if branch.block_tables]

    def start(self, sequence: Sequence) -> None:
        """Makes the ranks start the sequence, or rebuild it after a preemption."""
        self.step.started.append(sequence.start())

    def chunk(self, sequence: Sequence, wanted: int, num_behind: int = 0, is_alone: bool = False) -> int:
        """Returns how many of the `wanted` tokens of a sequence the step should compute. `num_behind` running sequences
        come after it, and a chunk of at least `LEAST_CHUNK` tokens leaves each a token of the budget.

        Unless the sequence `is_alone`, a token of a chunk that begins beyond `even_context` costs as many tokens of the
        budget as its context is longer, and the chunk takes the rest of the budget. Otherwise a step over 128k tokens
        would take many times as long as one over 2k, and everyone else would wait for it.
        """
        if wanted < LEAST_CHUNK:
            return min(wanted, self.budget)
        wanted = max(1, min(wanted, self.budget - num_behind))
        start, even = sequence.num_computed_tokens, self._even_context
        if is_alone or even is None or start <= even:
            return wanted
        count = min(wanted, max(LEAST_CHUNK, self.budget * even // start))
        self.budget = min(self.budget, count + num_behind)
        return count

    def schedule(self, sequence: Sequence, count: int) -> None:
        """Puts the next `count` tokens of a sequence into the step; its block table must have room for them. The
        sequence draws a token after its last known one and after each draft.
        """
        item, draws = sequence.schedule(count)
        self.step.scheduled.append(item)
        self._num_rows += count
        self.budget -= count
        if draws:
            points, last_row, end = self.step.sample_points, self._num_rows - 1, item.start + count
            for num_after in range(len(item.draft_token_ids), 0, -1):
                points.append(SamplePoint(last_row - num_after, item.sequence_id, end - num_after))
            points.append(SamplePoint(last_row, item.sequence_id, end))
            if sequence.unforked:
                self.completed_prompts.append((sequence, last_row - len(item.draft_token_ids)))

    def fork(self, parent: Sequence, fork: Sequence, row: int) -> None:
        """Makes the fork draw its first token from the logits of its parent's last prompt token."""
        fork.await_first_token()
        self.step.forked.append(SequenceFork(parent.sequence_id, fork.sequence_id, fork.noise_seed))
        self.step.sample_points.append(SamplePoint(row, fork.sequence_id, fork.num_prompt_tokens))

    def close(self) -> None:
        """Finishes the block copies. Called when all sequences are scheduled; only forks may be added after it."""
        self.step.block_copies = [
            (src, dst) for sequence, src, dst in self._copies if any(dst in table for table in sequence.block_tables)
        ]
