"""Decode steps with LoRA adapters in turns with vLLM, each engine in a process of its own that holds all adapters.

vLLM does not compile models with adapters on CPUs, so the rows without an adapter say what that costs.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.peers import vllm_fields
from benchmarks.processes import EngineProcess, Setup
from benchmarks.report import in_turns, markdown_head, markdown_row, ratio_of, say_failure
from benchmarks.workloads import PromptSource, step_seconds

NO_ADAPTER = "nothing"
PROMPT_TOKENS = 16
TOKEN_LIMIT = 30_000
MAX_MODEL_LEN = 512


class Asked(NamedTuple):
    """The adapters of the rows of a step."""

    what: str
    adapters: list[str]
    """The adapter of each row; empty for none."""


def measure_peer(
    model: pathlib.Path,
    names: Mapping[str, Mapping[str, str]],
    counts: Sequence[int],
    pythons: dict[str, str],
    options: argparse.Namespace,
) -> None:
    """Prints the steps of both engines. `names` has the folders of adapters by what they change and by name."""
    notes: list[str] = []
    fields = vllm_fields(options, pythons["vllm"], notes)
    folders = {name: path for of_what in names.values() for name, path in of_what.items()}
    setup = Setup(kv_cache_bytes=1 << 30, max_model_len=MAX_MODEL_LEN, pythons=pythons, adapters=folders, **fields)
    for note in notes:
        say_failure(note)
    with contextlib.ExitStack() as stack:
        engines = {}
        for name in ("manta", "vllm"):
            engines[name] = EngineProcess(name, str(model), setup, max(counts))
            stack.callback(engines[name].stop)
            print(f"{name} ready after {engines[name].start_seconds:.0f} s", file=sys.stderr)
        columns = "ms a step, Manta", "vLLM", "times faster (95%)", "pairs"
        markdown_head("adapters on", "rows", *columns)
        asked = [Asked(NO_ADAPTER, []), *(Asked(what, [*each]) for what, each in names.items())]
        limit_s = options.seconds / (len(counts) * len(asked))
        for count in counts:
            for each in asked:
                _compare(engines, each, count, options, limit_s)


def _compare(
    engines: Mapping[str, EngineProcess], asked: Asked, count: int, options: argparse.Namespace, limit_s: float
) -> None:
    source = PromptSource(TOKEN_LIMIT)

    def turn(engine: EngineProcess, number: int) -> float:
        adapters = [asked.adapters[row % len(asked.adapters)] for row in range(count)] if asked.adapters else []
        prompts = source.fixed(count, PROMPT_TOKENS, number)
        engine.wake()
        timing = engine.generate(prompts, options.steps + 2, adapters=adapters)
        engine.rest()
        return step_seconds([timing], count)

    sides = {name: lambda number, each=engine: turn(each, number) for name, engine in engines.items()}  # type: ignore[misc]
    seconds = in_turns(sides, options.turns, f"{asked.what}, {count} rows, beside vLLM", limit_s)
    times = (f"{statistics.median(seconds[name]) * 1e3:.2f}" for name in engines)
    markdown_row(asked.what, count, *times, ratio_of(seconds["manta"], seconds["vllm"], False), len(seconds["vllm"]))
