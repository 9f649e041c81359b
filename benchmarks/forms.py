"""`manta bench forms`: CPU kernels of one form, with weights in some formats, against floors and llama.cpp's formats.

All engines take turns, and the floors are measured in turn with them, with as many threads:

- A decode step takes the time to read the weights at the measured bandwidth, or to multiply them at the measured rate
  if that takes longer, and the same for keys and values.
- A prefill multiplies the weights for every token, but the head for one a prompt.
- Rates are those of torch's own products of bfloat16 and int8 (oneDNN), where the processor has instructions for them.
  Elsewhere they follow from the float32 product's, held to the form's instructions.

A ratio compares two engines of the same turn.
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

import msgspec

from benchmarks.checkpoints import benchmark_checkpoint
from benchmarks.processes import BenchmarkError, EngineProcess, Setup
from benchmarks.report import machine, ratio_of
from benchmarks.workloads import Prompts, PromptSource, alternate, step_seconds
from manta.workers.kept_weights import GROUPS, KEPT_BITS, SCALE_BYTES
from manta.workers.kernels import build, processor

LARGE = "qwen2.5-0.5b"
TOKEN_LIMIT = 30_000
MAX_MODEL_LEN = 512
WHOLE_RUNS = (2, 3)
"""Turns with a whole run; the first turn warms up."""
FORMATS = {"bfloat16": "auto", "int8": "int8", "int8 exact": "int8", "int4": "int4"}
"""Names of formats, and the option `weights` that makes them of a checkpoint in bfloat16."""
EXACT = {"int8 exact": "int8"}
"""Formats with the option `exact`, and the same without it."""
PEERS_OF = {"bfloat16": ("bf16",), "int8": ("Q8_0",), "int8 exact": (), "int4": ("Q4_0", "Q4_K")}
"""Names of llama.cpp's formats that a format is compared with, as given in `--gguf NAME=FILE`."""
ISA = {"avx2": "AVX2", "avx512": "AVX512_CORE", "avx512_bf16": "AVX512_CORE"}
"""Instruction sets to which oneDNN and MKL are limited, by form; other forms do not limit them."""
INT8_OVER_FLOAT32 = {"avx512": 2, "avx_vnni": 4, "avx2": 2}
"""Rates of int8 products over float32's, by form, where torch's int8 product would take minutes. 32 products take one
instruction of AVX-VNNI, and two multiplications (`vpmaddubsw`, `vpmaddwd`) of AVX2; one multiply-add in float32 does 8.
With AVX-512 each does twice as many.
"""
RATE = """
import sys, time, torch
def best(run):
    run(); times = []; stop = time.perf_counter() + 1
    while time.perf_counter() < stop or len(times) < 3:
        start = time.perf_counter(); run(); times.append(time.perf_counter() - start)
    return min(times)
side = 2048
match sys.argv[1]:
    case "bandwidth":
        data = torch.ones(2**27)
        print(data.nbytes / best(data.sum))
    case "int8":
        left, right = torch.randint(-127, 128, (2, side, side), dtype=torch.int8)
        print(2 * side**3 / best(lambda: torch._int_mm(left, right)))
    case name:
        left, right = torch.randn(2, side, side).to(getattr(torch, name))
        print(2 * side**3 / best(lambda: left @ right))
"""
"""The script that measures bytes a second, or operations a second of products of a dtype."""


class Rates(NamedTuple):
    bfloat16: float
    """Operations a second. Without instructions for bfloat16 the kernels widen it, so the rate is float32's. With them
    it is at least twice float32's, because an instruction (`vdpbf16ps`) takes twice as many numbers: torch's own
    product in bfloat16 may be slower than that in float32.
    """
    int8: float
    bandwidth: float
    """Bytes a second."""


def measure_rates(form: processor.Form) -> Rates:
    limit = {}
    if form.name in ISA:
        limit = {"ONEDNN_MAX_CPU_ISA": ISA[form.name], "MKL_ENABLE_INSTRUCTIONS": ISA[form.name][:6]}

    def measured(what: str) -> float:
        command = [sys.executable, "-c", RATE, what]
        done = subprocess.run(command, env={**os.environ, **limit}, capture_output=True, text=True, check=True)
        return float(done.stdout)

    float32 = measured("float32")
    has_int8 = form.has_bfloat16 or form.name == "avx512_vnni"
    return Rates(
        bfloat16=max(measured("bfloat16"), 2 * float32) if form.has_bfloat16 else float32,
        int8=measured("int8") if has_int8 else INT8_OVER_FLOAT32.get(form.name, 1) * float32,
        bandwidth=measured("bandwidth"),
    )


class Shape(NamedTuple):
    """Numbers of elements of a model's weights, the bytes of each element, and what attention adds."""

    layer_elements: int
    head_elements: int
    attention_products: int
    """Multiply-adds of a query token with one key and its value, in all layers."""
    kv_bytes: int
    """Bytes of a token's keys and values in all layers, in bfloat16."""
    layer_bytes: float = 2.0
    """Bytes of an element of the layers, scales included: 2 in bfloat16."""
    head_bytes: float = 2.0
    """Bytes of an element of the head, scales included."""

    def step_seconds(self, rows: int, context: int, rate: float, bandwidth: float) -> float:
        """A decode step: linears first wait for one thing, then attention for another."""
        elements = self.layer_elements + self.head_elements
        num_bytes = self.layer_elements * self.layer_bytes + self.head_elements * self.head_bytes
        linears = max(num_bytes / bandwidth, 2 * rows * elements / rate)
        keys = rows * context
        return linears + max(keys * self.kv_bytes / bandwidth, 2 * keys * self.attention_products / rate)

    def prefill_seconds(self, prompts: int, tokens: int, rate: float) -> float:
        pairs = prompts * tokens * (tokens + 1) / 2
        products = prompts * (tokens * self.layer_elements + self.head_elements) + pairs * self.attention_products
        return 2 * products / rate


def shape_of(folder: str) -> Shape:
    config = json.loads((pathlib.Path(folder) / "config.json").read_text())
    hidden, width, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = hidden // heads
    layer = hidden * (heads + 2 * kv_heads) * head_dim + heads * head_dim * hidden + 3 * hidden * width
    return Shape(
        layer_elements=layers * layer,
        head_elements=config["vocab_size"] * hidden,
        attention_products=layers * heads * head_dim * 2,
        kv_bytes=layers * kv_heads * head_dim * 2 * 2,
    )


def bytes_of(bits: int | None) -> float:
    """Returns the bytes of a weight, with its share of a scale."""
    return 2.0 if bits is None else bits / 8 + SCALE_BYTES / GROUPS[bits]


class Figure(NamedTuple):
    name: str
    unit: str
    higher_is_better: bool = True


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
    """One turn of an engine; steps are told by Manta only."""
    values = {}
    one = engine.generate(prompts.one, 96)
    values[ONE_WHOLE] = one.num_tokens / one.seconds
    values[PREFILL] = 16 * 128 / engine.generate(prompts.prefill, 1).seconds
    if one.steps:
        values[ONE] = step_seconds([one], 1) * 1e3
        values[MANY] = step_seconds([engine.generate(prompts.many, 32)], 32) * 1e3
    if prompts.whole:
        whole = engine.generate(prompts.whole, 64)
        values[MANY_WHOLE] = whole.num_tokens / whole.seconds
    return values


def floors_of(shape: Shape, format_name: str, rates: Rates) -> dict[Figure, float]:
    """The floors of one turn, for those figures that have one."""
    bits = KEPT_BITS[FORMATS[format_name]]
    shape = shape._replace(layer_bytes=bytes_of(bits.layers), head_bytes=bytes_of(bits.head))
    rate = rates.bfloat16 if bits.layers is None else rates.int8
    return {
        ONE: shape.step_seconds(1, 80, rate, rates.bandwidth) * 1e3,
        MANY: shape.step_seconds(32, 192, rate, rates.bandwidth) * 1e3,
        PREFILL: 16 * 128 / shape.prefill_seconds(16, 128, rate),
    }


def compare(
    form: processor.Form, folder: str, setup: Setup, formats: Sequence[str], ggufs: dict[str, str], num_turns: int
) -> None:
    """Prints a table of engines in this form. `ggufs` are files of the same model for llama.cpp, by the names of their
    formats.
    """
    shape, source = shape_of(folder), PromptSource(TOKEN_LIMIT)
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
            engines[name] = EngineProcess("manta", folder, options)
            stack.callback(engines[name].stop)
        for name, file in ggufs.items():
            engines[name] = EngineProcess("llamacpp", file, setup, 32)
            stack.callback(engines[name].stop)
        found = alternate(list(engines.values()), num_turns, next_turn, turn, _say)
    values = {name: [each for (each,) in turns] for name, turns in zip(engines, found, strict=True)}
    floors = {name: [floors_of(shape, name, each) for each in rates[1:]] for name in formats}  # the first warmed up
    _print(formats, values, floors)


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
            for other in (EXACT.get(name, ""), *PEERS_OF[name]):
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
    parser.add_argument("--llamacpp-python", metavar="PATH", help="Python of an environment with xllamacpp")
    peers = ", ".join(peer for names in PEERS_OF.values() for peer in names)
    parser.add_argument(
        "--gguf", metavar="NAME=FILE", action="append", default=[], help=f"the model for llama.cpp; NAME is {peers}"
    )
    options = parser.parse_args(arguments)
    formats = options.formats.split(",")
    if unknown := [name for name in formats if name not in FORMATS]:
        parser.error(f"--formats {unknown[0]}: use some of {', '.join(FORMATS)}")
    if bool(options.gguf) != bool(options.llamacpp_python):
        parser.error("--llamacpp-python and --gguf belong together")
    if build.find_compiler() is None:
        parser.error(f"there is no compiler: {build.REMEDY}")
    print(f"{machine()}, form {options.form}", file=sys.stderr)
    form = next(each for each in processor.lower_forms(processor.best_form()) if each.name == options.form)
    setup = Setup(
        kv_cache_bytes=1 << 30,
        max_model_len=MAX_MODEL_LEN,
        environment={processor.VARIABLE: form.name},
        llamacpp_python=options.llamacpp_python,
    )
    ggufs = dict(each.partition("=")[::2] for each in options.gguf)
    folder = options.model or str(benchmark_checkpoint(LARGE))
    try:
        compare(form, folder, setup, formats, ggufs, options.turns)
    except BenchmarkError as error:
        _say(f"manta bench: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
