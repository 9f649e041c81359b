"""The number of drafts that pays off: weighs each sequence's acceptance against the cost of a step.

A draft gains the probability that it and all drafts before it are accepted. The draft costs the time that one more
token adds to the step. A small batch is bound by reading weights, so drafts are nearly free. A full batch is bound by
computation, so none are proposed. Plain arithmetic without torch. Called by `specdecode/proposers.py` and
`specdecode/forced.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from manta.specdecode.acceptance import AcceptanceRecord

MARGIN = 1.02
"""Expected speed-up in tokens per second from which drafts are proposed; above 1 because estimates err."""


class StepCost:
    """The time of a call in seconds, by the number of tokens that each of its steps computes. The time is that of a
    measured table plus the mean time that real calls take in addition.
    """

    def __init__(self, table: Sequence[tuple[int, float]]) -> None:
        """Takes a table of (tokens, seconds) with ascending tokens. Its last slope extends it."""
        self.table = tuple(table)
        self._tokens = np.array([tokens for tokens, _ in table], dtype=float)
        self._seconds = np.maximum.accumulate([seconds for _, seconds in table])
        self._beyond = 0.0
        self._known: dict[int, float] = {}
        """Cached values of the table: every step asks for the same few numbers of tokens."""

    def of(self, num_tokens: int, num_steps: int = 1) -> float:
        """Returns the seconds of one call of `num_steps` steps with `num_tokens` each."""
        return num_steps * self.of_table(num_tokens) + self._beyond

    def of_table(self, num_tokens: int) -> float:
        """Returns the seconds of one step in the table, which stay the same."""
        known = self._known.get(num_tokens)
        if known is None:
            known = self._known[num_tokens] = float(self._of_table(num_tokens))
        return known

    def seconds(self, num_tokens: np.ndarray) -> np.ndarray:
        """Returns the seconds of a call of one step for each number of tokens, float [n]."""
        return np.asarray(self._of_table(num_tokens) + self._beyond)

    def _of_table(self, num_tokens: np.ndarray | float) -> np.ndarray:
        values = np.asarray(np.interp(num_tokens, self._tokens, self._seconds))
        if len(self._tokens) > 1:
            slope = (self._seconds[-1] - self._seconds[-2]) / (self._tokens[-1] - self._tokens[-2])
            values = values + np.maximum(0.0, np.asarray(num_tokens) - self._tokens[-1]) * slope
        return np.asarray(values)

    def learn(self, num_tokens: int, seconds: float, num_steps: int = 1) -> None:
        """Adjusts to the time of a real call. Attention over the context and the driver's work add to the table."""
        predicted = num_steps * self.of_table(num_tokens)
        beyond = min(max(seconds - predicted, 0.0), predicted + 2 * self._beyond)  # an outlier is a pause
        self._beyond += 0.05 * (beyond - self._beyond)


class Costs(NamedTuple):
    """The costs that decide the number of drafts."""

    step: StepCost
    """The cost of the target model's steps."""
    drafts: dict[str, StepCost]
    """The cost of each proposer that is not free, by name. One of its steps drafts one token for each sequence, and a
    call of several steps drafts as many tokens.
    """


@dataclasses.dataclass(slots=True)
class Load:
    """The next step as planned so far."""

    num_tokens: int
    """Tokens that the step computes."""
    num_expected: float
    """Tokens that the step is expected to yield."""

    def add(self, proposals: dict[int, list[int]], record: AcceptanceRecord) -> None:
        lengths = np.array([len(proposed) for proposed in proposals.values()])
        if len(lengths):
            means = record.means(proposals)
            steps = np.arange(1, lengths.max() + 1)
            self.num_tokens += int(lengths.sum())
            chances = means[:, None] ** steps  # that drafts are accepted, float [num_sequences, longest]
            is_proposed = steps <= lengths[:, None]
            self.num_expected += float(np.where(is_proposed, chances, 0.0).sum())


def choose_lengths(
    acceptance: np.ndarray, limits: np.ndarray, load: Load, cost: StepCost, draft_cost: StepCost | None = None
) -> np.ndarray:
    """Returns the number of drafts for each sequence, int [n], at most `limits` int [n], with the most tokens per
    second.

    `acceptance` float [n] is the probability that a draft is accepted. `load` is the step without these drafts.
    `draft_cost` is the proposer's cost, or None if it is free.
    """
    steps = np.arange(1, limits.max() + 1)
    gains = np.where(steps <= limits[:, None], acceptance[:, None] ** steps, 0.0)
    best = np.zeros(len(limits), dtype=int)
    best_rate = MARGIN * load.num_expected / cost.of(load.num_tokens)
    call_lengths = steps.tolist()
    if draft_cost is None:
        call_lengths = call_lengths[-1:]  # a longer call costs nothing
    for call_length in call_lengths:
        drafting = 0.0 if draft_cost is None else draft_cost.of(len(limits), call_length)
        within_call = gains[:, :call_length]
        candidates = np.sort(within_call[within_call > 0])[::-1]
        if not len(candidates):
            continue
        totals = load.num_expected + np.cumsum(candidates)
        seconds = cost.seconds(load.num_tokens + np.arange(1, len(candidates) + 1)) + drafting
        rates = totals / seconds
        last = int(rates.argmax())
        if rates[last] > best_rate:
            best_rate = float(rates[last])
            best = (within_call >= candidates[last]).sum(axis=1)
    return best
