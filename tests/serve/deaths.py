"""`make deaths MINUTES=20`: random deaths under 64 clients, and what the longest pauses of their streams consist of.

Two ingresses and two engines of two ranks, with grammar actors, share this machine. A process dies every few seconds,
each time after everything that died before has started again. So a second engine always runs. The tables go to
`benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import datetime
import os
import pathlib
import sys
from collections.abc import Sequence

from ray import serve

from benchmarks.processes import ROOT, interrupted_once
from benchmarks.report import machine
from manta.cluster import own_ray
from tests.serve.fault_streams import Application, Setup
from tests.serve.fault_table import LONGEST_S, Disturbance, deaths, disturb, undisturbed_streams
from tests.serve.pauses import by_death, longest_pauses, markdown

EVERYTHING = Setup(
    num_ingresses=2,
    options={
        "grammar_pool": {"form": "actors"},
        "tensor_parallel_size": 2,
        "constraints": {"compile_seconds": 60},  # on a busy machine
    },
)
"""Everything that can die, twice."""
RESULTS = ROOT / "benchmarks" / "results"
NUM_CLIENTS = 64
NUM_SHOWN = 20
"""Number of pauses in the table."""


def run(seconds: float, kinds: Sequence[str], num_clients: int = NUM_CLIENTS) -> tuple[str, bool]:
    """Returns the tables of the faults of these kinds in so many seconds, and whether every bar is met."""
    own_ray.start(4)  # two engines of two ranks claim four cores
    try:
        application = Application(EVERYTHING)
        known = deaths(application)
        undisturbed = undisturbed_streams(application)
        before_load, faults = os.getloadavg()[0], {kind: known[kind] for kind in kinds}
        disturbance = disturb(application, EVERYTHING, undisturbed, num_clients, seconds, faults)
        pauses = longest_pauses(disturbance.histories, application.events(), disturbance.faults, NUM_SHOWN)
    finally:
        serve.shutdown()
        own_ray.stop()
    tables = markdown(pauses, by_death(disturbance.histories, disturbance.faults))
    longest_s, load = pauses[0].seconds, os.getloadavg()[1]
    lines = [
        f"{seconds / 60:g} minutes, {num_clients} clients, load {before_load:.1f} before and {load:.1f} at the end.",
        "",
        _summary(disturbance),
        "",
        f"Longest pause: {pauses[0].words()}. The bar is {LONGEST_S:g} s.",
        "",
        tables,
    ]
    return "\n".join(lines), disturbance.verdict.is_good and longest_s < LONGEST_S


def _summary(disturbance: Disturbance) -> str:
    verdict = disturbance.verdict
    pauses = verdict.pauses_s
    half, late = (pauses[int(share * len(pauses))] for share in (0.5, 0.99))
    died = ", ".join(f"{kind} {count}" for kind, count in disturbance.num_faults.items())
    return (
        f"Deaths: {died}. {verdict.num_streams} streams, {verdict.num_events} events, {len(verdict.lost)} lost, "
        f"{len(verdict.twice)} twice, {len(verdict.different)} different. Pauses: p50 {half:.4f} s, p99 {late:.3f} s."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """1 where a stream is lost or differs, or stood still for longer than the bar."""
    kinds = ["ingress", "engine", "grammar actor", "rank"]
    parser = argparse.ArgumentParser(prog="make deaths", description="What streams feel of deaths around them.")
    parser.add_argument("--minutes", type=float, default=20.0, help="how long (default: 20)")
    parser.add_argument("--kinds", default=",".join(kinds), help=f"what dies (default: {','.join(kinds)})")
    parser.add_argument("--folder", type=pathlib.Path, default=RESULTS, help="where the tables go")
    options = parser.parse_args(arguments)
    if options.minutes <= 0:
        parser.error(f"--minutes {options.minutes:g} is not above 0")
    if unknown := set(options.kinds.split(",")) - set(kinds):
        parser.error(f"--kinds {', '.join(sorted(unknown))}: the kinds are {', '.join(kinds)}")
    try:
        with interrupted_once():
            tables, is_good = run(60 * options.minutes, options.kinds.split(","))
    except KeyboardInterrupt:
        return 130
    today = datetime.date.today().isoformat()
    text = f"# {today}, deaths under streams\n\n{machine()}\n\n{tables}"
    path = options.folder / f"deaths-{today}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(f"{text}\nwritten: {path}")
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main())
