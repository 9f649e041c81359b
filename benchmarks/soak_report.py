"""Judges a soak by its bars, and shows it as a Markdown table and as a CSV of every sample."""

from __future__ import annotations

import csv
import itertools
import pathlib
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.soak_load import Observed

MIB = 2**20
WARM_UP_S = 300.0
"""Seconds in which caches fill and nothing is judged. A short soak takes its first half."""
GROWTH_BAR = 0.01
"""Highest growth of memory a minute, as a share of the plateau."""
GAP_BAR = 1.5
"""Highest ratio of the p99 time between tokens: the last third over the first."""
NUM_WINDOWS = 15
"""Number of windows after the warm-up. Each has a p99, and medians of these are compared, because machines are
noisy.
"""
ALL = "all"
"""Name for all roles together."""
SHADES = "▁▂▃▄▅▆▇█"


class Sample(NamedTuple):
    """Memory at one moment."""

    at: float
    """Seconds since the load began."""
    by_role: dict[str, int]
    """Bytes (PSS) of all processes of a role."""


class Memory(NamedTuple):
    """One role's memory after warming up, or all roles' together."""

    role: str
    first: float
    """Bytes, the median of the first fifth."""
    plateau: float
    """Bytes, the median of all."""
    growth: float
    """A share of the plateau, a minute."""
    values: list[float]

    @property
    def passes(self) -> bool:
        return self.growth < GROWTH_BAR


class Soak(NamedTuple):
    """A soak that is over."""

    seconds: float
    samples: list[Sample]
    observed: Observed

    @property
    def warm_up_s(self) -> float:
        return min(WARM_UP_S, self.seconds / 2)

    def memories(self) -> list[Memory]:
        """All roles together first, then the largest roles."""
        warm = [sample for sample in self.samples if sample.at >= self.warm_up_s]
        times = [sample.at for sample in warm]
        roles = {role for sample in warm for role in sample.by_role}
        series = {role: [float(sample.by_role.get(role, 0)) for sample in warm] for role in roles}
        everything = [float(sum(sample.by_role.values())) for sample in warm]
        found = [_memory(role, times, values) for role, values in series.items()]
        return [_memory(ALL, times, everything), *sorted(found, key=lambda memory: -memory.plateau)]

    def gap_p99s(self) -> list[float]:
        """Seconds, by window after warming up; windows without a stream are left out."""
        length = (self.seconds - self.warm_up_s) / NUM_WINDOWS
        windows: list[list[float]] = [[] for _ in range(NUM_WINDOWS)]
        for gap in self.observed.gaps:
            number = int((gap.at - self.warm_up_s) / length) if gap.at >= self.warm_up_s else -1
            if 0 <= number < NUM_WINDOWS:
                windows[number].append(gap.seconds)
        return [p99(window) for window in windows if window]

    def gap_ratio(self) -> float:
        """The last third's median p99 over the first third's."""
        p99s = self.gap_p99s()
        third = max(1, len(p99s) // 3)
        return statistics.median(p99s[-third:]) / statistics.median(p99s[:third])

    def num_bad_answers(self) -> int:
        return sum(count for (_, status), count in self.observed.statuses.items() if status != 200)

    def problems(self) -> list[str]:
        """The bars that are not met; nothing where the soak passes."""
        found = [
            f"{memory.role} grows by {memory.growth:.2%} of {memory.plateau / MIB:.1f} MiB a minute; the bar is "
            f"{GROWTH_BAR:.0%}"
            for memory in self.memories()
            if not memory.passes
        ]
        if self.gap_ratio() > GAP_BAR:
            found.append(f"the p99 between tokens became {self.gap_ratio():.2f} times as long; the bar is {GAP_BAR}")
        if self.num_bad_answers():
            found.append(f"{self.num_bad_answers()} answers were not 200, first: {self.observed.complaints[0]}")
        return found

    # ---- shown ---------------------------------------------------------------------------------------------------

    def markdown(self) -> str:
        """Tables of memory and answers, and the verdict."""
        num_answers = sum(self.observed.statuses.values())
        lines = [
            f"{self.seconds / 60:.1f} minutes, {num_answers} answers, {len(self.observed.gaps)} times between tokens. "
            f"Judged after {self.warm_up_s / 60:.1f} minutes.",
            "",
            "| process | first fifth, MiB | plateau, MiB | growth a minute | |",
            "| --- | ---: | ---: | ---: | --- |",
        ]
        lines += [
            f"| {memory.role} | {memory.first / MIB:.1f} | {memory.plateau / MIB:.1f} | {memory.growth:+.3%} | "
            f"`{sparkline(memory.values)}` |"
            for memory in self.memories()
        ]
        p99s = [1e3 * seconds for seconds in self.gap_p99s()]
        lines += [
            "",
            f"p99 between tokens of the plain streams: {', '.join(f'{ms:.0f}' for ms in p99s)} ms "
            f"`{sparkline(p99s)}`, last third over first {self.gap_ratio():.2f}",
            "",
            "| client | status | answers |",
            "| --- | --- | ---: |",
        ]
        lines += [
            f"| {kind} | {status} | {count} |" for (kind, status), count in sorted(self.observed.statuses.items())
        ]
        problems = self.problems()
        lines += ["", *(f"- not met: {problem}" for problem in problems)] if problems else ["", "Every bar is met."]
        return "\n".join(lines) + "\n"

    def write(self, folder: pathlib.Path, name: str) -> list[pathlib.Path]:
        """`name` with .md and .csv."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{name}.{ending}" for ending in ("md", "csv")]
        paths[0].write_text(f"# Soak\n\n{self.markdown()}")
        roles = [memory.role for memory in self.memories()[1:]]
        with paths[1].open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["seconds", *roles])
            rows.writerows([round(at, 1), *(by_role.get(role, 0) for role in roles)] for at, by_role in self.samples)
        return paths


def _memory(role: str, times: Sequence[float], values: list[float]) -> Memory:
    plateau = statistics.median(values)
    first = statistics.median(values[: max(1, len(values) // 5)])
    return Memory(role, first, plateau, 60 * theil_sen(times, values) / plateau, values)


def theil_sen(times: Sequence[float], values: Sequence[float]) -> float:
    """The median slope over all pairs of points: a third of them may be anywhere. 0 for a single point."""
    pairs = itertools.combinations(zip(times, values, strict=True), 2)
    slopes = [(after - before) / (later - earlier) for (earlier, before), (later, after) in pairs]
    return statistics.median(slopes) if slopes else 0.0


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


def sparkline(values: Sequence[float], width: int = 30) -> str:
    """From nought to the largest."""
    step = max(1, len(values) // width)
    groups = [max(values[index : index + step]) for index in range(0, len(values), step)]
    top = max(groups, default=0) or 1
    return "".join(SHADES[min(len(SHADES) - 1, int(len(SHADES) * value / top))] for value in groups)
