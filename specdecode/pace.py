"""Measures whether drafting pays off: compares the times of steps with drafts and without ("plain") at the same load.

The estimates of `specdecode/lengths.py` choose the number of drafts. They leave out the driver's work for each draft,
what the model does for a draft head, caches shared with other processes, and pauses. Here the clock decides. At each
load drafting is first tried for a few steps, and then plain steps are timed. While drafting is slower, it rests, and
trials lose no more than `specdecode/trial_budget.py` allows. Plain arithmetic without torch. Called by
`specdecode/proposers.py`.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import statistics
from typing import NamedTuple

from manta.specdecode.trial_budget import TrialBudget

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
"""Fewest steps of a trial, and steps of the first one, which ends before there is a plain step to compare with."""
REMEMBERED = 0.85
"""Weight of a trial's steps in the next trial, which then needs fewer steps of its own."""
TOLERANCE = 0.01
"""Relative slowdown at which drafting goes on, because timing cannot tell it from equal speed."""
MOST_LOSS = 16.0
"""Time that a trial may lose, in plain steps. Drafts that pay off lose less than that between their bursts."""
PLAIN_STEPS = 16
"""Plain steps that are timed after the first trial and at the end of each rest. Their mean has half as many of those
before.
"""
PLAIN_EVERY = 512
"""Steps with drafts after which `PLAIN_STEPS` plain steps refresh the comparison, unless the gain is clear."""
CLEAR_GAIN = 1.2
"""Speed-up by drafts above which the comparison is not refreshed."""
LONG_STEP = 2.0
"""Cap on a step's time. For plain steps it is a multiple of the median. For steps with drafts it is one of the time
that plain steps with the same gain should take, or of the last such step's time if that was longer. A single longer
step is taken for a pause of the machine, several in a row are not.
"""


LEAST_SECONDS = 1e-6
"""Least time that a step is taken to last."""


class _Phase(enum.Enum):
    FIRST = enum.auto()
    """The first trial. What it has lost is known when plain steps have been timed."""
    TIMING = enum.auto()
    """Plain steps are timed."""
    DRAFTING = enum.auto()
    """Drafts are tried or in use."""
    RESTING = enum.auto()
    """Drafts were slower."""


class _Drafted(NamedTuple):
    """A step after which proposers were asked."""

    gained: float
    """Tokens that a sequence gained."""
    seconds: float
    proposing_seconds: float
    predicted: float
    """Seconds of a step with one token for each sequence (`StepCost.of_table`)."""
    num_sequences: int
    num_with_drafts: int
    is_catching_up: bool

    @property
    def lost(self) -> float:
        """Seconds that the step took longer than predicted for its tokens."""
        return self.seconds + self.proposing_seconds - self.gained * self.predicted


@dataclasses.dataclass(slots=True)
class _Comparison:
    """The comparison of steps with drafts and plain ones at one load. Rates are tokens that a sequence gains in the
    predicted time of a plain step.
    """

    phase: _Phase = _Phase.FIRST
    clock: float = 0.0
    """Seconds that steps took at this load."""
    budget: TrialBudget = dataclasses.field(default_factory=TrialBudget)
    plain: float = 1.0
    """Rate of plain steps."""
    num_plain: int = 0
    timed: list[float] = dataclasses.field(default_factory=list)
    """Times of plain steps in this phase, as multiples of the predicted ones."""
    num_to_time: int = 0
    """Plain steps that are still to be timed in this phase."""
    drafted: float = 0.0
    """Mean rate of the current trial. A long step counts less in it than in a sum of times."""
    num_drafted: float = 0.0
    """Steps of the trial, with remembered ones at reduced weight."""
    num_gains: float = 0.0
    """Sequences summed over these steps."""
    num_tries: float = 0.0
    """Sequences that had drafts, summed likewise."""
    drafted_since_plain: int = 0
    is_proven: bool = True
    """Whether drafting has paid off since the last rest. Before the first rest it is taken for granted."""
    has_rested: bool = True
    """Whether the next step with drafts is the first after plain ones, in which proposers catch up."""
    first: list[_Drafted] | None = dataclasses.field(default_factory=list)
    """Steps of the first trial, until plain steps tell what they have lost; then None."""
    last_seconds: float = 0.0
    """Seconds that the last step with drafts counted as."""

    def learn_plain(self, seconds: float, predicted: float) -> None:
        self.has_rested = True
        if self.phase is _Phase.TIMING:
            self.timed.append(seconds / predicted)
        self.go_on(seconds, predicted)

    def go_on(self, seconds: float, predicted: float) -> None:
        """Counts a step without comparing its time."""
        self.clock += seconds
        if self.phase is _Phase.RESTING and self.budget.allows_trial(self.clock):
            self._time_plain_steps()
        elif self.phase is _Phase.TIMING:
            self.num_to_time -= 1
            if self.num_to_time <= 0 and self.timed:
                self._resume(predicted)

    def learn_drafted(self, step: _Drafted) -> None:
        self.clock += step.seconds + step.proposing_seconds
        if self.first is not None:
            self.first.append(step)
            seems_lost = sum(each.lost for each in self.first) > MOST_LOSS * step.predicted
            if self.phase is _Phase.FIRST and (len(self.first) >= LEAST_STEPS or seems_lost):
                self._time_plain_steps()
            return
        self._count(step)
        if self.phase is _Phase.DRAFTING:
            self._decide(step.predicted)

    def _count(self, step: _Drafted) -> None:
        plain_step = step.predicted / self.plain
        self.last_seconds = min(step.seconds, LONG_STEP * max(step.gained * plain_step, self.last_seconds))
        spent = self.last_seconds + step.proposing_seconds
        self.budget.spend(spent - step.gained * plain_step, self.clock, MOST_LOSS * plain_step)
        if self.has_rested or step.is_catching_up:  # which costs time in this step only
            self.has_rested = False
            return
        self.num_drafted += 1
        self.drafted += (step.gained * step.predicted / spent - self.drafted) / self.num_drafted
        self.num_gains += step.num_sequences
        self.num_tries += step.num_with_drafts
        self.drafted_since_plain += 1

    def _time_plain_steps(self) -> None:
        self.phase = _Phase.TIMING
        self.timed = []
        self.num_to_time = PLAIN_STEPS

    def _resume(self, predicted: float) -> None:
        """Goes on with drafts after plain steps were timed."""
        self.phase = _Phase.DRAFTING
        longest = LONG_STEP * statistics.median(self.timed)
        before = min(self.num_plain, PLAIN_STEPS // 2)  # older steps had shorter contexts
        self.num_plain = before + len(self.timed)
        # Times are summed: behind a device a short step follows a long one
        total = before / self.plain + sum(min(each, longest) for each in self.timed)
        self.plain = self.num_plain / total
        if self.first is not None:
            steps, self.first = self.first, None
            most = MOST_LOSS * predicted / self.plain
            self.budget = TrialBudget(most)
            self.last_seconds = statistics.median(each.seconds for each in steps)
            self.has_rested = True
            for step in steps:
                self._count(step)
            self.has_rested = True
            self._decide(predicted)

    def _decide(self, predicted: float) -> None:
        """Decides after a step whether drafting goes on."""
        pays, is_spent = self.verdict(), self.budget.is_spent(self.clock)
        if not is_spent and (pays is None or (not pays and self.budget.lost <= 0)):
            return  # in the last case it is the remembered steps that were slow
        least = None
        if is_spent and self.num_drafted < LEAST_STEPS:
            least = 2 * self.budget.lost  # so that at some time a trial is long enough
        elif is_spent and self.drafted > (1 - TOLERANCE) * self.plain:
            least = MOST_LOSS / 4 * predicted / self.plain  # drafts seem to pay off, and had no luck
        self.num_drafted *= REMEMBERED
        self.num_gains *= REMEMBERED
        self.num_tries *= REMEMBERED
        self.is_proven = bool(pays) and not is_spent
        if not self.is_proven:
            self.phase = _Phase.RESTING
            self.budget.end_trial(self.clock, least)
            return
        self.budget.lost = 0.0
        if self.drafted <= CLEAR_GAIN * self.plain and self.drafted_since_plain >= PLAIN_EVERY:
            self.drafted_since_plain = 0
            self._time_plain_steps()

    def verdict(self) -> bool | None:
        """Returns whether drafting pays off; None while the trial goes on."""
        if self.num_drafted < LEAST_STEPS:
            return None
        of_gain = GAIN_DEVIATION**2 * self.num_tries / self.num_gains**2
        error = math.sqrt(of_gain + TIME_DEVIATION**2 / self.num_drafted)
        over = self.drafted / self.plain - (1 - TOLERANCE)
        return None if abs(over) <= CERTAIN * error and error >= LEAST_ERROR else over > 0


class Pace:
    """Keeps a comparison for each load, the number of sequences rounded to a power of two."""

    def __init__(self) -> None:
        self._comparisons: dict[int, _Comparison] = {}
        self._of_counts: dict[int, _Comparison] = {}
        """Comparisons by number of sequences: every step asks for a few numbers."""

    def learn_plain(self, num_sequences: int, predicted: float, seconds: float) -> None:
        """Counts a plain step of `seconds`. `predicted` is the time in seconds of a step with one token for each
        sequence.
        """
        self._of(num_sequences).learn_plain(seconds, predicted)

    def learn_drafted(
        self,
        num_sequences: int,
        num_tokens: int,
        predicted: float,
        seconds: float,
        proposing_seconds: float = 0.0,
        num_with_drafts: int = 0,
        is_catching_up: bool = False,
    ) -> None:
        """Counts a step that yielded `num_tokens` for `num_sequences` in `seconds`, after proposers were asked. They
        took `proposing_seconds`, even if they proposed nothing. `num_with_drafts` sequences had drafts. If
        `is_catching_up`, proposers could not draft yet.
        """
        of_proposers = proposing_seconds, predicted, num_sequences, num_with_drafts, is_catching_up
        self._of(num_sequences).learn_drafted(_Drafted(num_tokens / num_sequences, seconds, *of_proposers))

    def go_on(self, num_sequences: int, predicted: float, seconds: float) -> None:
        """Counts a step whose time is not compared, because it computes prompts or verifies forced tokens."""
        self._of(num_sequences).go_on(seconds, predicted)

    def drafts(self, num_sequences: int) -> bool:
        """Returns whether the next step should have drafts."""
        return self._of(num_sequences).phase in (_Phase.FIRST, _Phase.DRAFTING)

    def rests(self, num_sequences: int) -> bool:
        """Returns whether plain steps need not be timed."""
        return self._of(num_sequences).phase is _Phase.RESTING

    def num_plain_steps(self, num_sequences: int, seconds: float) -> int:
        """Returns how many of the next steps are plain, if all are of this load and take so many seconds."""
        comparison = self._of(num_sequences)
        if comparison.phase is _Phase.TIMING:
            return comparison.num_to_time
        if comparison.phase is _Phase.RESTING:
            return int(comparison.budget.rest(comparison.clock) / max(seconds, LEAST_SECONDS))
        return 0

    def is_proven(self, num_sequences: int) -> bool:
        """Returns whether drafting has paid off since it rested last."""
        return self._of(num_sequences).is_proven

    def _of(self, num_sequences: int) -> _Comparison:
        comparison = self._of_counts.get(num_sequences)
        if comparison is None:
            comparison = self._comparisons.setdefault(round(math.log2(num_sequences)), _Comparison())
            self._of_counts[num_sequences] = comparison
        return comparison
