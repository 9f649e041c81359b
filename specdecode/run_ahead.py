"""Decides whether steps are planned ahead of drafts, before the drafts of the step under way are verified.

Without that, a device of its own waits while the host verifies, proposes and plans (the *gap*). With it, each step goes
on behind all drafts of the step before and behind the token drawn after them, and the proposer guesses that token.
Where a draft is rejected, the sequence draws nothing in the next step. So it pays where drafts are nearly always
accepted. Plain arithmetic without torch or a clock. Called by `specdecode/proposers.py`.
"""

from __future__ import annotations

import collections
import math
import statistics

import numpy as np

NUM_TIMED = 8
"""Steps that wait for tokens whose gaps are remembered, for each load."""
LEAST_TIMED = 4
"""Fewest of them for planning ahead."""
MARGIN = 1.03
"""Expected speed-up from which steps are planned ahead, because estimates err."""
LEAST_SPEED_UP = 1.01
"""Expected speed-up down to which they go on to be."""
DECIDED_EVERY = 16
"""Steps between two decisions."""
TIMED_EVERY = 1024
"""Steps planned ahead after which gaps are timed again, because contexts grow. The steps until the next decision then
wait for tokens.
"""


def gained(acceptance: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns the tokens that a step with `counts` drafts, int [n], is expected to yield, float [n]. `acceptance`
    float [n] is the probability that a draft is accepted if those before it are.
    """
    chances = np.minimum(acceptance, 1 - 1e-9)
    return np.asarray((1 - chances ** (counts + 1)) / (1 - chances))


def gained_ahead(acceptance: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns the same for steps that are planned ahead, in the mean of many.

    A sequence has four kinds of steps. Its drafts are informed if all tokens before them were known. The step behind
    these was launched before anything could be proposed for it, so it is plain and yields one token if they are all
    accepted. From then on drafts are guessed: they follow a token that the proposer guessed, and are right only if that
    is. A step behind a rejected draft yields nothing, and informed drafts follow it. All drafts of an informed step are
    accepted with probability `acceptance ** counts`, and guessed ones with one power more.
    """
    chances = np.minimum(acceptance, 1 - 1e-9)
    whole = chances**counts
    guessed = whole / (1 - chances * whole)  # for each informed step; `whole` plain ones, and one that yields nothing
    informed_yield = gained(acceptance, counts)
    guessed_yield = chances * informed_yield + 1 - chances
    mean = (informed_yield + whole + guessed * guessed_yield) / (2 + whole + guessed)
    return np.where(counts > 0, mean, 1.0)


class _Gaps:
    """The savings of planning ahead at one load."""

    def __init__(self) -> None:
        self.shares: collections.deque[float] = collections.deque(maxlen=NUM_TIMED)
        """Shares of a step's time that it would save."""
        self.num_untimed = 0
        """Decisions since the last gap was timed."""


class RunAhead:
    """Keeps the gaps by load, the number of sequences rounded to a power of two."""

    def __init__(self) -> None:
        self.is_ahead = False
        """Whether the step after the next should be planned before the drafts of the next one are verified."""
        self._gaps: collections.defaultdict[int, _Gaps] = collections.defaultdict(_Gaps)
        self._num_steps = 0

    def learn(self, num_sequences: int, seconds: float, gap: float, waited: float) -> None:
        """Counts a step of `seconds` that was not planned ahead. Between the tokens of the step before and its launch
        were `gap` seconds, and the host `waited` for its tokens. Planned ahead, the step would take as long as the
        device or the host, whichever takes longer.
        """
        gaps = self._of(num_sequences)
        gaps.shares.append(min(max(min(gap, waited) / seconds, 0.0), 0.9))
        gaps.num_untimed = 0

    def is_due(self) -> bool:
        """Counts a step. Returns whether the caller should call `decide` after it."""
        self._num_steps += 1
        return self._num_steps % DECIDED_EVERY == 0

    def decide(self, num_sequences: int, acceptance: np.ndarray, counts: np.ndarray) -> None:
        """Decides whether the next steps, of `num_sequences`, are planned ahead. Some of these have `counts` drafts,
        int [n], which are accepted with the probabilities `acceptance`, float [n].
        """
        if not len(counts):
            return
        gaps = self._of(num_sequences)
        gaps.num_untimed += 1
        if len(gaps.shares) < LEAST_TIMED or gaps.num_untimed > TIMED_EVERY // DECIDED_EVERY:
            self.is_ahead = False
            return
        speed_up = gained_ahead(acceptance, counts).sum() / gained(acceptance, counts).sum()
        speed_up /= 1 - statistics.median(gaps.shares)
        self.is_ahead = bool(speed_up > (LEAST_SPEED_UP if self.is_ahead else MARGIN))

    def _of(self, num_sequences: int) -> _Gaps:
        return self._gaps[round(math.log2(num_sequences))]
