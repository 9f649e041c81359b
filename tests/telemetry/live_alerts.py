"""`make alerts`: which alerts fire and clear under real faults, and when. Prometheus scrapes a server to which
`tests/telemetry/alert_faults.py` does each fault in turn.

The table goes to `benchmarks/results/`; an alert that does not fire or clear in time is a row of it too. A run that was
interrupted goes on after the last fault that was done with the same sources.
"""

from __future__ import annotations

import argparse
import datetime
import pathlib
import sys
import time
from collections.abc import Sequence

import msgspec

from benchmarks.processes import ROOT, interrupted_once
from benchmarks.report import machine
from tests.patience import PATIENCE_S, wait_until
from tests.prove import source_key
from tests.telemetry.alert_faults import FAULTS, SCRAPE_S, SPEED, Impossible, StreamsLost, World, served

RESULTS = ROOT / "benchmarks" / "results"
POLL_S = 0.5
"""Seconds between two looks at the alerts."""


class Row(msgspec.Struct, frozen=True):
    """An alert under a fault."""

    fault: str
    alert: str
    is_expected: bool
    fired_s: float | None
    """Seconds from the begin of the fault until it fired; None if it did not."""
    cleared_s: float | None
    """Seconds from the end of the fault until it did not fire any more; None if it still did."""

    @property
    def is_good(self) -> bool:
        return self.fired_s is not None and self.cleared_s is not None


class Outcome(msgspec.Struct, frozen=True):
    """What came of a fault."""

    fault: str
    rows: list[Row]
    trouble: str = ""
    """Why the fault was not done, or what it broke."""
    was_done: bool = True
    seconds: float = 0.0
    """Time that it took, until its alerts had cleared."""

    @property
    def is_good(self) -> bool:
        """Whether every alert that the fault must raise fired and cleared. A fault that cannot be done here is none."""
        return not self.was_done or not (self.trouble or any(row.is_expected and not row.is_good for row in self.rows))


def observe(name: str, world: World, patience_s: float = PATIENCE_S) -> list[Row]:
    """Does a fault until the alerts that it must raise fire, at most `patience_s`, and then waits as long until they
    have cleared. Returns a row for each of them, and for each other alert that fired and whose condition began to hold
    during the fault.

    Raises `Impossible` if the fault cannot be done, `StreamsLost` for what it broke, and `AssertionError` if the server
    has not recovered from what was done before.
    """
    begin, expected = FAULTS[name]
    wait_until(lambda: world.is_well() and not expected & {each.name for each in world.prometheus.active()}, POLL_S)
    fired_s, cleared_s = dict[str, float](), dict[str, float]()
    begun, begun_at = time.monotonic(), time.time()

    def firing() -> set[str]:
        return {each.name for each in world.prometheus.active() if each.fires and each.since >= begun_at}

    with begin(world):
        while not expected <= fired_s.keys() and time.monotonic() < begun + patience_s:
            time.sleep(POLL_S)
            for alert in firing():
                fired_s.setdefault(alert, time.monotonic() - begun)
    world.resume()
    ended = time.monotonic()
    while time.monotonic() < ended + patience_s:
        firing_now = firing()
        for alert in firing_now:  # another one may fire late, by what happened during the fault
            fired_s.setdefault(alert, time.monotonic() - begun)
            cleared_s.pop(alert, None)
        for alert in fired_s.keys() - firing_now:
            cleared_s.setdefault(alert, time.monotonic() - ended)
        if not firing_now:
            break
        time.sleep(POLL_S)
    return [
        Row(name, alert, alert in expected, fired_s.get(alert), cleared_s.get(alert))
        for alert in sorted(expected | fired_s.keys())
    ]


def outcome(name: str, world: World, patience_s: float) -> Outcome:
    """Returns what comes of a fault, whatever it is."""
    begun = time.monotonic()
    rows: list[Row] = []
    trouble, was_done = "", True
    try:
        rows = observe(name, world, patience_s)
    except Impossible as error:
        trouble, was_done = f"not tried, because {error}", False
    except StreamsLost as error:
        trouble = str(error)
    except AssertionError:
        trouble = "not tried, because the server has not recovered from the fault before it"
    return Outcome(name, rows, trouble, was_done, time.monotonic() - begun)


def table(outcomes: Sequence[Outcome], patience_s: float) -> str:
    """Returns the outcomes in Markdown."""
    late = f"not within {patience_s:.0f} s"

    def shown(seconds: float | None) -> str:
        return late if seconds is None else f"{seconds:.0f}"

    lines = [
        "| fault | alert | fires, s after the fault's begin | clears, s after its end |",
        "| --- | --- | ---: | ---: |",
    ]
    for row in (row for each in outcomes for row in each.rows):
        alert = row.alert if row.is_expected else f"{row.alert}, too"
        cleared = "" if row.fired_s is None else shown(row.cleared_s)
        lines.append(f"| {row.fault} | {alert} | {shown(row.fired_s)} | {cleared} |")
    troubles = [f"- {each.fault}: {each.trouble}." for each in outcomes if each.trouble]
    return "\n".join([*lines, "", *troubles]).rstrip() + "\n"


class Record:
    """The outcomes of one state of the sources, kept in a file, so that an interrupted run goes on."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        lines = path.read_bytes().splitlines() if path.exists() else []
        found = [msgspec.json.decode(line, type=Outcome) for line in lines]
        self._outcomes = {each.fault: each for each in found}

    def has(self, name: str) -> bool:
        """Whether a fault was done, and all alerts fired and cleared."""
        return name in self._outcomes and self._outcomes[name].was_done and self._outcomes[name].is_good

    def add(self, found: Outcome) -> None:
        self._outcomes[found.fault] = found
        self._path.parent.mkdir(exist_ok=True)
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(found) + b"\n")

    def outcomes(self) -> list[Outcome]:
        """Returns the last outcome of each fault, in the order of the table."""
        return [self._outcomes[name] for name in FAULTS if name in self._outcomes]


def write(outcomes: Sequence[Outcome], folder: pathlib.Path, patience_s: float) -> pathlib.Path:
    """Writes the table of today. Returns its path."""
    today = datetime.date.today().isoformat()
    about = (
        f"Every range and delay of the rules is {SPEED} times shorter here than in `configs/prometheus/rules.yml`. "
        f"Prometheus scrapes every {SCRAPE_S} s. The {len(outcomes)} faults took "
        f"{sum(each.seconds for each in outcomes):.0f} s together."
    )
    path = folder / f"alerts-{today}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join([f"# {today}, alerts under faults", machine(), about, table(outcomes, patience_s)]))
    return path


def run(names: Sequence[str], record: Record, folder: pathlib.Path, patience_s: float) -> None:
    """Does the faults in turn, and writes what comes of each at once. Raises `Impossible` where none can be done."""
    if not names:
        return
    with served() as world:
        for name in names:
            found = outcome(name, world, patience_s)
            record.add(found)
            write(record.outcomes(), folder, patience_s)
            print(f"{name}: {found.seconds:.0f} s", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """1 where an alert that a fault must raise did not fire or did not clear."""
    parser = argparse.ArgumentParser(prog="make alerts", description="Which alerts fire and clear under faults.")
    parser.add_argument("--fault", action="append", choices=list(FAULTS), help="only this one; may be repeated")
    parser.add_argument("--patience", type=float, default=PATIENCE_S, help="seconds for which an alert is awaited")
    parser.add_argument("--folder", type=pathlib.Path, default=RESULTS, help="where the table goes")
    options = parser.parse_args(arguments)
    record = Record(ROOT / ".prove" / f"alerts-{source_key(ROOT)}.jsonl")
    names = options.fault or [name for name in FAULTS if not record.has(name)]
    try:
        with interrupted_once():
            run(names, record, options.folder, options.patience)
    except Impossible as error:
        print(f"make alerts: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    outcomes = record.outcomes()
    path = write(outcomes, options.folder, options.patience)
    print(f"{path.read_text()}\nwritten: {path}")
    return int(not all(each.is_good for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
