"""`manta bench forms`: the CPU kernels of one form against what the hardware allows, and llama.cpp in the same sitting.

The floors are measured in turn with the engines, with as many threads: the bandwidth at which memory is read, and the
rate of torch's float32 matrix product, held to the form's instructions. A decode step reads the weights once and
multiplies them once a row; prefill multiplies them for every token, but the head for one a prompt. Attention reads and
multiplies the keys and values of every token.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Sequence

from benchmarks.checkpoints import benchmark_checkpoint
from benchmarks.floors import (
    MANY_WHOLE,
    TOKEN_LIMIT,
    Figure,
    floor_of,
    measure_floors,
    shape_of,
    turn,
    whole_turn,
)
from benchmarks.formats import compare_formats
from benchmarks.processes import BenchmarkError, EngineProcess, Setup
from benchmarks.report import bootstrap_interval, machine
from benchmarks.workloads import PromptSource, step_seconds
from manta.workers.kernels import build, processor

LARGE, TINY = "qwen2.5-0.5b", "tiny-llama"


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when all was measured, 1 where an engine failed."""
    parser = argparse.ArgumentParser(prog="manta bench forms", description=__doc__)
    forms = [each.name for each in processor.lower_forms(processor.best_form())]
    parser.add_argument("--form", choices=forms, default=processor.form().name, help="default: the one in use")
    parser.add_argument("--tiny", action="store_true", help="a step of the tiny model, in this form and in another")
    parser.add_argument("--against", choices=forms, default=forms[0], help="the other form (default: the best)")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--formats", action="store_true", help="weights in bfloat16, int8 and int4, in turns")
    parser.add_argument("--model", metavar="FOLDER", help="for --formats; default: the shape of Qwen2.5-0.5B")
    parser.add_argument("--llamacpp-python", metavar="PATH", help="Python of an environment with xllamacpp")
    parser.add_argument(
        "--gguf",
        metavar="FILE",
        action="append",
        help="the same model for llama.cpp; with --formats NAME=FILE",
    )
    options = parser.parse_args(arguments)
    if bool(options.gguf) != bool(options.llamacpp_python):
        parser.error("--llamacpp-python and --gguf belong together")
    if not options.formats and len(options.gguf or []) > 1:
        parser.error("several --gguf are for --formats")
    if build.find_compiler() is None:
        parser.error(f"there is no compiler: {build.REMEDY}")
    print(f"{machine()}, form {options.form}", file=sys.stderr)
    try:
        (formats if options.formats else tiny if options.tiny else large)(options)
    except BenchmarkError as error:
        print(f"manta bench: {error}", file=sys.stderr)
        return 1
    return 0


def large(options: argparse.Namespace) -> None:
    folder = str(benchmark_checkpoint(LARGE))
    shape = shape_of(folder)
    setup = Setup(
        kv_cache_bytes=2 << 30,
        environment={processor.VARIABLE: options.form},
        llamacpp_python=options.llamacpp_python,
    )
    prompts = PromptSource(TOKEN_LIMIT)
    own: dict[Figure, list[float]] = {}
    floors: dict[Figure, list[float]] = {}
    peer: dict[Figure, list[float]] = {}
    with contextlib.ExitStack() as stack:
        manta = _engine(stack, "manta", folder, setup)
        llama = _engine(stack, "llamacpp", options.gguf[0], setup, 32) if options.gguf else None
        with contextlib.suppress(KeyboardInterrupt):  # what is cut off shows what it has
            for number in range(options.turns + 1):
                measured = measure_floors(options.form)
                for engine, record in ((manta, own), (llama, peer)):
                    if engine is None:
                        continue
                    other = llama if engine is manta else manta
                    if other is not None:
                        other.rest()
                    engine.wake()
                    values = turn(engine, prompts)
                    if number in (1, 2):  # long
                        values[MANY_WHOLE] = whole_turn(engine, prompts)
                    if number == 0:
                        continue  # warms up
                    for figure, value in values.items():
                        record.setdefault(figure, []).append(value)
                if number:
                    for figure in own:
                        if (floor := floor_of(figure, shape, measured)) is not None:
                            floors.setdefault(figure, []).append(floor)
                    read, product = measured.bandwidth / 1e9, measured.rate / 1e9
                    print(f"turn {number}: read {read:.1f} GB/s, product {product:.0f} GFLOP/s", file=sys.stderr)
    print(f"{'':44}{'manta':>14}{'floor':>10}{'of floor':>10}{'95% interval':>16}{'llama.cpp':>14}{'ratio':>10}")
    for figure, values in own.items():
        line = f"{figure.name:44}{statistics.median(values):8.1f} {figure.unit:5}"
        line += _against(figure, values, floors.get(figure), interval=True)
        if figure in peer:
            line += _against(figure, values, peer[figure])
        print(line)


def _against(figure: Figure, values: list[float], others: list[float] | None, interval: bool = False) -> str:
    if others is None:
        return " " * 36
    ratios = [
        value / other if figure.higher_is_better else other / value
        for value, other in zip(values, others, strict=False)
    ]
    text = f"{statistics.median(others):10.1f}  {statistics.median(ratios):8.2f}"
    if interval:
        low, high = bootstrap_interval(ratios)
        text += f"  [{low:.2f}, {high:.2f}]  "
    return text


def formats(options: argparse.Namespace) -> None:
    folder = str(options.model or benchmark_checkpoint(LARGE))
    setup = Setup(
        kv_cache_bytes=1 << 30,
        environment={processor.VARIABLE: options.form},
        llamacpp_python=options.llamacpp_python,
    )
    form = next(each for each in processor.FORMS if each.name == options.form)
    compare_formats(form, folder, setup, dict(each.split("=", 1) for each in options.gguf or []), options.turns)


def tiny(options: argparse.Namespace) -> None:
    """Steps of the tiny model in two forms."""
    folder = str(benchmark_checkpoint(TINY))
    prompts = PromptSource(TOKEN_LIMIT)
    steps: dict[tuple[str, int], list[float]] = {}
    with contextlib.ExitStack() as stack:
        setups = [
            Setup(kv_cache_bytes=1 << 30, environment={processor.VARIABLE: form})
            for form in (options.form, options.against)
        ]
        engines = [_engine(stack, "manta", folder, setup) for setup in setups]
        for number in range(options.turns + 1):
            for name, engine in zip(("form", "other"), engines, strict=True):
                for rows, prompt, times in ((1, 32, 4), (32, 128, 1)):
                    timings = [engine.generate(prompts(rows, prompt), 128) for _ in range(times)]
                    if number:
                        steps.setdefault((name, rows), []).append(step_seconds(timings, rows) * 1e3)
    print(f"{'':20}{options.form:>14}{options.against:>14}{'times':>8}")
    for rows in (1, 32):
        form, other = steps["form", rows], steps["other", rows]
        ratio = statistics.median(a / b for a, b in zip(form, other, strict=True))
        values = f"{statistics.median(form):11.2f} ms{statistics.median(other):11.2f} ms{ratio:8.2f}"
        print(f"step, {rows} rows".ljust(20) + values)


def _engine(
    stack: contextlib.ExitStack, name: str, model: str, setup: Setup, max_num_sequences: int = 256
) -> EngineProcess:
    engine = EngineProcess(name, model, setup, max_num_sequences)
    stack.callback(engine.stop)
    return engine


if __name__ == "__main__":
    sys.exit(main())
