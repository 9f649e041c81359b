"""`make soak MINUTES=30`: a server under constant mixed load, the memory of each of its processes, and bars for both.

What is asked stands in `benchmarks/soak_load.py`; the bars, and what is written, in `benchmarks/soak_report.py`.
`tests/house/test_soak.py` runs the same for half an hour in `make prove`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import pathlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence

import psutil

from benchmarks.processes import ROOT, ServerProcess, Setup, free_port, interrupted_once
from benchmarks.report import machine
from benchmarks.soak_load import KINDS, Clients, Observed
from benchmarks.soak_report import MIB, Sample, Soak

FOLDER = ROOT / ".soak"
SAMPLE_EVERY_S = 5.0
SAY_EVERY = 12
"""Samples a line of progress."""
KV_CACHE_BYTES = 64 * MIB
"""Small, so that every page of it has been touched while the server warms up, and it evicts from then on."""
MAX_MODEL_LEN = 1024
"""The demo model's."""


class SoakServer(ServerProcess):
    """`manta serve` on the demo model."""

    def __init__(self) -> None:
        super().__init__(
            "manta", "demo", Setup(kv_cache_bytes=KV_CACHE_BYTES, max_model_len=MAX_MODEL_LEN), free_port()
        )


def soak(
    port: int,
    model: str,
    pid: int,
    seconds: float,
    sample_every_s: float = SAMPLE_EVERY_S,
    say: Callable[[str], None] = lambda _: None,
) -> Soak:
    """Loads the server at `port` and weighs the processes under `pid` for so long."""
    return asyncio.run(_soak(port, model, psutil.Process(pid), seconds, sample_every_s, say))


async def _soak(
    port: int, model: str, root: psutil.Process, seconds: float, sample_every_s: float, say: Callable[[str], None]
) -> Soak:
    observed = Observed()
    clients = Clients(port, model, observed)
    running = [asyncio.ensure_future(clients.run(kind, number)) for number, kind in enumerate(KINDS)]
    samples: list[Sample] = []
    try:
        while observed.seconds < seconds:
            at = observed.seconds
            samples.append(Sample(at, await asyncio.to_thread(weigh, root)))
            if len(samples) % SAY_EVERY == 0:
                say(_progress(samples[-1], observed))
            for client in running:
                if client.done():
                    client.result()  # a client ends by an error of its own only
            await asyncio.sleep(max(0, at + sample_every_s - observed.seconds))
    finally:
        for client in running:
            client.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return Soak(seconds, samples, observed)


def _progress(sample: Sample, observed: Observed) -> str:
    total = sum(sample.by_role.values()) / MIB
    statuses: Counter[int] = Counter()
    for (_, status), count in observed.statuses.items():
        statuses[status] += count
    answers = ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items()))
    return f"{sample.at / 60:5.1f} min: {total:7.1f} MiB; {answers}"


def weigh(root: psutil.Process) -> dict[str, int]:
    """Bytes (PSS, or where the system does not tell, USS) by role, of `root` and everything that it started."""
    found: Counter[str] = Counter()
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            memory = process.memory_full_info()
            found[role_of(process)] += getattr(memory, "pss", memory.uss)
    return dict(found)


def role_of(process: psutil.Process) -> str:
    """What a process of the server does; several may do the same."""
    command = process.cmdline()
    title = command[0].strip() if command else ""
    if title.startswith("ray::"):  # ray::ServeReplica:manta:engine, ray::GrammarWorker.method
        return title.removeprefix("ray::").removeprefix("ServeReplica:manta:").partition(".")[0]
    if "manta.structured.compiling.compile_process" in command:
        return "compile processes"
    return "serve" if "manta.cluster.cli" in command else process.name()


def main(arguments: Sequence[str] | None = None) -> int:
    """1 where a bar is not met. Ctrl-C and SIGTERM stop the server and give 130."""
    parser = argparse.ArgumentParser(prog="make soak", description="Memory and delays under constant mixed load.")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (default: 30)")
    parser.add_argument("--folder", type=pathlib.Path, default=FOLDER, help="where the tables go (default: .soak)")
    options = parser.parse_args(arguments)
    if options.minutes <= 0:
        parser.error(f"--minutes {options.minutes:g} is not above 0")
    try:
        with interrupted_once():
            found = _soak_a_server(options.minutes)
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    name = f"soak-{datetime.date.today().isoformat()}"
    print(machine(), end="\n\n")
    print(found.markdown())
    for path in found.write(options.folder, name):
        _say(f"written: {path}")
    return bool(found.problems())


def _soak_a_server(minutes: float) -> Soak:
    server = SoakServer()
    try:
        return soak(server.port, server.model_name, server.process.pid, 60 * minutes, say=_say)
    finally:
        server.stop()


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
