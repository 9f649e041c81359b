"""The time that trials of drafts may lose against steps without them: a share of the measured time.

A trial goes on while its budget has time left. After it, a rest lasts until the share of the measured time has paid for
what the trial lost. So the losses up to any time are at most the initial budget, the share of that time, and the loss
of one step, whatever steps cost and however drafts are accepted. Plain arithmetic without torch or a clock: callers
count the seconds. Called by `specdecode/pace.py` for all proposers together, and by `specdecode/proposers.py` for each
proposer that is not free.
"""

from __future__ import annotations

LOSS_SHARE = 0.01
"""Share of the measured time that trials may lose."""


class TrialBudget:
    """The seconds that the current trial may still lose. Times `now` are seconds of one clock, and never decrease."""

    def __init__(self, seconds: float = 0.0, share: float = LOSS_SHARE) -> None:
        """Starts at time 0 with a budget of `seconds`."""
        self.lost = 0.0
        """Seconds that the current trial has lost; negative if it has gained."""
        self._share = share
        self._seconds = seconds
        """The budget at `_counted_at`."""
        self._counted_at = 0.0
        self._needed = 0.0
        """The budget at which the next trial begins, at least."""
        self._rests_until = 0.0

    def spend(self, lost: float, now: float, most: float) -> None:
        """Counts seconds that a step has lost, or gained if they are negative. The budget grows to at most `most`
        seconds, or to what the trial needed at its begin.
        """
        most = max(most, self._needed)
        self.lost += lost
        self._seconds = min(min(self._seconds_at(now), most) - lost, most)
        self._counted_at = now

    def end_trial(self, now: float, least: float | None = None) -> None:
        """Begins the rest until the budget has `least` seconds; without it, until the share of the time has paid for
        what the trial has lost.
        """
        left = self._seconds_at(now)
        self._needed = max(left + max(self.lost, 0.0) if least is None else least, 0.0)
        self._rests_until = now + max(self._needed - left, 0.0) / self._share
        self.lost = 0.0

    def allows_trial(self, now: float) -> bool:
        """Returns whether the rest is over."""
        return now >= self._rests_until and not self.is_spent(now)

    def rest(self, now: float) -> float:
        """Returns the seconds until the rest is over; 0 without one."""
        return max(self._rests_until - now, 0.0)

    def is_spent(self, now: float) -> bool:
        """Returns whether a trial has to end."""
        return self._seconds_at(now) < 0

    def _seconds_at(self, now: float) -> float:
        return self._seconds + self._share * (now - self._counted_at)
