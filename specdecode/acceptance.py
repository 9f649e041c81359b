"""How many drafts are accepted, counted and remembered: for each sequence, and for all sequences of a proposer.

Plain arithmetic: imports no torch. Called by the proposers, and by the driver where it counts drafts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

MEMORY = 0.95
"""What a trial counts for after the next one: about twenty decide."""
FADING = 0.96
"""What trials count for after a step without drafts: a text that could not be guessed comes to an end."""
OVERALL_MEMORY = 0.995
"""The same for what is known of all sequences together."""
PRIOR_WEIGHT = 2.0
"""Trials that the other sequences' acceptance counts for in a new one's."""


def num_accepted(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    """How many drafts come before the first that the model did not draw; `drawn` stands in their place, and may be
    longer or shorter.
    """
    count = 0
    for draft, token_id in zip(drafts, drawn, strict=False):
        if draft != token_id:
            break
        count += 1
    return count


@dataclasses.dataclass(slots=True)
class Acceptance:
    """The chance that a draft is accepted, those before it being so; late trials count most."""

    prior: float
    successes: float = 0.0
    trials: float = 0.0
    memory: float = MEMORY

    @property
    def mean(self) -> float:
        return (self.successes + PRIOR_WEIGHT * self.prior) / (self.trials + PRIOR_WEIGHT)

    def learn(self, num_accepted: int, num_drafted: int) -> None:
        """Of `num_drafted` drafts in a row the first `num_accepted` were accepted; those behind a refused one say
        nothing.
        """
        num_trials = min(num_accepted + 1, num_drafted)
        forgotten = self.memory**num_trials
        self.successes = self.successes * forgotten + num_accepted
        self.trials = self.trials * forgotten + num_trials

    def fade(self) -> None:
        self.successes *= FADING
        self.trials *= FADING


class AcceptanceRecord:
    """The acceptance of one proposer's drafts, by sequence. What all showed together is what is thought of a new one,
    or always the `prior` where `is_alike` is False: one sequence says nothing of another.
    """

    def __init__(self, prior: float, is_alike: bool = True) -> None:
        self._overall = Acceptance(prior, memory=OVERALL_MEMORY)
        self._is_alike = is_alike
        self._sequences: dict[int, Acceptance] = {}

    def learn(self, sequence_id: int, drafts: Sequence[int], drawn: Sequence[int]) -> None:
        """From the tokens drawn where the drafts stood; drafts after the last of these were not judged."""
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
        """These had no drafts to learn from in a step."""
        for sequence_id in sequence_ids:
            own = self._sequences.get(sequence_id)
            if own is not None:
                own.fade()

    def means(self, sequence_ids: Iterable[int]) -> np.ndarray:
        """float [n]; a sequence without drafts so far is thought to be like the others."""
        overall = self._overall.mean
        records = (self._sequences.get(sequence_id) for sequence_id in sequence_ids)
        return np.array([overall if record is None else record.mean for record in records])

    def forget(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._sequences.pop(sequence_id, None)

    def clear(self) -> None:
        """Forgets every sequence; what they showed together stays."""
        self._sequences.clear()
