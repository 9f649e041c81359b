"""What a Ray of our own saves by leaving processes out: `manta bench cluster --parts own-ray`.

`cluster/own_ray.py` replaces three methods of Ray's private `Node`, for `ray.init` passes no switch on. Here a Ray
starts, in turns, as Manta starts it, and with the processes that it leaves out: one by one, and all of them. Each is
alone on the machine. A ratio is to Manta's own in the same round: above 1, leaving the process out is better.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import NamedTuple

from benchmarks.processes import Child
from manta.cluster import own_ray

IDLE_S = 10.0
"""Seconds for which the idle processes are watched."""
SETTLE_S = 3.0

CHILD = """
import sys, time
from manta.cluster import own_ray

for name in sys.argv[1:]:
    del own_ray._INSTEAD[name]
started = time.perf_counter()
own_ray.start()
print(time.perf_counter() - started, flush=True)
sys.stdin.readline()
own_ray.stop()
"""


class Figures(NamedTuple):
    start_s: float
    memory_bytes: float
    """Proportional set size of all processes."""
    idle_cores: float


class OwnRay(Child):
    """A Ray of our own, ready when constructed, in which `started` are not left out."""

    uses_pipe = True
    engine = "own Ray"

    def __init__(self, started: tuple[str, ...]) -> None:
        super().__init__([sys.executable, "-c", CHILD, *started], {"RAY_USAGE_STATS_ENABLED": "0"})
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise self.fail("a Ray of our own did not start")
        self.start_s = float(line)

    def figures(self) -> Figures:
        time.sleep(SETTLE_S)
        before, since = self.cpu_seconds(), time.perf_counter()
        time.sleep(IDLE_S)
        idle = (self.cpu_seconds() - before) / (time.perf_counter() - since)
        return Figures(self.start_s, self.pss_bytes(), idle)


def own_ray_extras(num_rounds: int) -> None:
    """Prints a row for each set of processes."""
    kinds: dict[str, tuple[str, ...]] = {"as Manta starts it": ()}
    kinds |= {f"with {name.removeprefix('start_')}": (name,) for name in own_ray._INSTEAD}
    kinds["with all"] = tuple(own_ray._INSTEAD)
    rounds: dict[str, list[Figures]] = {kind: [] for kind in kinds}
    for number in range(num_rounds):
        for kind in sorted(kinds, reverse=bool(number % 2)):
            figures = _measured(kinds[kind])
            rounds[kind].append(figures)
            said = f"round {number + 1} of {num_rounds}, {kind}: start {figures.start_s:.2f} s"
            print(said, file=sys.stderr, flush=True)
    print("| a Ray of our own | start, s | ratio | memory, MiB | ratio | idle, cores | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    base = rounds["as Manta starts it"]
    for kind, found in rounds.items():
        cells = [kind]
        for column, unit, digits in ((0, 1.0, 2), (1, 2.0**20, 0), (2, 1.0, 3)):
            cells.append(f"{statistics.median(each[column] for each in found) / unit:.{digits}f}")
            ratios = [each[column] / own[column] for each, own in zip(found, base, strict=True)]
            cells.append(f"{statistics.median(ratios):.3f}")
        print(f"| {' | '.join(cells)} |", flush=True)


def _measured(started: tuple[str, ...]) -> Figures:
    ray = OwnRay(started)
    try:
        return ray.figures()
    finally:
        ray.stop()
