"""`manta bench adapters`: what LoRA adapters cost a decode step, in turns with the same model without them.

Rows have adapters in turn, so that a batch has as many different ones as there are. One engine holds all adapters, and
what differs between turns is which of them its requests name. `of the bytes` divides the ratio by what reading the
adapters' bytes beside the model's would leave of the speed: below 1 the rest is work.
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

import torch
from safetensors.torch import save_file

from benchmarks.checkpoints import benchmark_checkpoint
from benchmarks.report import in_turns, machine, markdown_head, markdown_row, ratio_of
from manta.cluster.llm import LLM, SamplingParams
from manta.workers.checkpoints.memory import weight_bytes
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.models.families import describe

TARGETS = {"q and v": ("q_proj", "v_proj"), "all linears": ("_proj",)}
"""Ends of the names of the linears that an adapter changes."""
PROMPT_TOKENS = 16
WARM_UP_STEPS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="manta bench adapters", description=__doc__)
    parser.add_argument("--model", help="folder of a model (default: the shape of Qwen2.5-0.5B)")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--num-adapters", type=int, default=16, help="different adapters in a batch (default: 16)")
    parser.add_argument("--weights", default="auto,int8", help="values of the option weights (default: auto,int8)")
    parser.add_argument("--rows", default="32,1", help="rows of a step (default: 32,1)")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--steps", type=int, default=12, help="steps of a turn (default: 12)")
    options = parser.parse_args(arguments)
    model = pathlib.Path(options.model or benchmark_checkpoint("qwen2.5-0.5b"))
    print(machine(), file=sys.stderr)
    rows = [int(each) for each in options.rows.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        names = {what: _make(model, pathlib.Path(folder), what, options.num_adapters, options.rank) for what in TARGETS}
        folders = {name: path for of_what in names.values() for name, path in of_what.items()}
        markdown_head("weights", "adapters on", "rows", "ms a step without", "with", "ratio", "of the bytes")
        for weights in options.weights.split(","):
            llm = LLM(str(model), dtype="bfloat16", weights=weights, adapters=folders, kv_cache_bytes=256 << 20)
            base = weight_bytes(model, "bfloat16", load_model_config(model), weights)
            for count in rows:
                _measure(llm, weights, base, {what: list(each) for what, each in names.items()}, count, options)
            del llm
    return 0


def _measure(
    llm: LLM, weights: str, base: int, names: dict[str, list[str]], count: int, options: argparse.Namespace
) -> None:
    sides = {"": [""] * count} | {what: [each[row % len(each)] for row in range(count)] for what, each in names.items()}
    seconds = in_turns(
        {what: functools.partial(_step_seconds, llm, of_rows, options.steps) for what, of_rows in sides.items()},
        options.turns,
        f"{weights}, {count} rows",
    )
    for what in names:
        used = {llm.engine.model.adapters[name].num_bytes for name in names[what]}
        added = sum(used) / len(used) * min(count, len(names[what]))
        ratio, left = ratio_of(seconds[""], seconds[what]).median, base / (base + added)
        times = (f"{statistics.median(seconds[each]) * 1e3:.2f}" for each in ("", what))
        markdown_row(weights, what, count, *times, f"{ratio:.3f}", f"{ratio / left:.3f}")


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
