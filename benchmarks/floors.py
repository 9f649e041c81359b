"""Measures an engine for one turn of `manta bench forms`, and the floors of its figures that the hardware sets.

Floors are the bandwidth at which memory is read and the rate of torch's own matrix products, in a process of their own.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import NamedTuple

from benchmarks.processes import EngineProcess
from benchmarks.workloads import PromptSource, step_seconds

TOKEN_LIMIT = 30_000
ISA = {"avx2": "AVX2", "avx512": "AVX512_CORE", "avx512_bf16": "AVX512_CORE"}
"""Instruction sets to which oneDNN and MKL are limited, by form; other forms do not limit them."""

BEST = """
import json, time, torch
def best(run, bound=1.0):
    run(); times = []; stop = time.perf_counter() + bound
    while time.perf_counter() < stop or len(times) < 3:
        start = time.perf_counter(); run(); times.append(time.perf_counter() - start)
    return min(times)
"""
"""The beginning of the scripts that measure a rate: `best` returns the shortest time of a function."""
FLOORS = (
    BEST
    + """
left, right = torch.randn(2, 2048, 2048)
rate = 2 * 2048**3 / best(lambda: left @ right)
del left, right
data = torch.ones(2**27)
print(json.dumps({"rate": rate, "bandwidth": data.nbytes / best(data.sum)}))
"""
)


class Floors(NamedTuple):
    rate: float
    """Operations a second."""
    bandwidth: float
    """Bytes a second."""


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

    def step_seconds(self, rows: int, context: int, floors: Floors) -> float:
        """A decode step: linears first wait for one thing, then attention for another."""
        elements = self.layer_elements + self.head_elements
        num_bytes = self.layer_elements * self.layer_bytes + self.head_elements * self.head_bytes
        linears = max(num_bytes / floors.bandwidth, 2 * rows * elements / floors.rate)
        keys = rows * context
        return linears + max(keys * self.kv_bytes / floors.bandwidth, 2 * keys * self.attention_products / floors.rate)

    def prefill_seconds(self, prompts: int, tokens: int, floors: Floors) -> float:
        pairs = prompts * tokens * (tokens + 1) / 2
        products = prompts * (tokens * self.layer_elements + self.head_elements) + pairs * self.attention_products
        return 2 * products / floors.rate


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
        return shape.step_seconds(1, 80, floors) * 1e3
    if figure is MANY:
        return shape.step_seconds(32, 192, floors) * 1e3
    if figure is PREFILL:
        return 16 * 128 / shape.prefill_seconds(16, 128, floors)
    return None
