"""How many drafts pay for themselves: weighs each sequence's acceptance against what a step of the batch costs.

A draft is worth the chance that it and all drafts before it are accepted. It costs the time that one more token adds to
the step. In a small batch a step is bound by reading weights, so drafts are nearly free. In a full batch they are not,
and none are proposed. Plain arithmetic: imports no torch. Called by the proposers (`specdecode/proposers.py`,
`specdecode/forced.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specdecode.acceptance import AcceptanceRecord

MARGIN = 1.02
"""Drafts are proposed only if they promise this many times the tokens per second, because estimates err."""
PROBE_SHARE = 0.01
"""Share of the time that may be spent on drafts that do not promise to pay, to see whether they do."""


class StepCost:
    """Seconds of a call of one or more steps, by the tokens that a step computes: a measured table, plus the mean time
    that real calls took beyond it.
    """

    def __init__(self, table: Sequence[tuple[int, float]]) -> None:
        """`table` holds (tokens, seconds), tokens ascending. Beyond its end it is extended by its last slope."""
        self.table = tuple(table)
        self._tokens = np.array([tokens for tokens, _ in table], dtype=float)
        self._seconds = np.maximum.accumulate([seconds for _, seconds in table])
        self._beyond = 0.0
        self._known: dict[int, float] = {}
        """Cached values of the table: every step asks for the same few numbers of tokens."""

    def of(self, num_tokens: int, num_steps: int = 1) -> float:
        """Seconds of one call of `num_steps` steps that compute `num_tokens` each."""
        return num_steps * self._of_table_once(num_tokens) + self._beyond

    def _of_table_once(self, num_tokens: int) -> float:
        known = self._known.get(num_tokens)
        if known is None:
            known = self._known[num_tokens] = float(self._of_table(num_tokens))
        return known

    def seconds(self, num_tokens: np.ndarray) -> np.ndarray:
        """Seconds of a call of one step, for each number of tokens."""
        return np.asarray(self._of_table(num_tokens) + self._beyond)

    def _of_table(self, num_tokens: np.ndarray | float) -> np.ndarray:
        values = np.asarray(np.interp(num_tokens, self._tokens, self._seconds))
        if len(self._tokens) > 1:
            slope = (self._seconds[-1] - self._seconds[-2]) / (self._tokens[-1] - self._tokens[-2])
            values = values + np.maximum(0.0, np.asarray(num_tokens) - self._tokens[-1]) * slope
        return np.asarray(values)

    def learn(self, num_tokens: int, seconds: float, num_steps: int = 1) -> None:
        """Learns what a real call took: attention over the context and the driver's work come on top of the table."""
        predicted = num_steps * self._of_table_once(num_tokens)
        beyond = min(max(seconds - predicted, 0.0), predicted + 2 * self._beyond)  # an outlier is a pause
        self._beyond += 0.05 * (beyond - self._beyond)


class Costs(NamedTuple):
    """What the numbers of drafts are chosen by."""

    step: StepCost
    """Of the model's steps."""
    drafts: dict[str, StepCost]
    """By name, of the proposers that are not free. A step drafts one token for each of some sequences; a call of
    several steps drafts several tokens.
    """


@dataclasses.dataclass(slots=True)
class Load:
    """The next step as it is planned so far."""

    num_tokens: int
    """Tokens that it computes."""
    num_expected: float
    """Tokens that it is expected to yield."""

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
    """The number of drafts for each sequence, int [n], at most `limits` int [n], that yields the most tokens per
    second.

    `acceptance` is float [n]: the chance that a draft is accepted. `load` is the step without these drafts.
    `draft_cost` is what the proposer costs; None if it is free.
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
    """Steps from one try of a proposer that does not promise to pay to the next, so that tries take `PROBE_SHARE` of
    the time.
    """
    plain = cost.of(load.num_tokens)
    verified = cost.of(load.num_tokens + num_sequences)
    extra = draft_cost.of(num_sequences) + verified - plain
    return max(1, math.ceil(extra / (PROBE_SHARE * plain)))
