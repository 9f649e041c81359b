"""Measures whether drafting pays off: compares the times of steps with and without drafts at the same load.

The estimates of `specdecode/lengths.py` choose the number of drafts. They leave out the driver's work for each draft,
caches shared with other processes, and pauses. This module times steps with and without drafts in turns, and drafting
rests while it is slower. Plain arithmetic without torch. Called by `specdecode/proposers.py`.
"""

from __future__ import annotations

import dataclasses
import math

GAIN_DEVIATION = 0.7
"""Assumed standard deviation of the tokens that a sequence with drafts gains in a step. A trial's own steps would
mislead: drafts are accepted in bursts, and between bursts all steps look alike. A sequence without drafts gains one.
"""
TIME_DEVIATION = 0.2
"""Assumed standard deviation of a step's time, relative to it."""
CERTAIN = 2.0
"""Standard errors by which two means must differ for a certain verdict."""
LEAST_ERROR = 0.045
"""Relative standard error below which the means decide even without certainty."""
LEAST_STEPS = 8
"""Fewest steps of a trial."""
REMEMBERED = 0.85
"""Weight of a trial's steps in the next trial, which then needs fewer steps of its own."""
TOLERANCE = 0.01
"""Relative slowdown at which drafting goes on, because timing cannot tell it from equal speed."""
LOSS_SHARE = 0.01
"""Share of the time that failed trials may cost: drafting rests until the trial's loss is this share of the rest."""
LONGEST_REST = 4096
"""Longest rest in steps."""
PLAIN_STEPS = 16
"""Steps without drafts before the first verdict. Their mean covers up to four times as many."""
PLAIN_EVERY = 512
"""Steps with drafts after which `PLAIN_STEPS` steps without drafts refresh the comparison, unless the gain is clear."""
CLEAR_GAIN = 1.2
"""Speed-up by drafts above which the comparison is not refreshed."""
PAUSE = 4.0
"""Cap on a step's time in a mean, as a multiple of the time that plain steps with the same gain should take."""
LONG_PAUSE = 16.0
"""Cap on a step's time in a trial's loss, as above. This cap is larger than `PAUSE`, because the time in which
proposers catch up counts there.
"""


@dataclasses.dataclass(slots=True)
class _Comparison:
    """The comparison of steps with drafts and without ("plain") at one load. Rates are tokens that a sequence gains in
    the predicted time of a plain step.
    """

    plain: float = 1.0
    """Mean rate of plain steps."""
    num_plain: int = 0
    drafted: float = 0.0
    """Mean rate of the current trial."""
    num_drafted: float = 0.0
    """Steps of the trial, with remembered ones at reduced weight."""
    num_gains: float = 0.0
    """Sequences summed over the trial's steps."""
    num_tries: float = 0.0
    """Sequences that had drafts, summed likewise."""
    loss: float = 0.0
    """Time that the trial lost, measured in plain steps."""
    drafted_since_plain: int = 0
    has_rested: bool = True
    """Whether the next step with drafts is the first after plain ones, in which proposers catch up."""

    def learn_plain(self, duration: float) -> None:
        self.has_rested = True
        self.num_plain += 1
        self.plain += (1 / min(duration, PAUSE) - self.plain) / min(self.num_plain, 4 * PLAIN_STEPS)

    def learn_drafted(self, gained: float, duration: float, num_sequences: int, num_with_drafts: int) -> None:
        self.loss += min(duration, LONG_PAUSE * gained) * self.plain - gained
        if self.has_rested:  # proposers catch up with missed tokens, which costs time in this step only
            self.has_rested = False
            return
        self.num_drafted += 1
        self.num_gains += num_sequences
        self.num_tries += num_with_drafts
        self.drafted_since_plain += 1
        self.drafted += (gained / min(duration, PAUSE * gained) - self.drafted) / self.num_drafted

    def begin_trial(self) -> None:
        self.loss = 0.0
        self.num_drafted *= REMEMBERED
        self.num_gains *= REMEMBERED
        self.num_tries *= REMEMBERED

    def verdict(self) -> bool | None:
        """Returns whether drafting pays off; None while the trial goes on."""
        if self.num_drafted < LEAST_STEPS:
            return None
        bound = (1 - TOLERANCE) * self.plain
        of_gain = GAIN_DEVIATION**2 * self.num_tries / self.num_gains**2
        error = math.sqrt(of_gain + TIME_DEVIATION**2 / self.num_drafted)
        is_certain = abs(self.drafted - bound) > CERTAIN * error * self.plain
        if not is_certain and error >= LEAST_ERROR:
            return None
        return self.drafted > bound


class Pace:
    """Keeps a comparison for each load, the number of sequences rounded to a power of two."""

    def __init__(self) -> None:
        self._comparisons: dict[int, _Comparison] = {}

    def learn(
        self,
        num_sequences: int,
        num_tokens: int,
        predicted: float,
        seconds: float,
        drafted: bool,
        num_with_drafts: int,
    ) -> None:
        """Counts a step that yielded `num_tokens` for `num_sequences` in `seconds`, including the time of its
        proposers.

        `predicted` is the time in seconds of a step with one token for each sequence. `drafted` says whether proposers
        were asked, which takes time even if they propose nothing. `num_with_drafts` is the number of sequences that had
        drafts.
        """
        comparison, duration = self._of(num_sequences), seconds / predicted
        if drafted:
            comparison.learn_drafted(num_tokens / num_sequences, duration, num_sequences, num_with_drafts)
        else:
            comparison.learn_plain(duration)

    def steps_to_rest(self, num_sequences: int) -> int:
        """Returns the number of next steps that should have no drafts."""
        comparison = self._of(num_sequences)
        pays = comparison.verdict()
        if pays is None:
            return 0
        if comparison.num_plain < PLAIN_STEPS:
            return PLAIN_STEPS - comparison.num_plain  # then the verdict is computed again
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
