"""The table of CPU seconds at the end of a long run."""

from __future__ import annotations

import types
from typing import Any

import pytest

from tests.costs import LONG_RUN_S, NUM_PRINTED, Costs, cpu_seconds


class Terminal:
    """Stands in for pytest's terminal reporter."""

    def __init__(self) -> None:
        self.printed: list[str] = []

    def section(self, title: str) -> None:
        self.printed.append(title)

    line = section


def printed(cost_s: float, num_files: int) -> list[str]:
    """Returns the summary of a run with two phases of one test in each file."""
    costs, terminal = Costs(), Terminal()
    for number in range(num_files):
        report: Any = types.SimpleNamespace(location=(f"test_{number:02}.py", 1, "test"), cpu_s=cost_s + number)
        costs.pytest_runtest_logreport(report)
        costs.pytest_runtest_logreport(report)
    costs.pytest_terminal_summary(terminal)  # type: ignore[arg-type]
    return terminal.printed


def test_a_long_run_prints_the_files_that_cost_most() -> None:
    title, *lines = printed(cost_s=LONG_RUN_S, num_files=NUM_PRINTED + 1)
    assert title.startswith(f"{2 * sum(LONG_RUN_S + number for number in range(NUM_PRINTED + 1)):.0f} CPU seconds")
    assert [line.split()[1] for line in lines] == [f"test_{number:02}.py" for number in range(NUM_PRINTED, 0, -1)]
    assert float(lines[0].split()[0]) == 2 * (LONG_RUN_S + NUM_PRINTED)


def test_a_short_run_prints_none() -> None:
    assert printed(cost_s=0.1, num_files=3) == []


def test_a_phase_has_what_was_spent_since_the_one_before() -> None:
    costs = Costs()
    spent = []
    for _ in range(3):
        begun = cpu_seconds()
        while cpu_seconds() < begun + 0.02:
            pass
        phase = costs.pytest_runtest_makereport(item=None, call=None)  # type: ignore[arg-type]
        next(phase)  # type: ignore[call-overload]
        report: Any = types.SimpleNamespace()
        with pytest.raises(StopIteration):
            phase.send(report)  # type: ignore[attr-defined]
        spent.append(report.cpu_s)
    assert min(spent) >= 0.02
    assert sum(spent) <= cpu_seconds()
