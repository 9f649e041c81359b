"""The acceptance rate of drafts, counted and remembered for each sequence and for each proposer.

Plain arithmetic without torch. The proposers call it, and the driver when it counts drafts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

MEMORY = 0.95
"""Factor on the weight of past trials with each new trial: about the last twenty trials count."""
FADING = 0.96
"""Factor on the weight of past trials with each step without drafts, because text that is hard to predict does not
last.
"""
OVERALL_MEMORY = 0.995
"""The same factor as `MEMORY`, for all sequences together."""
PRIOR_WEIGHT = 2.0
"""Weight of the prior, in trials."""


def num_accepted(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    """Returns the number of leading drafts that the model drew itself. `drawn` are the tokens at the drafts' positions;
    their number may differ from that of the drafts.
    """
    count = 0
    for draft, token_id in zip(drafts, drawn, strict=False):
        if draft != token_id:
            break
        count += 1
    return count


@dataclasses.dataclass(slots=True)
class Acceptance:
    """The probability that a draft is accepted given that all drafts before it are. Recent trials count most."""

    prior: float
    successes: float = 0.0
    trials: float = 0.0
    memory: float = MEMORY

    @property
    def mean(self) -> float:
        return (self.successes + PRIOR_WEIGHT * self.prior) / (self.trials + PRIOR_WEIGHT)

    def learn(self, num_accepted: int, num_drafted: int) -> None:
        """Counts a row of `num_drafted` drafts, the first `num_accepted` of which were accepted. Drafts after a
        rejected one are not trials.
        """
        num_trials = min(num_accepted + 1, num_drafted)
        forgotten = self.memory**num_trials
        self.successes = self.successes * forgotten + num_accepted
        self.trials = self.trials * forgotten + num_trials

    def fade(self) -> None:
        self.successes *= FADING
        self.trials *= FADING


class AcceptanceRecord:
    """The acceptance of one proposer's drafts, by sequence.

    The prior of a new sequence is the mean over all sequences so far. If `is_alike` is False, one sequence says nothing
    about another, and the prior is always `prior`.
    """

    def __init__(self, prior: float, is_alike: bool = True) -> None:
        self._overall = Acceptance(prior, memory=OVERALL_MEMORY)
        self._is_alike = is_alike
        self._sequences: dict[int, Acceptance] = {}

    def learn(self, sequence_id: int, drafts: Sequence[int], drawn: Sequence[int]) -> None:
        """Counts the drafts of a step. `drawn` are the tokens at their positions; drafts after the last of these were
        not verified.
        """
        num_judged = min(len(drafts), len(drawn))
        if not num_judged:
            return
        count = num_accepted(drafts, drawn)
        own = self._sequences.get(sequence_id)
        if own is None:
            own = self._sequences[sequence_id] = Acceptance(self._overall.mean)
        own.learn(count, num_judged)
        if self._is_alike:
            self._overall.learn(count, num_judged)

    def fade(self, sequence_ids: Iterable[int]) -> None:
        """Reduces the weight of past trials of sequences that had no drafts in a step."""
        for sequence_id in sequence_ids:
            own = self._sequences.get(sequence_id)
            if own is not None:
                own.fade()

    def means(self, sequence_ids: Iterable[int]) -> np.ndarray:
        """Returns the mean of each sequence, float64 [n]. A sequence without trials has the mean of all sequences."""
        overall = self._overall.mean
        records = (self._sequences.get(sequence_id) for sequence_id in sequence_ids)
        return np.array([overall if record is None else record.mean for record in records])

    @property
    def overall_mean(self) -> float:
        """The mean of all sequences."""
        return self._overall.mean

    def forget(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._sequences.pop(sequence_id, None)

    def clear(self) -> None:
        """Forgets every sequence; the mean over all of them stays."""
        self._sequences.clear()
