"""`manta bench mixers`: models whose layers are of several kinds, against floors and llama.cpp, and a second turn.

Shapes with the layers of Qwen3.5 (gated delta nets, every fourth layer attention) and of Gemma 3 (windows, every sixth
layer without), eight each. In `speed` a decode step of one row and the prefill of one prompt of 512 tokens are held
against floors that are measured in the same turn: the time to read all matrices, keys, values and states, or to
multiply the prompt by all matrices and its queries by its keys. In `turns` a conversation of 2,000 tokens gets an
answer, of which only the last part stays in the next prompt, as templates drop what a model has thought. Then the first
token of the second turn is timed, with Qwen3.5's layers and with as large ones of attention alone.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Sequence

from benchmarks.checkpoints import benchmark_checkpoint
from benchmarks.floors import Rates, Shape, bytes_of, measure_rates
from benchmarks.peers import PEERS, add_python_options, pythons_of
from benchmarks.processes import BenchmarkError, EngineProcess, Setup
from benchmarks.report import machine, ratio_of
from benchmarks.workloads import Prompts, PromptSource, alternate, step_seconds
from manta.workers.kept_weights import KEPT_BITS
from manta.workers.kernels import processor

HYBRID, WINDOWS, ATTENTION = "qwen3.5-8-layers", "gemma-3-8-layers", "qwen3-8-layers"
TOKEN_LIMIT = 30_000
STEPS, PROMPT = 96, 512
CONVERSATION, THOUGHTS, ANSWER, QUESTION = 2000, 150, 50, 100
"""Tokens of the first prompt, of what the model thinks, of its answer and of the second question."""
DECODE, PREFILL = "decode step", "prefill"


def turn(engine: EngineProcess, prompts: tuple[Prompts, Prompts]) -> dict[str, float]:
    """One turn of an engine: seconds of a decode step and of the prefill."""
    one, long = prompts
    step = step_seconds([engine.generate(one, STEPS)], 1)
    return {DECODE: step, PREFILL: engine.generate(long, 1).seconds}


def measure_speed(name: str, setup: Setup, num_turns: int) -> None:
    """Prints a decode step and a prefill of one shape, over floors and over llama.cpp if `setup` has its Python."""
    folder = benchmark_checkpoint(name)
    shape, source, rates = Shape(folder), PromptSource(TOKEN_LIMIT), list[Rates]()

    def next_turn() -> list[tuple[Prompts, Prompts]]:
        rates.append(measure_rates(processor.form()))
        return [(source(1, 32), source(1, PROMPT))]

    with contextlib.ExitStack() as stack:
        engines = [EngineProcess("manta", str(folder), setup)]
        stack.callback(engines[0].stop)
        if "llamacpp" in setup.pythons:
            file = PEERS["llamacpp"].formats["bfloat16"].prepare(folder, setup.pythons["llamacpp"])
            engines.append(EngineProcess("llamacpp", str(file), setup, 4))
            stack.callback(engines[1].stop)
        found = alternate(engines, num_turns, next_turn, turn, _say)
    counted = rates[1:]  # the first warmed up
    kept = [bytes_of(bits) for bits in KEPT_BITS[setup.weights]]
    floors = {
        DECODE: [shape.step_seconds(1, 32 + STEPS // 2, each.bfloat16, each.bandwidth, *kept) for each in counted],
        PREFILL: [shape.prefill_seconds(1, PROMPT, each.bfloat16) for each in counted],
    }
    for figure, floor in floors.items():
        own, *others = [[each[figure] for (each,) in turns] for turns in found]
        line = f"{name:18}{figure:14}{statistics.median(own) * 1e3:9.2f} ms   of floor {_ratio(own, floor)}"
        print(line + "".join(f"   over llama.cpp {_ratio(own, other)}" for other in others))


def measure_turns(setup: Setup, num_turns: int) -> None:
    """Prints the time to the first token of a second turn, with states and without."""
    source, cached = PromptSource(TOKEN_LIMIT), dict[str, list[int]]()

    def next_turn() -> list[Prompts]:
        return [source(1, CONVERSATION) + source(1, ANSWER + QUESTION)]

    def second_turn(engine: EngineProcess, prompts: Prompts) -> float:
        conversation, rest = prompts
        engine.generate([conversation], THOUGHTS + ANSWER)
        asked = engine.generate([conversation + rest], 1)
        cached.setdefault(names[id(engine)], []).append(asked.num_cached)
        return asked.seconds

    with contextlib.ExitStack() as stack:
        engines = [EngineProcess("manta", str(benchmark_checkpoint(name)), setup) for name in (HYBRID, ATTENTION)]
        names = {id(engine): name for engine, name in zip(engines, (HYBRID, ATTENTION), strict=True)}
        for engine in engines:
            stack.callback(engine.stop)
        found = alternate(engines, num_turns, next_turn, second_turn, _say)
    hybrid, attention = ([each for (each,) in turns] for turns in found)
    length = CONVERSATION + ANSWER + QUESTION
    for name, own in zip((HYBRID, ATTENTION), (hybrid, attention), strict=True):
        recomputed = 1 - statistics.median(cached[name]) / length
        print(
            f"{name:18}second turn   {statistics.median(own) * 1e3:9.2f} ms   {recomputed:.1%} of its prompt recomputed"
        )
    print(f"time of {HYBRID} over {ATTENTION}: {_ratio(attention, hybrid)}")


def _ratio(own: list[float], others: list[float]) -> str:
    """Returns others over own, where lower is better."""
    ratio = ratio_of(own, others, False)
    return f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when all was measured, 1 where an engine failed."""
    parser = argparse.ArgumentParser(
        prog="manta bench mixers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="speed,turns", help="of speed, turns (default: both)")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--weights", choices=("auto", "lossless"), default="auto", help="default: auto")
    add_python_options(parser, "llamacpp")
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    if unknown := [part for part in parts if part not in ("speed", "turns")]:
        parser.error(f"--parts {unknown[0]}: use speed, turns or both")
    try:
        setup = Setup(kv_cache_bytes=1 << 30, pythons=pythons_of(options), weights=options.weights)
    except ValueError as error:
        parser.error(str(error))
    print(machine(), file=sys.stderr)
    try:
        if "speed" in parts:
            for name in (HYBRID, WINDOWS):
                measure_speed(name, setup, options.turns)
        if "turns" in parts:
            measure_turns(setup, options.turns)
    except BenchmarkError as error:
        _say(f"manta bench: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
