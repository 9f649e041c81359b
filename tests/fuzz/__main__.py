"""`make fuzz MINUTES=10 SEED=1`: random cases against the plain engine; `make fuzz CASE=file`: one case again; and with
`ARGS=--http` clients of all kinds against a live server; with `ARGS=--numbers` extreme numbers in schemas, options and
files.

Exits with 1 where a case failed. Whoever tests something else than an engine in this process gives `Campaign` another
`Check`.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import pathlib
import random
import sys
import time
from collections.abc import Iterable

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from tests.conftest import PLUGIN
from tests.fuzz import cases, engines
from tests.fuzz.campaign import Campaign, check_engine
from tests.fuzz.generate import generate, generate_exact, generate_recurrent


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description="Random cases against the plain engine.")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: 10)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first case (default: the time)")
    parser.add_argument("--count", type=int, help="cases, if fewer than the time allows")
    parser.add_argument("--device", choices=("auto", "tpu"), default="auto", help="tpu: the JAX worker, simulated")
    parser.add_argument("--recurrent", action="store_true", help="models with recurrent states")
    parser.add_argument("--exact", action="store_true", help="exact engines, with a model of each mixer")
    parser.add_argument("--http", action="store_true", help="over HTTP against a live server")
    parser.add_argument("--numbers", action="store_true", help="extreme numbers in schemas, options and files")
    parser.add_argument("--case", type=pathlib.Path, help="a case to run again, and nothing else")
    options = parser.parse_args()
    if options.http:
        return fuzz_http(options.seed, 60 * options.minutes)
    if options.numbers:
        return fuzz_numbers(itertools.islice(itertools.count(options.seed), options.count), 60 * options.minutes)
    sys.path.append(str(PLUGIN))  # as the tests' fixture `plugin` does
    logging.disable(logging.ERROR)  # injected faults are logged, as they should be
    make = generate_exact if options.exact else generate_recurrent if options.recurrent else generate
    campaign = Campaign(check_engine, make)
    if options.device == "tpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    engines.DEVICE = options.device
    if options.case is not None:
        report = check_engine(cases.load(options.case))
        print(*report.problems, sep="\n")
        return bool(report.problems)
    print(f"seeds from {options.seed}: the same ones make the same cases", flush=True)
    seeds = itertools.islice(itertools.count(options.seed), options.count)
    campaign.run(seeds, 60 * options.minutes)
    print(campaign.table())
    return bool(campaign.failed)


def fuzz_http(seed: int, seconds: float) -> int:
    """Clients of all kinds; see `tests/fuzz/http/campaign.py`."""
    from tests.fuzz.http.campaign import HttpCampaign, serving_processes
    from tests.server import shared_server

    server = shared_server()
    try:
        campaign = HttpCampaign(server.port, server.model, seed, serving_processes(server.process.pid))
        print(f"seed {seed}: the same one makes the same clients", flush=True)
        campaign.run(seconds)
    finally:
        server.stop()
    if campaign.failures:
        print(f"The server printed:\n{server.printed[-10_000:]}\n")
    print(*campaign.failures, campaign.table(), sep="\n\n")
    return bool(campaign.failures)


def fuzz_numbers(seeds: Iterable[int], seconds: float) -> int:
    """Cases of `tests/fuzz/extreme_files.py` and of `tests/structured/test_schema_numbers.py`, one of each a seed."""
    from tests.fuzz.extreme_files import CHECKS
    from tests.structured.test_schema_numbers import BACKENDS, a_case, check

    def check_schema(rng: random.Random) -> None:
        check(*a_case(rng), rng.choice(BACKENDS))

    checks = {"schemas": check_schema, **CHECKS}
    ends, num_cases, num_failed = time.monotonic() + seconds, 0, 0
    for seed in itertools.takewhile(lambda _: time.monotonic() < ends, seeds):
        num_cases += 1
        for name, check_one in checks.items():
            try:
                check_one(random.Random(seed))
            except Exception as error:
                num_failed += 1
                print(f"seed {seed}, {name}: {type(error).__name__}: {error}", flush=True)
    print(f"{num_cases} seeds of {', '.join(checks)}: {num_failed} failed")
    return bool(num_failed)


if __name__ == "__main__":
    sys.exit(main())
