"""Turns repeated figures of one or two engines into rows, a table and JSON.

With a peer, a ratio says how many times better Manta is: above 1 it is faster or smaller, whatever the unit.
"""

from __future__ import annotations

import datetime
import os
import pathlib
import platform
import random
import statistics
import subprocess
from typing import Any, NamedTuple

import psutil

from benchmarks.workloads import Row

HIGHER_IS_BETTER = {"tok/s": True, "x": True, "s": False, "ms": False, "GiB": False, "cores": False}
MIN_PAIRS_FOR_INTERVAL = 5


class Result(NamedTuple):
    """One figure of Manta, and of the peer where it was measured too."""

    workload: str
    metric: str
    unit: str
    value: float
    """Median over repetitions."""
    peer: float | None = None
    ratio: float | None = None
    """Median of the ratios of repetitions that followed each other."""
    interval: tuple[float, float] | None = None
    """95% of the ratio, where there are enough pairs."""

    def as_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"workload": self.workload, "metric": self.metric}
        fields |= {"value": self.value, "unit": self.unit}
        if self.peer is not None:
            fields |= {"peer": self.peer, "ratio": self.ratio}
        if self.interval is not None:
            fields["interval"] = list(self.interval)
        return fields


def combine(manta: list[list[Row]], peer: list[list[Row]] | None = None) -> list[Result]:
    """Medians over repetitions; each repetition is the same list of rows. `peer` is measured in turns with `manta`."""
    results = []
    for column in range(len(manta[0])):
        row = manta[0][column]
        values = [rows[column].value for rows in manta]
        if not peer:
            results.append(Result(row.workload, row.metric, row.unit, statistics.median(values)))
            continue
        others = [rows[column].value for rows in peer]
        ratios = [
            value / other if HIGHER_IS_BETTER[row.unit] else other / value
            for value, other in zip(values, others, strict=True)
        ]
        interval = bootstrap_interval(ratios) if len(ratios) >= MIN_PAIRS_FOR_INTERVAL else None
        value, other, ratio = (statistics.median(numbers) for numbers in (values, others, ratios))
        results.append(Result(row.workload, row.metric, row.unit, value, other, ratio, interval))
    return results


def bootstrap_interval(ratios: list[float], resamples: int = 4000) -> tuple[float, float]:
    """The 95% interval of the median by the percentile bootstrap (Efron, 1979), with a fixed seed."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(resamples))
    return medians[int(0.025 * resamples)], medians[int(0.975 * resamples) - 1]


def table(results: list[Result], peer: str | None) -> str:
    """Columns of fixed width for a terminal."""
    header = ["workload", "metric", "manta"]
    if peer:
        header += [peer, "ratio", "95% interval"]
    lines = [header]
    for result in results:
        line = [result.workload, result.metric, _figure(result.value, result.unit)]
        if peer:
            line.append("" if result.peer is None else _figure(result.peer, result.unit))
            line.append("" if result.ratio is None else f"{result.ratio:.2f}")
            line.append("" if result.interval is None else f"{result.interval[0]:.3f} to {result.interval[1]:.3f}")
        lines.append(line)
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    text = []
    for line in lines:
        names = [cell.ljust(width) for cell, width in zip(line[:2], widths[:2], strict=True)]
        figures = [cell.rjust(width) for cell, width in zip(line[2:], widths[2:], strict=True)]
        text.append("  ".join(names + figures))
    return "\n".join(line.rstrip() for line in [text[0], "-" * len(text[0]), *text[1:]])


def _figure(value: float, unit: str) -> str:
    digits = 0 if value >= 1000 else 1 if value >= 100 else 2
    return f"{value:,.{digits}f} {unit}"


def machine() -> str:
    """One line on where and when this was measured."""
    model = platform.processor() or platform.machine()
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    root = pathlib.Path(__file__).parents[1]
    commit = subprocess.run(
        ["git", "-C", root, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return (
        f"{datetime.datetime.now():%Y-%m-%d %H:%M}, {model}, {len(os.sched_getaffinity(0))} cores, "
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB, load {os.getloadavg()[0]:.1f}, "
        f"Manta {commit.stdout.strip() or 'outside git'}"
    )
