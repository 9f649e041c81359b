"""`manta bench adapters`: what LoRA adapters cost a decode step, in turns with an engine that has none, how much longer
the longest step is while adapters are loaded (`adapter_loads.py`), and the same steps in turns with vLLM
(`adapter_peer.py`). Each part ends within `--seconds` and what its engines take to start, with as many turns as fit.

Two engines take turns: one without adapters, and one that holds all of them. In the second one, turns differ in the
adapters that the requests name, or they name none. Rows have adapters in turn, so that a batch has as many different
ones as there are.

A ratio is the speed beside the engine without adapters. The floor is what the adapters leave of that speed at best: the
lower one of what their bytes leave if a step does nothing but read, and of what their operations leave if it does
nothing but multiply.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from safetensors.torch import save_file

from benchmarks.adapter_loads import measure_loads
from benchmarks.adapter_peer import measure_peer
from benchmarks.checkpoints import benchmark_checkpoint
from benchmarks.peers import add_python_options, pythons_of
from benchmarks.processes import BenchmarkError
from benchmarks.report import (
    MIN_PAIRS_FOR_VERDICT,
    TOLERANCE,
    Ratio,
    in_turns,
    machine,
    markdown_head,
    markdown_row,
    ratio_of,
    say_failure,
)
from manta.cluster.llm import LLM, SamplingParams
from manta.workers.checkpoints.memory import weight_bytes
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.models.families import describe

TARGETS = {"q and v": ("q_proj", "v_proj"), "all linears": ("_proj",)}
"""Ends of the names of the linears that an adapter changes."""
CONFIGURED = "none of those configured"
"""The side whose requests name no adapter, though the engine has some."""


class Bar(NamedTuple):
    """The least ratio of speeds."""

    least: float
    of_floor: bool = False
    """Whether it is a share of the floor, and not of the speed without adapters."""


BARS = {
    (CONFIGURED, False): Bar(0.99),
    (CONFIGURED, True): Bar(0.99),
    ("q and v", False): Bar(0.85),
    ("all linears", False): Bar(0.85, of_floor=True),
    ("q and v", True): Bar(0.93),
}
"""The bars, by what the requests name and whether a step has one row."""
PROMPT_TOKENS = 16
WARM_UP_STEPS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="manta bench adapters", description=__doc__)
    parser.add_argument("--model", help="folder of a model (default: the shape of Qwen2.5-0.5B)")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--num-adapters", type=int, default=16, help="different adapters in a batch (default: 16)")
    parser.add_argument("--weights", default="auto,int8", help="values of the option weights (default: auto,int8)")
    parser.add_argument("--rows", default="32,1", help="rows of a step (default: 32,1)")
    parser.add_argument("--turns", type=int, default=MIN_PAIRS_FOR_VERDICT)
    parser.add_argument("--steps", type=int, default=12, help="steps of a turn (default: 12)")
    parser.add_argument("--seconds", type=float, default=100.0, help="longest time of a part's turns (default: 100)")
    parser.add_argument("--parts", default="steps,loads", help="some of steps, loads and vllm (default: steps,loads)")
    add_python_options(parser, "vllm")
    options = parser.parse_args(arguments)
    try:
        pythons = pythons_of(options)
    except ValueError as error:
        parser.error(str(error))
    if "vllm" in options.parts and not pythons:
        parser.error("the part vllm needs --vllm-python, the Python that vLLM is installed in")
    model = pathlib.Path(options.model or benchmark_checkpoint("qwen2.5-0.5b"))
    print(machine(), file=sys.stderr)
    rows = [int(each) for each in options.rows.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        names = {what: _make(model, pathlib.Path(folder), what, options.num_adapters, options.rank) for what in TARGETS}
        if "loads" in options.parts:
            measure_loads(model, [*names["all linears"].values()], rows, options)
        if "steps" in options.parts:
            _measure_steps(model, names, rows, options)
        if "vllm" in options.parts:
            try:
                measure_peer(model, names, rows, pythons, options)
            except BenchmarkError as error:
                say_failure(f"manta bench: {error}")
                return 1
    return 0


def _measure_steps(
    model: pathlib.Path, names: dict[str, dict[str, str]], counts: Sequence[int], options: argparse.Namespace
) -> None:
    """Prints what adapters cost a step, for batches of some numbers of rows. `names` has the folders of adapters by
    what they change and by name.
    """
    folders = {name: path for of_what in names.values() for name, path in of_what.items()}
    columns = "ms a step without", "with", "ratio (95%)", "bytes leave", "operations leave", "of the floor", "bar"
    markdown_head("weights", "adapters on", "rows", *columns)
    kinds = options.weights.split(",")
    limit_s = options.seconds / (len(kinds) * len(counts))
    for weights in kinds:
        plain, adapting = (
            LLM(str(model), dtype="bfloat16", weights=weights, adapters=each, kv_cache_bytes=256 << 20)
            for each in ({}, folders)
        )
        for count in counts:
            of_rows = {what: [*each] for what, each in names.items()}
            _measure(plain, adapting, model, of_rows, count, options, limit_s)
        del plain, adapting


def _measure(
    plain: LLM,
    adapting: LLM,
    model: pathlib.Path,
    names: dict[str, list[str]],
    count: int,
    options: argparse.Namespace,
    limit_s: float,
) -> None:
    weights = plain.config.weights
    of_rows = {CONFIGURED: [""] * count}
    of_rows |= {what: [each[row % len(each)] for row in range(count)] for what, each in names.items()}
    sides = {what: functools.partial(_step_seconds, adapting, each, options.steps) for what, each in of_rows.items()}
    sides |= {"": functools.partial(_step_seconds, plain, [""] * count, options.steps)}
    seconds = in_turns(sides, options.turns, f"{weights}, {count} rows", limit_s)
    base = weight_bytes(model, "bfloat16", load_model_config(model), weights)
    base_in_dtype = weight_bytes(model, "bfloat16", load_model_config(model))
    for what in of_rows:
        sizes = [adapting.engine.model.adapters[name].num_bytes for name in dict.fromkeys(of_rows[what]) if name]
        of_bytes = base / (base + sum(sizes))
        of_operations = base_in_dtype / (base_in_dtype + max(sizes, default=0))  # each row has one adapter
        ratio = ratio_of(seconds[""], seconds[what])
        floor = min(of_bytes, of_operations)
        times = (f"{statistics.median(seconds[each]) * 1e3:.2f}" for each in ("", what))
        shares = (f"{share:.3f}" for share in (of_bytes, of_operations, ratio.median / floor))
        markdown_row(
            weights, what, count, *times, ratio, *shares, _verdict(what, count, ratio, floor, len(seconds[""]))
        )


def _verdict(what: str, count: int, ratio: Ratio, floor: float, num_turns: int) -> str:
    """Returns whether the bar is met, and with how many pairs where they are too few; empty where there is no bar."""
    bar = BARS.get((what, count == 1))
    if bar is None:
        return ""
    least = bar.least * (floor if bar.of_floor else 1)
    of_what, verdict = " of the floor" if bar.of_floor else "", "met" if ratio.low > least - TOLERANCE else "not met"
    text = f"{bar.least:g}{of_what} {verdict}"
    return text if num_turns >= MIN_PAIRS_FOR_VERDICT else f"{text} ({num_turns} pairs)"


def _step_seconds(llm: LLM, adapters: list[str], num_steps: int, turn: int) -> float:
    """Returns the median of decode steps with one row of each of `adapters`."""
    params = SamplingParams(temperature=0, max_tokens=num_steps + 2 * WARM_UP_STEPS, ignore_eos=True)
    for row, adapter in enumerate(adapters):
        llm.add_request(f"row-{row}", [100 + row] * PROMPT_TOKENS, params, adapter=adapter)
    for _ in range(WARM_UP_STEPS):
        llm.step()
    seconds = []
    for _ in range(num_steps):
        started = time.perf_counter()
        llm.step()
        seconds.append(time.perf_counter() - started)
    for row in range(len(adapters)):
        llm.abort(f"row-{row}")
    return statistics.median(seconds)


def _make(model: pathlib.Path, to: pathlib.Path, what: str, count: int, rank: int) -> dict[str, str]:
    """Writes random adapters of a model and returns their folders by name."""
    ends, found = TARGETS[what], {}
    parts = [
        (part.name, part.stored_rows or part.out_features, linear.in_features)
        for layer in describe(load_model_config(model)).layers
        for linear in layer.linears()
        for part in linear.parts
        if part.name.endswith(ends)
    ]
    for number in range(count):
        folder = to / f"{what}-{number}"
        folder.mkdir()
        generator = torch.Generator().manual_seed(number)
        tensors = {}
        for name, out_features, in_features in parts:
            for half, shape in (("A", (rank, in_features)), ("B", (out_features, rank))):
                values = torch.randn(shape, generator=generator) * 0.01
                tensors[f"base_model.model.{name}.lora_{half}.weight"] = values.to(torch.bfloat16)
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        found[f"{what}-{number}"] = str(folder)
    return found
