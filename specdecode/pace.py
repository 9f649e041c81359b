"""Whether drafting pays, by the clock: compares steps with drafts and steps without, at the same load.

The number of drafts is chosen by estimates (`specdecode/lengths.py`), which leave out the driver's work for each draft,
a cache that another process uses, and pauses. Here steps with drafts and steps without are timed in turn, and drafting
rests while it is slower. Plain arithmetic: imports no torch. Called by `specdecode/proposers.py`.
"""

from __future__ import annotations

import dataclasses
import math

GAIN_DEVIATION = 0.7
"""Assumed standard deviation of the tokens that a sequence gains in a step. It is not taken from the steps of a trial:
drafts pay off in bursts, and between two bursts all steps look alike.
"""
TIME_DEVIATION = 0.2
"""Assumed standard deviation of a step's time, as a share of it."""
CERTAIN = 2.0
"""A verdict is certain if the means differ by more than this many standard errors."""
LEAST_ERROR = 0.045
"""If no verdict was certain before, the means alone decide once the standard error is below this."""
LEAST_STEPS = 8
"""Steps that a trial takes at least."""
REMEMBERED = 0.85
"""Weight of a trial's steps in the next trial, which then needs fewer steps."""
TOLERANCE = 0.01
"""Drafting goes on if it is slower by no more than this share, which timing cannot tell from equal."""
LOSS_SHARE = 0.01
"""After a failed trial, drafting rests until the time that the trial lost is this share of the rest's time."""
LONGEST_REST = 4096
"""Most steps of a rest."""
PLAIN_STEPS = 16
"""Steps without drafts that are timed before the first verdict. Their mean is over up to four times as many."""
PLAIN_EVERY = 512
"""After this many steps with drafts, `PLAIN_STEPS` without refresh the comparison, ..."""
CLEAR_GAIN = 1.2
"""... unless steps with drafts are this many times as fast."""
PAUSE = 4.0
"""A step counts in a mean as at most this many times as long as the plain steps with its gain should take."""
LONG_PAUSE = 16.0
"""The same in a trial's loss. It is larger because the time in which proposers catch up must count there."""


@dataclasses.dataclass(slots=True)
class _Comparison:
    """Steps without drafts (plain) and with drafts at one load. A rate is the tokens that a sequence gains in the time
    that a plain step is predicted to take.
    """

    plain: float = 1.0
    """Mean rate of plain steps."""
    num_plain: int = 0
    drafted: float = 0.0
    """Mean rate of the steps of the present trial."""
    num_drafted: float = 0.0
    """Steps of the trial."""
    num_gains: float = 0.0
    """Sum over the trial's steps of the number of sequences."""
    loss: float = 0.0
    """Time that the trial lost, in plain steps."""
    drafted_since_plain: int = 0
    has_rested: bool = True
    """Whether the next step with drafts is the first after plain ones."""

    def learn_plain(self, duration: float) -> None:
        self.has_rested = True
        self.num_plain += 1
        self.plain += (1 / min(duration, PAUSE) - self.plain) / min(self.num_plain, 4 * PLAIN_STEPS)

    def learn_drafted(self, gained: float, duration: float, num_sequences: int) -> None:
        self.loss += min(duration, LONG_PAUSE * gained) * self.plain - gained
        if self.has_rested:  # proposers catch up with tokens that they missed: a loss, but only in this step
            self.has_rested = False
            return
        self.num_drafted += 1
        self.num_gains += num_sequences
        self.drafted_since_plain += 1
        self.drafted += (gained / min(duration, PAUSE * gained) - self.drafted) / self.num_drafted

    def begin_trial(self) -> None:
        self.loss = 0.0
        self.num_drafted *= REMEMBERED
        self.num_gains *= REMEMBERED

    def verdict(self) -> bool | None:
        """Whether drafting pays; None while the trial goes on."""
        if self.num_drafted < LEAST_STEPS:
            return None
        bound = (1 - TOLERANCE) * self.plain
        error = math.sqrt(GAIN_DEVIATION**2 / self.num_gains + TIME_DEVIATION**2 / self.num_drafted)
        is_certain = abs(self.drafted - bound) > CERTAIN * error * self.plain
        return self.drafted > bound if is_certain or error < LEAST_ERROR else None


class Pace:
    """Keeps a comparison for each load: the number of sequences, rounded to a power of two."""

    def __init__(self) -> None:
        self._comparisons: dict[int, _Comparison] = {}

    def learn(self, num_sequences: int, num_tokens: int, predicted: float, seconds: float, drafted: bool) -> None:
        """A step yielded `num_tokens` for `num_sequences` in `seconds`, which include the search for its drafts.

        `predicted` is the time in seconds that one token for each sequence would take. `drafted` is True if drafts were
        looked for, even if there were none: looking takes time too.
        """
        comparison, duration = self._of(num_sequences), seconds / predicted
        if drafted:
            comparison.learn_drafted(num_tokens / num_sequences, duration, num_sequences)
        else:
            comparison.learn_plain(duration)

    def steps_to_rest(self, num_sequences: int) -> int:
        """How many of the next steps should have no drafts."""
        comparison = self._of(num_sequences)
        pays = comparison.verdict()
        if pays is None:
            return 0
        if comparison.num_plain < PLAIN_STEPS:
            return PLAIN_STEPS - comparison.num_plain  # after them the verdict is taken again
        is_clear = comparison.drafted > CLEAR_GAIN * comparison.plain
        rest = math.ceil(comparison.loss / LOSS_SHARE)
        comparison.begin_trial()
        if not pays:
            return min(max(rest, PLAIN_STEPS), LONGEST_REST)
        if is_clear or comparison.drafted_since_plain < PLAIN_EVERY:
            return 0
        comparison.drafted_since_plain = 0
        return PLAIN_STEPS

    def _of(self, num_sequences: int) -> _Comparison:
        load = round(math.log2(num_sequences))
        comparison = self._comparisons.get(load)
        if comparison is None:
            comparison = self._comparisons[load] = _Comparison()
        return comparison
