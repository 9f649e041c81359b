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
import json
import pathlib
import statistics
import sys
from collections.abc import Sequence

from benchmarks.checkpoints import benchmark_checkpoint
from benchmarks.forms import Rates, measure_rates
from benchmarks.processes import BenchmarkError, EngineProcess, Setup
from benchmarks.report import machine, ratio_of
from benchmarks.workloads import Prompts, PromptSource, alternate, step_seconds
from manta.workers.kernels import processor

HYBRID, WINDOWS, ATTENTION = "qwen3.5-8-layers", "gemma-3-8-layers", "qwen3-8-layers"
TOKEN_LIMIT = 30_000
STEPS, PROMPT = 96, 512
CONVERSATION, THOUGHTS, ANSWER, QUESTION = 2000, 150, 50, 100
"""Tokens of the first prompt, of what the model thinks, of its answer and of the second question."""
DECODE, PREFILL = "decode step", "prefill"
ELEMENT_BYTES = 2
"""Bytes of a weight, a key or a value in bfloat16."""
STATE_BYTES = 4
"""Bytes of a number of a state."""


class Shape:
    """The numbers that a step of one row and a prefill cannot do without, from a checkpoint's files."""

    def __init__(self, folder: pathlib.Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        shapes = tensor_shapes(folder / "model.safetensors")
        head = "lm_head.weight" if "lm_head.weight" in shapes else "model.embed_tokens.weight"
        others = {"lm_head.weight", "model.embed_tokens.weight"}
        self.head_elements = shapes[head][0] * shapes[head][1]
        self.layer_elements = sum(
            rows[0] * rows[1] for name, rows in shapes.items() if len(rows) == 2 and name not in others
        )
        kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
        self.attending = [kind for kind in kinds if kind != "linear_attention"]
        num_states = len(kinds) - len(self.attending)
        width = config.get("linear_key_head_dim", 0) * config.get("linear_value_head_dim", 0)
        self.state_elements = num_states * config.get("linear_num_value_heads", 0) * width
        self.window = config.get("sliding_window") or sys.maxsize
        self.query_width = config["num_attention_heads"] * config["head_dim"]
        self.kv_width = config["num_key_value_heads"] * config["head_dim"]

    def _keys(self, context: int) -> int:
        """Returns the keys that a token reads in all layers."""
        return sum(min(context, self.window if kind == "sliding_attention" else context) for kind in self.attending)

    def step_seconds(self, context: int, bandwidth: float) -> float:
        """A decode step of one row, from a memory of so many bytes a second. It reads each state and writes it."""
        weights = (self.layer_elements + self.head_elements) * ELEMENT_BYTES
        keys = self._keys(context) * self.kv_width * 2 * ELEMENT_BYTES
        return (weights + keys + self.state_elements * 2 * STATE_BYTES) / bandwidth

    def prefill_seconds(self, num_tokens: int, rate: float) -> float:
        """A prefill of one prompt, at so many operations a second. A state takes two products for each token."""
        pairs = sum(self._keys(context) for context in range(1, num_tokens + 1))
        products = num_tokens * (self.layer_elements + 2 * self.state_elements) + self.head_elements
        return 2 * (products + pairs * self.query_width * 2) / rate


def tensor_shapes(path: pathlib.Path) -> dict[str, list[int]]:
    """Returns the shapes of a safetensors file's tensors, by name."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


def turn(engine: EngineProcess, prompts: tuple[Prompts, Prompts]) -> dict[str, float]:
    """One turn of an engine: seconds of a decode step and of the prefill."""
    one, long = prompts
    decoding = engine.generate(one, STEPS)
    seconds = step_seconds([decoding], 1) if decoding.steps else decoding.seconds / STEPS
    return {DECODE: seconds, PREFILL: engine.generate(long, 1).seconds}


def measure_speed(name: str, setup: Setup, gguf: str | None, num_turns: int) -> None:
    """Prints a decode step and a prefill of one shape, over their floors and over llama.cpp."""
    folder = benchmark_checkpoint(name)
    shape, source, rates = Shape(folder), PromptSource(TOKEN_LIMIT), list[Rates]()

    def next_turn() -> list[tuple[Prompts, Prompts]]:
        rates.append(measure_rates(processor.form()))
        return [(source(1, 32), source(1, PROMPT))]

    with contextlib.ExitStack() as stack:
        engines = [EngineProcess("manta", str(folder), setup)]
        stack.callback(engines[0].stop)
        if gguf is not None:
            engines.append(EngineProcess("llamacpp", gguf, setup, 4))
            stack.callback(engines[1].stop)
        found = alternate(engines, num_turns, next_turn, turn, _say)
    floors = {
        DECODE: [shape.step_seconds(32 + STEPS // 2, each.bandwidth) for each in rates[1:]],  # the first warmed up
        PREFILL: [shape.prefill_seconds(PROMPT, each.bfloat16) for each in rates[1:]],
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
    parser.add_argument("--llamacpp-python", metavar="PATH", help="Python of an environment with xllamacpp")
    parser.add_argument(
        "--gguf", metavar="SHAPE=FILE", action="append", default=[], help=f"in bfloat16; SHAPE is {HYBRID} or {WINDOWS}"
    )
    options = parser.parse_args(arguments)
    parts, ggufs = options.parts.split(","), dict(each.partition("=")[::2] for each in options.gguf)
    if unknown := [part for part in parts if part not in ("speed", "turns")]:
        parser.error(f"--parts {unknown[0]}: use speed, turns or both")
    if unknown := [name for name in ggufs if name not in (HYBRID, WINDOWS)]:
        parser.error(f"--gguf {unknown[0]}: use {HYBRID} or {WINDOWS}")
    if bool(ggufs) != bool(options.llamacpp_python):
        parser.error("--llamacpp-python and --gguf belong together")
    print(machine(), file=sys.stderr)
    setup = Setup(kv_cache_bytes=1 << 30, llamacpp_python=options.llamacpp_python)
    try:
        if "speed" in parts:
            for name in (HYBRID, WINDOWS):
                measure_speed(name, setup, ggufs.get(name), options.turns)
        if "turns" in parts:
            measure_turns(setup, options.turns)
    except BenchmarkError as error:
        _say(f"manta bench: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
