"""Whether drafting pays, by the clock: what steps with drafts yielded, against steps without in the same load.

Lengths are chosen by estimates (`specdecode/lengths.py`), and estimates leave out what they do not know: the driver's
work for each draft, a cache that another process uses, a pause. Here both ways of stepping are timed in turn, and the
slower one rests. Plain arithmetic: imports no torch. Called by `specdecode/proposers.py`.
"""

from __future__ import annotations

import dataclasses
import math

GAIN_DEVIATION = 0.7
"""Tokens by which a sequence's gain of a step strays. What a few steps show would mislead: what drafts yield comes in
bursts, and between two of them all steps are alike.
"""
TIME_DEVIATION = 0.2
"""The share by which a step's time strays."""
CERTAIN = 2.0
"""Standard errors."""
LEAST_ERROR = 0.045
"""With which the mean alone decides, where no verdict was certain before."""
LEAST_STEPS = 8
REMEMBERED = 0.85
"""What a trial's steps count for in the next one, which then needs fewer."""
TOLERANCE = 0.01
"""Drafting goes on where it is slower by no more than this: it is within what timing can tell."""
LOSS_SHARE = 0.01
"""A trial that failed is followed by so many steps without drafts that what it lost is this share of their time."""
LONGEST_REST = 4096
PLAIN_STEPS = 16
"""Timed before the first verdict; the mean is over a few times as many."""
PLAIN_EVERY = 512
"""Steps with drafts after which a few without refresh what they are compared with ..."""
CLEAR_GAIN = 1.2
"""... unless they are so many times as fast."""
PAUSE = 4.0
"""Times what so many plain steps were thought to take: no more of a step counts in a mean ..."""
LONG_PAUSE = 16.0
"""... and none in a loss, where catching up counts."""


@dataclasses.dataclass(slots=True)
class _Comparison:
    """Both ways of stepping at one load, in tokens of a sequence while a step without drafts is thought to take."""

    plain: float = 1.0
    num_plain: int = 0
    drafted: float = 0.0
    """The mean of the trial under way."""
    num_drafted: float = 0.0
    """Steps of the trial."""
    num_gains: float = 0.0
    """Of its sequences, step by step."""
    loss: float = 0.0
    """Of the trial, in steps without drafts."""
    drafted_since_plain: int = 0
    has_rested: bool = True
    """Before the next step with drafts."""

    def learn_plain(self, duration: float) -> None:
        self.has_rested = True
        self.num_plain += 1
        self.plain += (1 / min(duration, PAUSE) - self.plain) / min(self.num_plain, 4 * PLAIN_STEPS)

    def learn_drafted(self, gained: float, duration: float, num_sequences: int) -> None:
        self.loss += min(duration, LONG_PAUSE * gained) * self.plain - gained
        if self.has_rested:  # proposers catch up with what they have not seen: a loss, but none that goes on
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
    """Remembers by load, in powers of two of the number of sequences."""

    def __init__(self) -> None:
        self._comparisons: dict[int, _Comparison] = {}

    def learn(self, num_sequences: int, num_tokens: int, predicted: float, seconds: float, drafted: bool) -> None:
        """A step yielded `num_tokens` for `num_sequences` in `seconds`, with the search for its drafts.

        `predicted` is what it would take to compute one token for each. `drafted` where drafts were looked for, whether
        or not there were any: looking takes time too.
        """
        comparison, duration = self._of(num_sequences), seconds / predicted
        if drafted:
            comparison.learn_drafted(num_tokens / num_sequences, duration, num_sequences)
        else:
            comparison.learn_plain(duration)

    def steps_to_rest(self, num_sequences: int) -> int:
        """How many steps from here should have no drafts."""
        comparison = self._of(num_sequences)
        pays = comparison.verdict()
        if pays is None:
            return 0
        if comparison.num_plain < PLAIN_STEPS:
            return PLAIN_STEPS - comparison.num_plain  # and then the verdict again
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
