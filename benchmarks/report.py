"""Turns repeated figures of one engine, or of two in turns, into rows of a table and JSON, with verdicts.

With a peer, a ratio says how many times better Manta is: above 1 it is faster or smaller, whatever the unit.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import math
import os
import pathlib
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import psutil
from tqdm import tqdm

from benchmarks.processes import ROOT
from benchmarks.workloads import Row
from manta.structured.host import num_cores
from manta.structured.visible_text import say_lines, visible_lines

T = TypeVar("T")

HIGHER_IS_BETTER = {"tok/s": True, "x": True, "s": False, "ms": False, "GiB": False}
"""Direction of each unit. Figures in other units, such as the load generator's cores, are printed and not compared."""
MIN_PAIRS_FOR_INTERVAL = 5
MIN_PAIRS_FOR_VERDICT = 30
TOLERANCE = 0.02
"""A ratio meets a bar where the lower end of its interval is above the bar minus this."""

BARS: dict[tuple[str, str], tuple[float, ...]] = {
    ("a", "output, 32 rows, from the two below"): (1.0, 1.2),
    ("a", "output, 32 rows, whole runs"): (1.0, 1.2),
    ("a", "decode step, 32 rows"): (1.0, 1.25),
    ("a", "prefill"): (0.9, 1.0),
    ("b", "output, 1 row"): (0.95, 1.1),
    ("c", "output, n = 64"): (1.5, 2.2),
    ("d", "shared, cold"): (1.0, 1.3),
    ("d", "shared, warm"): (1.0, 1.3),
    ("g", "decode step, 1 row"): (1.0, 1.5),
    ("g", "decode step, 32 rows"): (1.0, 1.5),
    ("http 16", "output"): (1.0, 1.2),
    ("http 16", "TTFT p50"): (1.0, 1.2),
    ("http 16", "inter-token p50"): (1.0, 1.2),
    ("http 16", "inter-token p99"): (1.0, 1.2),
}
"""(bar, goal) of the ratio to vLLM on the default models."""
OFFLINE_BARS: dict[tuple[str, str], tuple[float, ...]] = {("http32", "output"): (0.9, 0.97)}
"""(bar, goal) of the ratio of Manta over HTTP to Manta's `LLM.generate`."""
LIMITS: dict[tuple[str, str], tuple[float, float]] = {
    ("start", "new process to LLM ready"): (15.0, 5.0),
    ("http", "server launch to healthy"): (25.0, 12.0),
    ("memory", "all processes beyond the KV pool, offline"): (2.5, 1.8),
}
"""(bar, goal) of Manta's own figure, which may be that large, in the unit of its row."""
GUARD_BARS: dict[tuple[str, str], tuple[float, ...]] = {
    ("guarded", f"16 rows under a guarded schema, {form}"): (0.9,) for form in ("threads", "actors")
}
"""The bar of the ratio of a guarded schema to the same schema without the keywords that need a guard."""
BARS_BY_PEER = {"vllm": BARS, "LLM.generate": OFFLINE_BARS, "the schema without its guard": GUARD_BARS}


class Result(NamedTuple):
    """One figure of Manta, and of the peer where it was measured too."""

    workload: str
    metric: str
    unit: str
    value: float
    """Median over repetitions."""
    repetitions: int
    against: str | None = None
    """Name of the peer."""
    peer: float | None = None
    ratio: float | None = None
    """Median of the ratios of repetitions that followed each other."""
    interval: tuple[float, float] | None = None
    """95% of the ratio, where there are enough pairs."""

    def verdict(self) -> str:
        """Whether bar and goal are met, and with how many pairs where they are too few; "" where there is no bar."""
        name = (self.workload, self.metric)
        if name in LIMITS:
            return ", ".join(
                f"{kind} {limit:g} {'met' if self.value <= limit else 'not met'}"
                for kind, limit in zip(("bar", "goal"), LIMITS[name], strict=True)
            )
        bars = BARS_BY_PEER.get(self.against or "", {}).get(name)
        if bars is None or self.interval is None:
            return ""
        text = ", ".join(
            f"{kind} {bar:g} {'met' if self.interval[0] > bar - TOLERANCE else 'not met'}"
            for kind, bar in zip(("bar", "goal"), bars, strict=False)
        )
        return text if self.repetitions >= MIN_PAIRS_FOR_VERDICT else f"{text} ({self.repetitions} pairs)"

    def as_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"workload": self.workload, "metric": self.metric}
        fields |= {"value": self.value, "unit": self.unit, "repetitions": self.repetitions}
        if self.peer is not None:
            fields |= {"against": self.against, "peer": self.peer}
        if self.ratio is not None:
            fields["ratio"] = self.ratio
        if self.interval is not None:
            fields["interval"] = list(self.interval)
        if verdict := self.verdict():
            fields["verdict"] = verdict
        return fields


def combine(
    manta: list[list[Row]], peer: list[list[Row]] | None = None, against: str | None = None, num_starts: int = 1
) -> list[Result]:
    """Medians over repetitions; each repetition is the same list of rows. `peer` is measured in turns with `manta`.
    Equally many repetitions follow each of `num_starts` starts.
    """
    results = []
    for column in range(len(manta[0])):
        row = manta[0][column]
        values = [rows[column].value for rows in manta]
        if not peer:
            results.append(Result(row.workload, row.metric, row.unit, statistics.median(values), len(values)))
            continue
        others = [rows[column].value for rows in peer]
        medians = statistics.median(values), len(values), against, statistics.median(others)
        if row.unit not in HIGHER_IS_BETTER:
            results.append(Result(row.workload, row.metric, row.unit, *medians))
            continue
        ratio = ratio_of(values, others, HIGHER_IS_BETTER[row.unit], num_starts)
        interval = (ratio.low, ratio.high) if len(values) >= MIN_PAIRS_FOR_INTERVAL else None
        results.append(Result(row.workload, row.metric, row.unit, *medians, ratio.median, interval))
    return results


class Ratio(NamedTuple):
    """How many times better one side was: the median of the ratios of its turns, and the median's 95% interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def ratio_of(
    values: Sequence[float], others: Sequence[float], higher_is_better: bool = True, num_starts: int = 1
) -> Ratio:
    """The ratio of values to those of the same turns; above 1 `values` are better."""
    pairs = zip(values, others, strict=True)
    ratios = [value / other if higher_is_better else other / value for value, other in pairs]
    return Ratio(statistics.median(ratios), *bootstrap_interval(ratios, num_starts=num_starts))


def bootstrap_interval(ratios: list[float], resamples: int = 4000, num_starts: int = 1) -> tuple[float, float]:
    """The 95% interval of the median by the percentile bootstrap (Efron, 1979), with a fixed seed. It draws starts,
    each with equally many of the ratios, and then ratios of each: those of one start have its luck in common (Kalibera
    and Jones, Rigorous benchmarking in reasonable time, 2013).
    """
    generator = random.Random(0)
    size = len(ratios) // num_starts
    starts = [ratios[begin : begin + size] for begin in range(0, len(ratios), size)]

    def resampled() -> list[float]:
        drawn = generator.choices(starts, k=num_starts)
        return [ratio for start in drawn for ratio in generator.choices(start, k=size)]

    medians = sorted(statistics.median(resampled()) for _ in range(resamples))
    return medians[int(0.025 * resamples)], medians[int(0.975 * resamples) - 1]


class Table:
    """Prints results as they come, and writes all of them to a file after each."""

    def __init__(self, path: str | None, compared: bool = True) -> None:
        """`path` is the file's, of one JSON object a line; None writes none. `compared` adds the peer's columns."""
        self._path = path
        self._compared = compared
        self._results: list[Result] = []

    def add(
        self,
        manta: list[list[Row]],
        peer: list[list[Row]] | None = None,
        against: str | None = None,
        num_starts: int = 1,
    ) -> None:
        """Adds what `combine` makes of the rows, under the head of the table if they are the first."""
        if not self._results:
            print(header(self._compared), flush=True)
        results = combine(manta, peer, against, num_starts)
        self._results += results
        for result in results:
            print(table_line(result, self._compared), flush=True)
        if self._path:
            path = pathlib.Path(self._path)
            partial = path.with_name(path.name + ".partial")
            partial.write_text("".join(json.dumps(result.as_json()) + "\n" for result in self._results))
            os.replace(partial, path)


def markdown_row(*cells: object) -> None:
    """Prints a row of a table in Markdown at once."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def markdown_head(*columns: str) -> None:
    markdown_row(*columns)
    markdown_row(*("---" for _ in columns))


def header(compared: bool) -> str:
    """The head of the table, and a line under it."""
    cells = ["workload", "metric", "manta", *(["peer", "ratio", "95% interval"] if compared else []), "verdict"]
    line = _aligned(cells)
    return f"{line}\n{'-' * len(line)}"


def table_line(result: Result, compared: bool) -> str:
    """A result in the columns of `header`; widths are fixed, so that a line can be printed before the next is known."""
    cells = [result.workload, result.metric, figure_text(result.value, result.unit)]
    if compared:
        cells += [
            "" if result.peer is None else figure_text(result.peer, result.unit),
            "" if result.ratio is None else f"{result.ratio:.3f}",
            "" if result.interval is None else f"{result.interval[0]:.3f} to {result.interval[1]:.3f}",
        ]
    return _aligned([*cells, result.verdict()])


def _aligned(cells: list[str]) -> str:
    *figures, verdict = cells[2:]
    widths = (12, 12, 6, 14)
    numbers = [cell.rjust(width) for cell, width in zip(figures, widths, strict=False)]
    return "  ".join([cells[0].ljust(8), cells[1].ljust(41), *numbers, verdict]).rstrip()


def figure_text(value: float, unit: str) -> str:
    """Returns a figure with its unit."""
    digits = 0 if value >= 1000 else 1 if value >= 100 else 2
    return f"{value:,.{digits}f} {unit}"


def machine() -> str:
    """One line on where and when this was measured."""
    return (
        f"{datetime.datetime.now():%Y-%m-%d %H:%M}, {processor_name()}, "
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB, load {os.getloadavg()[0]:.1f}, Manta {commit()}"
    )


def processor_name() -> str:
    """Returns the processor's model and the number of cores."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:  # where there is one, it knows more
        for line in file:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return f"{model}, {num_cores()} cores"


def commit() -> str:
    """Returns the name of the commit that is checked out, with a digest of the changes since."""

    def git(*arguments: str) -> bytes:
        return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, check=False).stdout

    name, changes = git("rev-parse", "--short", "HEAD").decode().strip(), git("diff", "HEAD")
    if not name:
        return "outside git"
    return f"{name}+{hashlib.sha256(changes).hexdigest()[:8]}" if changes else name


class Figure(NamedTuple):
    """A figure that a benchmark compares."""

    name: str
    unit: str
    higher_is_better: bool = True


def say_failure(text: str) -> None:
    """Prints on standard error why a command has failed, without what would control a terminal."""
    say_lines(visible_lines(text).split("\n"), file=sys.stderr)


def turns(count: int, what: str) -> Iterator[int]:
    """Yields 0 to `count - 1`, and shows on standard error which turn of `what` runs."""
    with tqdm(total=count, desc=what, unit="turn", leave=False, file=sys.stderr, mininterval=0) as bar:
        for number in range(count):
            yield number
            bar.update()


def in_turns(
    sides: Mapping[str, Callable[[int], T]], count: int, what: str, limit_s: float = math.inf
) -> dict[str, list[T]]:
    """Returns the results of each side for turns 1 to `count`. Turn 0 warms up; each turn reverses the order of the
    sides. After `limit_s` seconds no other turn begins, but there is one at least.
    """
    found: dict[str, list[T]] = {name: [] for name in sides}
    started = time.perf_counter()
    for number in turns(count + 1, what):
        if number > 1 and time.perf_counter() - started > limit_s:
            break
        for name in reversed(sides) if number % 2 else sides:
            answer = sides[name](number)
            if number:
                found[name].append(answer)
    return found
