"""`manta bench forms`: the CPU kernels of one form against what the hardware allows, and llama.cpp in the same sitting.

The floors are measured in turn with the engines, with as many threads: the bandwidth at which memory is read, and the
rate of torch's float32 matrix product, held to the form's instructions. A decode step reads the weights once and
multiplies them once a row; prefill multiplies them for every token, but the head for one a prompt.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.checkpoints import benchmark_checkpoint
from benchmarks.processes import BenchmarkError, EngineProcess, Setup
from benchmarks.report import bootstrap_interval, machine
from benchmarks.workloads import PromptSource, step_seconds
from workers.kernels import build, processor

LARGE, TINY = "qwen2.5-0.5b", "tiny-llama"
TOKEN_LIMIT = 30_000
ISA = {"avx2": "AVX2", "avx512": "AVX512_CORE", "avx512_bf16": "AVX512_CORE"}
"""What oneDNN and MKL are held to; other forms leave torch free."""

FLOORS = """
import json, time, torch
def best(run, bound=1.0):
    run(); times = []; stop = time.perf_counter() + bound
    while time.perf_counter() < stop or len(times) < 3:
        start = time.perf_counter(); run(); times.append(time.perf_counter() - start)
    return min(times)
left, right = torch.randn(2, 2048, 2048)
rate = 2 * 2048**3 / best(lambda: left @ right)
del left, right
data = torch.ones(2**27)
print(json.dumps({"rate": rate, "bandwidth": data.nbytes / best(data.sum)}))
"""


class Floors(NamedTuple):
    rate: float
    """Operations a second."""
    bandwidth: float
    """Bytes a second."""


class Shape(NamedTuple):
    """What one token costs a model in bfloat16."""

    layer_elements: int
    head_elements: int

    def step_seconds(self, rows: int, floors: Floors) -> float:
        elements = self.layer_elements + self.head_elements
        return max(2 * elements / floors.bandwidth, 2 * rows * elements / floors.rate)

    def prefill_seconds(self, prompts: int, tokens: int, floors: Floors) -> float:
        return 2 * (prompts * tokens * self.layer_elements + prompts * self.head_elements) / floors.rate


def shape_of(folder: str) -> Shape:
    config = json.loads((pathlib.Path(folder) / "config.json").read_text())
    hidden, width = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = hidden // heads
    layer = hidden * (heads + 2 * kv_heads) * head_dim + heads * head_dim * hidden + 3 * hidden * width
    return Shape(config["num_hidden_layers"] * layer, config["vocab_size"] * hidden)


def measure_floors(form: str) -> Floors:
    limit = {"ONEDNN_MAX_CPU_ISA": ISA[form], "MKL_ENABLE_INSTRUCTIONS": ISA[form][:6]} if form in ISA else {}
    done = subprocess.run(
        [sys.executable, "-c", FLOORS], env={**os.environ, **limit}, capture_output=True, text=True, check=True
    )
    return Floors(**json.loads(done.stdout))


class Figure(NamedTuple):
    name: str
    unit: str
    higher_is_better: bool = True


ONE = Figure("one row, 32 in, 96 out: decode step", "ms", False)
ONE_WHOLE = Figure("one row, 32 in, 96 out: output", "tok/s")
MANY = Figure("32 rows: decode step around context 192", "ms", False)
MANY_WHOLE = Figure("32 x (128 in, 64 out): output", "tok/s")
PREFILL = Figure("prefill, 16 x 128", "tok/s")


def turn(engine: EngineProcess, prompts: PromptSource) -> dict[Figure, float]:
    """One turn of an engine; steps are told by Manta only."""
    values = {}
    one = engine.generate(prompts(1, 32), 96)
    values[ONE_WHOLE] = one.num_tokens / one.seconds
    prefill = engine.generate(prompts(16, 128), 1)
    values[PREFILL] = 16 * 128 / prefill.seconds
    if one.steps:
        values[ONE] = step_seconds([one], 1) * 1e3
        values[MANY] = step_seconds([engine.generate(prompts.fixed(32, 176, 1), 32)], 32) * 1e3
    return values


def whole_turn(engine: EngineProcess, prompts: PromptSource) -> float:
    timing = engine.generate(prompts(32, 128), 64)
    return timing.num_tokens / timing.seconds


def floor_of(figure: Figure, shape: Shape, floors: Floors) -> float | None:
    if figure is ONE:
        return shape.step_seconds(1, floors) * 1e3
    if figure is MANY:
        return shape.step_seconds(32, floors) * 1e3
    if figure is PREFILL:
        return 16 * 128 / shape.prefill_seconds(16, 128, floors)
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when all was measured, 1 where an engine failed."""
    parser = argparse.ArgumentParser(prog="manta bench forms", description=__doc__)
    forms = [each.name for each in processor.lower_forms(processor.best_form())]
    parser.add_argument("--form", choices=forms, default=processor.form().name, help="default: the one in use")
    parser.add_argument("--tiny", action="store_true", help="a step of the tiny model, in this form and in another")
    parser.add_argument("--against", choices=forms, default=forms[0], help="the other form (default: the best)")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--llamacpp-python", metavar="PATH", help="Python of an environment with xllamacpp")
    parser.add_argument("--gguf", metavar="FILE", help="the same model for llama.cpp")
    options = parser.parse_args(arguments)
    if bool(options.gguf) != bool(options.llamacpp_python):
        parser.error("--llamacpp-python and --gguf belong together")
    if build.find_compiler() is None:
        parser.error(f"there is no compiler: {build.REMEDY}")
    print(f"{machine()}, form {options.form}", file=sys.stderr)
    try:
        (tiny if options.tiny else large)(options)
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
        llama = _engine(stack, "llamacpp", options.gguf, setup, 32) if options.gguf else None
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
