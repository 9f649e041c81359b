"""How many drafts are accepted: counted and remembered for each sequence, and for all sequences of a proposer.

Plain arithmetic: imports no torch. Called by the proposers, and by the driver when it counts drafts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

MEMORY = 0.95
"""Factor on the weight of past trials with each new one: about the last twenty decide."""
FADING = 0.96
"""Factor on the weight of past trials with each step without drafts, because text that is hard to guess does not go on
for ever.
"""
OVERALL_MEMORY = 0.995
"""As `MEMORY`, for all sequences together."""
PRIOR_WEIGHT = 2.0
"""The prior counts as much as this many trials."""


def num_accepted(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    """How many drafts come before the first one that the model did not draw. `drawn` are the tokens drawn in the
    drafts' places; there may be more or fewer of them than drafts.
    """
    count = 0
    for draft, token_id in zip(drafts, drawn, strict=False):
        if draft != token_id:
            break
        count += 1
    return count


@dataclasses.dataclass(slots=True)
class Acceptance:
    """The chance that a draft is accepted if all drafts before it are. The latest trials count most."""

    prior: float
    successes: float = 0.0
    trials: float = 0.0
    memory: float = MEMORY

    @property
    def mean(self) -> float:
        return (self.successes + PRIOR_WEIGHT * self.prior) / (self.trials + PRIOR_WEIGHT)

    def learn(self, num_accepted: int, num_drafted: int) -> None:
        """Of `num_drafted` drafts in a row the first `num_accepted` were accepted. Drafts after a refused one are not
        trials.
        """
        num_trials = min(num_accepted + 1, num_drafted)
        forgotten = self.memory**num_trials
        self.successes = self.successes * forgotten + num_accepted
        self.trials = self.trials * forgotten + num_trials

    def fade(self) -> None:
        self.successes *= FADING
        self.trials *= FADING


class AcceptanceRecord:
    """The acceptance of one proposer's drafts, by sequence. The prior of a new sequence is the mean of all sequences so
    far; it is always `prior` if `is_alike` is False, because then one sequence says nothing about another.
    """

    def __init__(self, prior: float, is_alike: bool = True) -> None:
        self._overall = Acceptance(prior, memory=OVERALL_MEMORY)
        self._is_alike = is_alike
        self._sequences: dict[int, Acceptance] = {}

    def learn(self, sequence_id: int, drafts: Sequence[int], drawn: Sequence[int]) -> None:
        """Learns from the tokens drawn in the drafts' places; if there are fewer than drafts, the last drafts were not
        judged.
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
        """Called for sequences that had no drafts in a step."""
        for sequence_id in sequence_ids:
            own = self._sequences.get(sequence_id)
            if own is not None:
                own.fade()

    def means(self, sequence_ids: Iterable[int]) -> np.ndarray:
        """float [n]: the mean of each sequence; that of all together for a sequence without drafts so far."""
        overall = self._overall.mean
        records = (self._sequences.get(sequence_id) for sequence_id in sequence_ids)
        return np.array([overall if record is None else record.mean for record in records])

    def forget(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._sequences.pop(sequence_id, None)

    def clear(self) -> None:
        """Forgets every sequence; the mean of all together stays."""
        self._sequences.clear()
