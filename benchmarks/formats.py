"""`manta bench forms --formats`: weights in bfloat16, int8, int8 with `exact` and int4 in turns, against floors and
llama.cpp's formats.

The floor of a decode step is the time to read the weights at the measured bandwidth, or to multiply them at the
measured rate if that takes longer, and the same for keys and values. Rates are those of torch's own products of
bfloat16 and int8 (oneDNN), where the processor has instructions for them; elsewhere they follow from the float32
product's. A ratio to bfloat16 compares two engines of the same turn.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
from typing import NamedTuple

import msgspec

from benchmarks.floors import (
    BEST,
    MANY_WHOLE,
    TOKEN_LIMIT,
    Figure,
    Floors,
    floor_of,
    measure_floors,
    shape_of,
    turn,
    whole_turn,
)
from benchmarks.processes import EngineProcess, Setup
from benchmarks.report import bootstrap_interval
from benchmarks.workloads import PromptSource
from manta.workers.kept_weights import GROUPS, KEPT_BITS, SCALE_BYTES
from manta.workers.kernels import processor

FORMATS = {"bfloat16": "auto", "int8": "int8", "int8 exact": "int8", "int4": "int4"}
"""Names of formats, and the option `weights` that makes them of a checkpoint in bfloat16."""
EXACT = {"int8 exact": "int8"}
"""Formats with the option `exact`, and the same without it."""
PEERS_OF = {"bfloat16": ("bf16",), "int8": ("Q8_0",), "int8 exact": (), "int4": ("Q4_0", "Q4_K")}
"""Names of llama.cpp's formats that a format is compared with, as given in `--gguf NAME=FILE`."""

BFLOAT16_RATE = (
    BEST
    + """
left, right = torch.randn(2, 2048, 2048).bfloat16()
print(2 * 2048**3 / best(lambda: left @ right))
"""
)
INT8_RATE = (
    BEST
    + """
left, right = torch.randint(-127, 128, (2, 2048, 2048), dtype=torch.int8)
print(2 * 2048**3 / best(lambda: torch._int_mm(left, right)))
"""
)
INT8_OVER_FLOAT32 = {"avx512": 2, "avx_vnni": 4, "avx2": 2}
"""Rates of int8 products over float32's, by form, where torch's int8 product would take minutes. 32 products take one
instruction of AVX-VNNI, and two multiplications (`vpmaddubsw`, `vpmaddwd`) of AVX2; one multiply-add in float32 does 8.
With AVX-512 each does twice as many.
"""


class Rates(NamedTuple):
    bfloat16: float
    """Operations a second. Without instructions for bfloat16 the kernels widen it, so the rate is float32's."""
    int8: float
    bandwidth: float
    """Bytes a second."""


def measure_rates(form: processor.Form) -> Rates:
    floors = measure_floors(form.name)
    has_int8 = form.has_bfloat16 or form.name == "avx512_vnni"
    return Rates(
        bfloat16=_printed(BFLOAT16_RATE) if form.has_bfloat16 else floors.rate,
        int8=_printed(INT8_RATE) if has_int8 else INT8_OVER_FLOAT32.get(form.name, 1) * floors.rate,
        bandwidth=floors.bandwidth,
    )


def _printed(script: str) -> float:
    return float(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)


def bytes_of(bits: int | None) -> float:
    """Returns the bytes of a weight, with its share of a scale."""
    return 2.0 if bits is None else bits / 8 + SCALE_BYTES / GROUPS[bits]


def compare_formats(form: processor.Form, folder: str, setup: Setup, ggufs: dict[str, str], turns: int) -> None:
    """Prints a table of engines in this form. `ggufs` are files of the same model for llama.cpp, by the names of their
    formats.
    """
    shape, prompts = shape_of(folder), PromptSource(TOKEN_LIMIT)
    values: dict[str, dict[Figure, list[float]]] = {}
    floors: dict[str, dict[Figure, list[float]]] = {name: {} for name in FORMATS}
    with contextlib.ExitStack() as stack:
        engines: dict[str, EngineProcess] = {}
        for name, weights in FORMATS.items():
            engines[name] = EngineProcess(
                "manta", folder, msgspec.structs.replace(setup, weights=weights, exact=name in EXACT)
            )
            stack.callback(engines[name].stop)
        for name, file in ggufs.items():
            engines[name] = EngineProcess("llamacpp", file, setup, 32)
            stack.callback(engines[name].stop)
        for number in range(turns + 1):  # the first warms up
            rates = measure_rates(form)
            for name, engine in engines.items():
                for other in engines.values():
                    if other is not engine:
                        other.rest()
                engine.wake()
                found = turn(engine, prompts)
                if number == 1:  # long
                    found[MANY_WHOLE] = whole_turn(engine, prompts)
                if number:
                    for figure, value in found.items():
                        values.setdefault(name, {}).setdefault(figure, []).append(value)
            if number:
                for name, weights in FORMATS.items():
                    bits = KEPT_BITS[weights]
                    kept = shape._replace(layer_bytes=bytes_of(bits.layers), head_bytes=bytes_of(bits.head))
                    rate = rates.bfloat16 if bits.layers is None else rates.int8
                    for figure in values[name]:
                        floor = floor_of(figure, kept, Floors(rate, rates.bandwidth))
                        if floor is not None:
                            floors[name].setdefault(figure, []).append(floor)
                print(
                    f"turn {number}: read {rates.bandwidth / 1e9:.1f} GB/s, bfloat16 {rates.bfloat16 / 1e9:.0f} and "
                    f"int8 {rates.int8 / 1e9:.0f} GOP/s",
                    file=sys.stderr,
                )
    _print(values, floors)


def _print(values: dict[str, dict[Figure, list[float]]], floors: dict[str, dict[Figure, list[float]]]) -> None:
    print(f"{'':40}{'weights':>11}{'':>17}{'of floor':>10}{'to bfloat16':>26}   to llama.cpp")
    for figure in values["bfloat16"]:
        for name in FORMATS:
            own = values[name][figure]
            line = f"{figure.name:40}{name:>11}{statistics.median(own):11.2f} {figure.unit:5}"
            floor = floors[name].get(figure)
            line += "          " if floor is None else f"{_ratio(figure, own, floor)[0]:10.2f}"
            line += _told(figure, own, values["bfloat16"][figure])
            if name in EXACT:
                line += f"   {EXACT[name]}" + _told(figure, own, values[EXACT[name]][figure]).rstrip()
            for peer in PEERS_OF[name]:
                if figure in values.get(peer, {}):
                    line += f"   {peer} {statistics.median(values[peer][figure]):.1f}"
                    line += _told(figure, own, values[peer][figure]).rstrip()
            print(line)


def _ratio(figure: Figure, own: list[float], others: list[float]) -> tuple[float, list[float]]:
    """How many times better `own` is: the median, and the ratios of the turns."""
    ratios = [a / b if figure.higher_is_better else b / a for a, b in zip(own, others, strict=False)]
    return statistics.median(ratios), ratios


def _told(figure: Figure, own: list[float], others: list[float]) -> str:
    median, ratios = _ratio(figure, own, others)
    low, high = bootstrap_interval(ratios)
    return f"{median:8.2f} [{low:.2f}, {high:.2f}] "
