"""How many drafts pay for themselves: acceptance as each sequence shows it, against what a step of the batch costs.

A draft is worth the chance that it and all before it are accepted; it costs the difference that one more token makes to
the step. At few rows a step is bound by reading weights and drafts are nearly free, in a full batch they are not, and
none are proposed. Plain arithmetic: imports no torch. Called by `specdecode/proposers.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

MARGIN = 1.02
"""Drafts are proposed where they promise at least this many times the tokens a second: estimates err."""
MEMORY = 0.95
"""What a trial counts for after the next one: about twenty decide."""
FADING = 0.96
"""What trials count for after a step without drafts: a text that could not be guessed comes to an end."""
OVERALL_MEMORY = 0.995
"""The same for what is known of all sequences together."""
PRIOR_WEIGHT = 2.0
"""Trials that the other sequences' acceptance counts for in a new one's."""
PROBE_SHARE = 0.01
"""Of the time that may go into drafts that do not promise to pay, to see whether they would."""


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
    """The acceptance of one proposer's drafts, by sequence."""

    def __init__(self, prior: float) -> None:
        self._overall = Acceptance(prior, memory=OVERALL_MEMORY)
        self._sequences: dict[int, Acceptance] = {}

    def learn(self, sequence_id: int, num_accepted: int, num_drafted: int) -> None:
        own = self._sequences.get(sequence_id)
        if own is None:
            own = self._sequences[sequence_id] = Acceptance(self._overall.mean)
        own.learn(num_accepted, num_drafted)
        self._overall.learn(num_accepted, num_drafted)

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


class StepCost:
    """Seconds of a step that computes some tokens, or of several in a call: a measured table, and what real calls took
    beyond it.
    """

    def __init__(self, table: Sequence[tuple[int, float]]) -> None:
        """`table` holds (tokens, seconds), tokens ascending; beyond its end cost grows as between the last two."""
        self.table = tuple(table)
        self._tokens = np.array([tokens for tokens, _ in table], dtype=float)
        self._seconds = np.maximum.accumulate([seconds for _, seconds in table])
        self._beyond = 0.0
        self._known: dict[int, float] = {}
        """Of the table: every step asks for a few numbers of tokens."""

    def of(self, num_tokens: int, num_steps: int = 1) -> float:
        """Of one call."""
        return num_steps * self._of_table_once(num_tokens) + self._beyond

    def _of_table_once(self, num_tokens: int) -> float:
        known = self._known.get(num_tokens)
        if known is None:
            known = self._known[num_tokens] = float(self._of_table(num_tokens))
        return known

    def seconds(self, num_tokens: np.ndarray) -> np.ndarray:
        """For each number of tokens."""
        return np.asarray(self._of_table(num_tokens) + self._beyond)

    def _of_table(self, num_tokens: np.ndarray | float) -> np.ndarray:
        values = np.asarray(np.interp(num_tokens, self._tokens, self._seconds))
        if len(self._tokens) > 1:
            slope = (self._seconds[-1] - self._seconds[-2]) / (self._tokens[-1] - self._tokens[-2])
            values = values + np.maximum(0.0, np.asarray(num_tokens) - self._tokens[-1]) * slope
        return np.asarray(values)

    def learn(self, num_tokens: int, seconds: float, num_steps: int = 1) -> None:
        """A call of so many steps took this long: context and the driver's work come on top of the table."""
        predicted = num_steps * self._of_table_once(num_tokens)
        beyond = min(max(seconds - predicted, 0.0), predicted + 2 * self._beyond)  # an outlier is a pause
        self._beyond += 0.05 * (beyond - self._beyond)


class Costs(NamedTuple):
    """What the lengths are chosen by."""

    step: StepCost
    """Of the model."""
    drafts: dict[str, StepCost]
    """Of the proposers that are not free: a step is one more token for a number of sequences, a call a proposal."""


@dataclasses.dataclass(slots=True)
class Load:
    """The next step as it is planned so far."""

    num_tokens: int
    """That it computes."""
    num_expected: float
    """That it yields."""

    def add(self, proposals: dict[int, list[int]], record: AcceptanceRecord) -> None:
        lengths = np.array([len(proposed) for proposed in proposals.values()])
        if len(lengths):
            means = record.means(proposals)
            steps = np.arange(1, lengths.max() + 1)
            self.num_tokens += int(lengths.sum())
            self.num_expected += float(((means[:, None] ** steps) * (steps <= lengths[:, None])).sum())


def choose_lengths(
    acceptance: np.ndarray, limits: np.ndarray, load: Load, cost: StepCost, draft_cost: StepCost | None = None
) -> np.ndarray:
    """Drafts for each sequence, int [n], at most `limits` int [n]: those with the most tokens a second.

    `acceptance` is float [n], `load` the step without these drafts. `draft_cost` is what the proposer takes, None where
    proposals cost nothing.
    """
    steps = np.arange(1, limits.max() + 1)
    gains = np.where(steps <= limits[:, None], acceptance[:, None] ** steps, 0.0)
    best = np.zeros(len(limits), dtype=int)
    best_rate = MARGIN * load.num_expected / cost.of(load.num_tokens)
    for limit in steps[-1:] if draft_cost is None else steps.tolist():
        drafting = 0.0 if draft_cost is None else draft_cost.of(len(limits), limit)
        candidates = np.sort(gains[:, :limit], axis=None)[::-1]
        candidates = candidates[candidates > 0]
        totals = load.num_expected + np.cumsum(candidates)
        seconds = cost.seconds(load.num_tokens + np.arange(1, len(candidates) + 1)) + drafting
        rates = totals / seconds
        count = int(rates.argmax()) if len(rates) else -1
        if count >= 0 and rates[count] > best_rate:
            best_rate = float(rates[count])
            best = (gains[:, :limit] >= candidates[count]).sum(axis=1)
    return best


def probe_interval(num_sequences: int, load: Load, cost: StepCost, draft_cost: StepCost) -> int:
    """Steps between two tries of a proposer that does not promise to pay, such that they take `PROBE_SHARE`."""
    plain = cost.of(load.num_tokens)
    verified = cost.of(load.num_tokens + num_sequences)
    extra = draft_cost.of(num_sequences) + verified - plain
    return max(1, math.ceil(extra / (PROBE_SHARE * plain)))
