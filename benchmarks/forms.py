"""`manta bench forms`: CPU kernels of one form, with weights in some formats, against floors and llama.cpp's formats.

All engines take turns, and the floors (`benchmarks/floors.py`) are measured in turn with them, with as many threads.
A ratio compares two engines of the same turn.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from benchmarks.checkpoints import benchmark_checkpoint
from benchmarks.floors import Rates, Shape, bytes_of, measure_rates
from benchmarks.peers import PEERS, add_python_options, pythons_of
from benchmarks.processes import BenchmarkError, EngineProcess, Setup
from benchmarks.report import Figure, machine, ratio_of
from benchmarks.workloads import Prompts, PromptSource, alternate, step_seconds
from manta.workers.kept_weights import KEPT_BITS, LOSSLESS_BITS
from manta.workers.kernels import build, processor

LARGE = "qwen2.5-0.5b"
TOKEN_LIMIT = 30_000
MAX_MODEL_LEN = 512
WHOLE_RUNS = (2, 3)
"""Turns with a whole run; the first turn warms up."""
FORMATS = {"bfloat16": "auto", "lossless": "lossless", "int8": "int8", "int8 exact": "int8", "int4": "int4"}
"""Names of formats, and the option `weights` that makes them of a checkpoint in bfloat16."""
EXACT = {"int8 exact": "int8"}
"""Formats with the option `exact`, and the same without it."""


ONE = Figure("one row, 32 in, 96 out: decode step", "ms", False)
ONE_WHOLE = Figure("one row, 32 in, 96 out: output", "tok/s")
MANY = Figure("32 rows: decode step around context 192", "ms", False)
MANY_WHOLE = Figure("32 x (128 in, 64 out): output", "tok/s")
PREFILL = Figure("prefill, 16 x 128", "tok/s")


class TurnPrompts(NamedTuple):
    """The prompts of one turn, the same for every engine."""

    one: Prompts
    prefill: Prompts
    many: Prompts
    whole: Prompts
    """Empty in most turns, because a whole run takes long."""


def turn(engine: EngineProcess, prompts: TurnPrompts) -> dict[Figure, float]:
    """One turn of an engine."""
    values = {}
    one = engine.generate(prompts.one, 96)
    values[ONE_WHOLE] = one.num_tokens / one.seconds
    values[PREFILL] = 16 * 128 / engine.generate(prompts.prefill, 1).seconds
    values[ONE] = step_seconds([one], 1) * 1e3
    values[MANY] = step_seconds([engine.generate(prompts.many, 32)], 32) * 1e3
    if prompts.whole:
        whole = engine.generate(prompts.whole, 64)
        values[MANY_WHOLE] = whole.num_tokens / whole.seconds
    return values


def floors_of(shape: Shape, format_name: str, rates: Rates) -> dict[Figure, float]:
    """The floors of one turn, for those figures that have one."""
    bits = KEPT_BITS[FORMATS[format_name]]
    kept = bytes_of(bits.layers), bytes_of(bits.head)
    rate = rates.bfloat16 if bits.layers in (None, LOSSLESS_BITS) else rates.int8
    return {
        ONE: shape.step_seconds(1, 80, rate, rates.bandwidth, *kept) * 1e3,
        MANY: shape.step_seconds(32, 192, rate, rates.bandwidth, *kept) * 1e3,
        PREFILL: 16 * 128 / shape.prefill_seconds(16, 128, rate),
    }


def compare(form: processor.Form, folder: pathlib.Path, setup: Setup, formats: Sequence[str], num_turns: int) -> None:
    """Prints a table of engines in this form, and of llama.cpp in the same formats where `setup` has its Python."""
    shape, source = Shape(folder), PromptSource(TOKEN_LIMIT)
    rates: list[Rates] = []

    def next_turn() -> list[TurnPrompts]:
        rates.append(measure_rates(form))
        read, bfloat16, int8 = (f"{each / 1e9:.1f}" for each in (rates[-1].bandwidth, *rates[-1][:2]))
        _say(f"read {read} GB/s, bfloat16 {bfloat16} and int8 {int8} GOP/s")
        whole = source(32, 128) if len(rates) in WHOLE_RUNS else []
        return [TurnPrompts(source(1, 32), source(16, 128), source.fixed(32, 176, 1), whole)]

    with contextlib.ExitStack() as stack:
        engines: dict[str, EngineProcess] = {}
        for name in formats:
            options = msgspec.structs.replace(setup, weights=FORMATS[name], exact=name in EXACT)
            engines[name] = EngineProcess("manta", str(folder), options)
            stack.callback(engines[name].stop)
        for name in formats:
            if "llamacpp" in setup.pythons and name in PEERS["llamacpp"].formats:
                file = PEERS["llamacpp"].formats[name].prepare(folder, setup.pythons["llamacpp"])
                engines[_beside(name)] = EngineProcess("llamacpp", str(file), setup, 32)
                stack.callback(engines[_beside(name)].stop)
        found = alternate(list(engines.values()), num_turns, next_turn, turn, _say)
    values = {name: [each for (each,) in turns] for name, turns in zip(engines, found, strict=True)}
    floors = {name: [floors_of(shape, name, each) for each in rates[1:]] for name in formats}  # the first warmed up
    _print(formats, values, floors)


def _beside(name: str) -> str:
    return f"llama.cpp {name}"


def _print(
    formats: Sequence[str],
    values: dict[str, list[dict[Figure, float]]],
    floors: dict[str, list[dict[Figure, float]]],
) -> None:
    first = formats[0]
    print(f"{'':40}{'weights':>11}{'':>17}{'of floor':>23}{'to ' + first:>23}   to llama.cpp")

    def column(turns: list[dict[Figure, float]], figure: Figure) -> list[float]:
        return [each[figure] for each in turns if figure in each]

    def told(own: list[float], others: list[float], figure: Figure) -> str:
        ratio = ratio_of(own, others, figure.higher_is_better)
        return f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"

    for figure in (ONE, ONE_WHOLE, MANY, MANY_WHOLE, PREFILL):
        for name in formats:
            own, floor = column(values[name], figure), column(floors[name], figure)
            line = f"{figure.name:40}{name:>11}{statistics.median(own):11.2f} {figure.unit:5}"
            line += (
                f"{told(own, floor, figure) if floor else '':>23}{told(own, column(values[first], figure), figure):>23}"
            )
            for other in (EXACT.get(name, ""), _beside(name)):
                if others := column(values.get(other, []), figure):
                    line += f"   {other} {statistics.median(others):.1f} {told(own, others, figure)}"
            print(line)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when all was measured, 1 where an engine failed."""
    parser = argparse.ArgumentParser(
        prog="manta bench forms", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    forms = [each.name for each in processor.lower_forms(processor.best_form())]
    parser.add_argument("--form", choices=forms, default=processor.form().name, help="default: the one in use")
    parser.add_argument("--formats", default="bfloat16", help=f"some of {', '.join(FORMATS)} (default: bfloat16)")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--model", metavar="FOLDER", help="default: random weights in the shape of Qwen2.5-0.5B")
    add_python_options(parser, "llamacpp")
    options = parser.parse_args(arguments)
    formats = options.formats.split(",")
    if unknown := [name for name in formats if name not in FORMATS]:
        parser.error(f"--formats {unknown[0]}: use some of {', '.join(FORMATS)}")
    try:
        pythons = pythons_of(options)
    except ValueError as error:
        parser.error(str(error))
    if build.find_compiler() is None:
        parser.error(f"there is no compiler: {build.REMEDY}")
    print(f"{machine()}, form {options.form}", file=sys.stderr)
    form = next(each for each in processor.lower_forms(processor.best_form()) if each.name == options.form)
    setup = Setup(
        kv_cache_bytes=1 << 30,
        max_model_len=MAX_MODEL_LEN,
        environment={processor.VARIABLE: form.name},
        pythons=pythons,
    )
    folder = pathlib.Path(options.model) if options.model else benchmark_checkpoint(LARGE)
    try:
        compare(form, folder, setup, formats, options.turns)
    except BenchmarkError as error:
        _say(f"manta bench: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
