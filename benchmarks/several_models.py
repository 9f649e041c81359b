"""`manta bench several-models`: the speed of each of several models at one address while the others idle, over its
speed as the only model of a server.

The server of all models stays. The server of one model after the other runs beside it, and both take turns. In a turn a
few streams ask the one model for tokens over HTTP, and the processes of the other server are paused. A turn of a small
model has more requests, so that it lasts as long as that of a large one.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import sys
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks import checkpoints
from benchmarks.http_load import run_load
from benchmarks.processes import BenchmarkError, ServerProcess, Setup, free_port
from benchmarks.report import machine, markdown_head, markdown_row, ratio_of, say_failure
from benchmarks.workloads import alternate

SHAPES = ("tiny-llama", "qwen2.5-0.5b", "qwen3-8-layers")
"""One of each of three families."""
SETUP = Setup(kv_cache_bytes=1 << 29)
NUM_PROMPT_TOKENS = 64
LEAST_ROUNDS, TURN_S = 2, 3.0
"""Requests of each stream in a turn, and the seconds that a turn takes at least."""
BAR = 0.95


class Load(NamedTuple):
    """The requests of a turn."""

    prompts: list[list[int]]
    num_tokens: int
    num_streams: int


class Address(ServerProcess):
    """A Manta server. `models` is the folder of its only model, or the folders of several by their names."""

    def __init__(self, models: str | dict[str, str]) -> None:
        super().__init__("manta", models, SETUP, free_port())
        self.spins = True  # so that its processes are paused in the other server's turns, however little they do

    def tokens_per_s(self, load: Load) -> float:
        found = run_load(self.port, self.model_name, load.prompts, load.num_tokens, load.num_streams)
        return found.num_tokens / found.seconds


def measure(names: Sequence[str], measured: Sequence[str], num_turns: int, num_streams: int, num_tokens: int) -> None:
    """Serves all `names`, and prints a row for each one that is `measured`."""
    folders = {name: str(checkpoints.benchmark_checkpoint(name)) for name in names}
    draw = random.Random(0)

    def load(rounds: int) -> Load:
        prompts = [draw.choices(range(10, 500), k=NUM_PROMPT_TOKENS) for _ in range(rounds * num_streams)]
        return Load(prompts, num_tokens, num_streams)

    together = Address(folders)
    try:
        for name in measured:
            together.model_name = name
            alone = Address(folders[name])
            try:
                together.rest()
                alone.tokens_per_s(load(LEAST_ROUNDS))  # the first requests are slower
                speed = alone.tokens_per_s(load(LEAST_ROUNDS))
                rounds = max(LEAST_ROUNDS, math.ceil(TURN_S * speed / (num_streams * num_tokens)))
                draws = functools.partial(lambda rounds: [load(rounds)], rounds)
                found = alternate([together, alone], num_turns, draws, Address.tokens_per_s, _hear)
            finally:
                alone.stop()
                together.wake()
            beside, by_itself = ([speed for (speed,) in turns] for turns in found)
            ratio = ratio_of(beside, by_itself)
            verdict = "met" if ratio.low >= BAR else "missed" if ratio.high < BAR else "open"
            markdown_row(name, f"{max(by_itself):.0f}", f"{max(beside):.0f}", ratio, f"{BAR} {verdict}")
    finally:
        together.stop()


def _hear(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="manta bench several-models",
        description="The speed of each of several models at one address while the others idle.",
    )
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"at least two (default: {','.join(SHAPES)})")
    parser.add_argument("--measured", metavar="SHAPES", help="the shapes that are asked (default: all)")
    parser.add_argument("--turns", type=int, default=10, help="of each server and model (default: 10)")
    parser.add_argument("--streams", type=int, default=4, help="at the same time (default: 4)")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer (default: 64)")
    options = parser.parse_args(arguments)
    names = options.shapes.split(",")
    if len(set(names)) < 2 or not checkpoints.SHAPES.keys() >= set(names):
        parser.error(f"--shapes {options.shapes}: name at least two of {', '.join(checkpoints.SHAPES)}")
    measured = names if options.measured is None else options.measured.split(",")
    if not set(measured) <= set(names):
        parser.error(f"--measured {options.measured}: name some of --shapes, {', '.join(names)}")
    print(machine(), file=sys.stderr)
    markdown_head("model", "alone, best tokens/s", "beside idle models", "ratio (95%)", "bar")
    try:
        measure(names, measured, options.turns, options.streams, options.tokens)
    except BenchmarkError as error:
        say_failure(f"manta bench several-models: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
