"""Prints the CPU seconds that the tests of each file cost, at the end of a long run.

A machine that is busy or slow changes wall time far more than CPU seconds. Counted are pytest's own processes and what
they started, once it has ended and its parent has waited for it. `CONTRIBUTING.md` says what a test may cost.
"""

from __future__ import annotations

import collections
import resource
from collections.abc import Iterator
from typing import Any

import pytest

LONG_RUN_S = 60.0
"""CPU seconds from which a run prints the table."""
NUM_PRINTED = 15
"""Files in the table."""


def cpu_seconds() -> float:
    """Returns the CPU seconds of this process and of its ended children, user and system."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class Costs:
    """A plugin of pytest. Each of xdist's workers counts for itself, and its reports carry the figures."""

    def __init__(self) -> None:
        self._counted_s = 0.0
        """CPU seconds of this process that a report has told."""
        self._by_file: collections.Counter[str] = collections.Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
        """Adds `cpu_s` to the report of each phase: what was spent since the phase before. The first one of a process
        has the collection of all tests too.
        """
        report: Any = yield
        now = cpu_seconds()
        report.cpu_s, self._counted_s = now - self._counted_s, now
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._by_file[report.location[0]] += report.cpu_s

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if (total_s := self._by_file.total()) < LONG_RUN_S:
            return
        terminalreporter.section(f"{total_s:.0f} CPU seconds; the files that cost most")
        for file, cost_s in self._by_file.most_common(NUM_PRINTED):
            terminalreporter.line(f"{cost_s:8.1f}  {file}")
