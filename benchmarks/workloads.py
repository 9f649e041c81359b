"""The offline workloads, by letter: their generations, blocks and figures.

    a  32 requests of 128 tokens in and 128 out       b  one request, 32 in and 96 out
    c  64 choices of one 512-token prompt, 64 out, temperature 1, against 64 requests of one token in
    d  16 requests of 1,024 shared and 32 own tokens in, 32 out, with the shared part unseen, and seen
    e  16 requests of 64 in under a JSON schema, temperature 1, and as many of the same lengths without it
    g  the tiny model, one row and 32 rows: what a step costs besides the model
    p  the prefill of one prompt of 512 tokens

All others are greedy, and all but those under a schema continue past end-of-sequence tokens. Prompts are random token
ids, fresh for every block unless noted, so that the prefix cache helps only where a workload shares a prefix. A shared
machine's speed varies within minutes, so engines take turns with the same prompts. A block is one engine's turn, about
2 s in the large shape.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from benchmarks.processes import BenchmarkError, Child, EngineProcess, Timing

Prompts = list[list[int]]
C = TypeVar("C", bound=Child)
B = TypeVar("B")
R = TypeVar("R")


class Row(NamedTuple):
    """One figure."""

    workload: str
    metric: str
    value: float
    unit: str


class PromptSource:
    """Random prompts, a new seed for each call."""

    def __init__(self, token_limit: int) -> None:
        self.token_limit = token_limit
        self._seed = 1000

    def __call__(self, count: int, length: int) -> Prompts:
        self._seed += 1
        return self.fixed(count, length, self._seed)

    def fixed(self, count: int, length: int, seed: int) -> Prompts:
        """The same prompts whenever `seed` is the same; those of `__call__` have seeds above 1,000."""
        generator = random.Random(seed)
        return [[generator.randrange(300, self.token_limit) for _ in range(length)] for _ in range(count)]


class Generation(NamedTuple):
    prompts: Prompts
    max_tokens: int
    n: int = 1
    """Choices for each prompt."""
    temperature: float = 0.0


Block = list[Generation]
"""The work of one engine in one turn."""


class Workload(NamedTuple):
    """The blocks of one repetition, and the figures that follow from their timings."""

    letter: str
    blocks: Callable[[PromptSource], list[Block]]
    figures: Callable[[list[list[Timing]]], list[Row]]
    """Makes the figures from the timings by block and generation."""
    max_repetitions: int | None = None
    """Most repetitions of a workload whose blocks take long; None for the usual number."""


def step_seconds(timings: Sequence[Timing], rows: int) -> float:
    """Seconds of a step in which `rows` sequences gain a token, from the longest such stretch of each generation.

    Raises `BenchmarkError` where no two steps in a row were that full.
    """
    seconds, steps = 0.0, 0
    for timing in timings:
        best: list[float] = []
        current: list[float] = []
        for moment, count in timing.steps:
            current = [*current, moment] if count == rows else []
            best = max(best, current, key=len)
        if len(best) > 1:
            seconds += best[-1] - best[0]
            steps += len(best) - 1
    if not steps:
        raise BenchmarkError(f"an engine never ran two steps in a row with {rows} rows")
    return seconds / steps


def _rows_text(count: int) -> str:
    return f"{count} row{'s' if count > 1 else ''}"


A_ROWS, A_PROMPT, A_OUTPUT = 32, 128, 128
A_PREFILLS = 16
A_CONTEXT, A_STEPS = 176, 32
"""Decoding goes from context 176 to 208, around the middle of a whole run's 128 to 256."""


def _a_blocks(prompts: PromptSource) -> list[Block]:
    """A prefill block and a decode block.

    The latter's prompts are always the same: the prefix cache holds most of them, so that the block is decoding, and of
    it only the steps with all rows count.
    """
    return [
        [Generation(prompts(A_PREFILLS, A_PROMPT), 1)],
        [Generation(prompts.fixed(A_ROWS, A_CONTEXT, 1), A_STEPS)],
    ]


def _a_figures(timings: list[list[Timing]]) -> list[Row]:
    (prefill,), decoding = timings
    prefill_speed = A_PREFILLS * A_PROMPT / prefill.seconds
    step = step_seconds(decoding, A_ROWS)
    whole = A_ROWS * A_PROMPT / prefill_speed + (A_OUTPUT - 1) * step
    return [
        Row("a", "output, 32 rows, from the two below", A_ROWS * A_OUTPUT / whole, "tok/s"),
        Row("a", "decode step, 32 rows", step * 1e3, "ms"),
        Row("a", "prefill", prefill_speed, "tok/s"),
    ]


def _whole_a_figures(timings: list[list[Timing]]) -> list[Row]:
    ((whole,),) = timings
    return [Row("a", "output, 32 rows, whole runs", whole.num_tokens / whole.seconds, "tok/s")]


def _batch(letter: str, count: int, prompt: int, output: int, times: int = 1) -> Workload:
    """A batch of equal requests, `times` in a block."""

    def figures(timings: list[list[Timing]]) -> list[Row]:
        (block,) = timings
        num_tokens, seconds = sum(timing.num_tokens for timing in block), sum(timing.seconds for timing in block)
        text = _rows_text(count)
        return [
            Row(letter, f"output, {text}", num_tokens / seconds, "tok/s"),
            Row(letter, f"decode step, {text}", step_seconds(block, count) * 1e3, "ms"),
        ]

    return Workload(
        letter, lambda prompts: [[Generation(prompts(count, prompt), output) for _ in range(times)]], figures
    )


C_ROWS, C_PROMPT, C_OUTPUT = 64, 512, 64


def _c_blocks(prompts: PromptSource) -> list[Block]:
    return [
        [Generation(prompts(1, C_PROMPT), C_OUTPUT, C_ROWS, temperature=1.0)],
        [Generation(prompts(C_ROWS, 1), C_OUTPUT, temperature=1.0)],  # drawn alike: only what rows attend to differs
    ]


def _c_figures(timings: list[list[Timing]]) -> list[Row]:
    (choices,), short = timings
    step, short_step = step_seconds([choices], C_ROWS), step_seconds(short, C_ROWS)
    return [
        Row("c", "output, n = 64", choices.num_tokens / choices.seconds, "tok/s"),
        Row("c", "decode step, n = 64", step * 1e3, "ms"),
        Row("c", "decode step, 64 requests of 1 token in", short_step * 1e3, "ms"),
        Row("c", "decoding of n = 64 over that of 64 requests", short_step / step, "x"),
    ]


def _d_blocks(prompts: PromptSource) -> list[Block]:
    prefix = prompts(1, 1024)[0]
    return [[Generation([prefix + own for own in prompts(16, 32)], 32) for _ in ("cold", "warm")]]


def _d_figures(timings: list[list[Timing]]) -> list[Row]:
    ((cold, warm),) = timings
    return [Row("d", "shared, cold", cold.seconds, "s"), Row("d", "shared, warm", warm.seconds, "s")]


E_ROWS, E_PROMPT, E_OUTPUT = 16, 64, 128
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 1, "maximum": 99999},
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,10}$"},
        "kind": {"type": "string", "enum": ["alpha", "beta", "gamma", "delta-longer-name"]},
        "owner": {
            "type": "object",
            "properties": {"login": {"type": "string", "maxLength": 16}, "age": {"type": "integer"}},
            "required": ["login", "age"],
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 2, "maxItems": 6},
        "scores": {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 8},
    },
    "required": ["id", "name", "kind", "owner", "tags", "scores"],
    "additionalProperties": False,
}


def schema_prompts(prompts: PromptSource) -> list[tuple[Prompts, Prompts]]:
    """Returns the one block of `e`: prompts of requests under the schema, and of those without it."""
    return [(prompts(E_ROWS, E_PROMPT), prompts(E_ROWS, E_PROMPT))]


def run_schema(engine: EngineProcess, block: tuple[Prompts, Prompts]) -> list[Row]:
    """One turn of `e`, whose second half depends on what the first half wrote."""
    under, free = block
    constrained = engine.generate(under, E_OUTPUT, temperature=1.0, schema=SCHEMA)
    unconstrained = engine.generate(free, constrained.lengths, temperature=1.0)
    if unconstrained.num_tokens != constrained.num_tokens:
        raise BenchmarkError(f"{engine.engine} did not write as much without a schema")
    return [
        Row("e", "output, 16 rows under a schema", constrained.num_tokens / constrained.seconds, "tok/s"),
        Row("e", "under a schema over the same lengths without", unconstrained.seconds / constrained.seconds, "x"),
    ]


P_PROMPT = 512


def _p_figures(timings: list[list[Timing]]) -> list[Row]:
    ((prefill,),) = timings
    return [Row("p", f"prefill of {P_PROMPT}", P_PROMPT / prefill.seconds, "tok/s")]


WORKLOADS = {
    "a": [
        Workload("a", _a_blocks, _a_figures),
        Workload(
            "a",
            lambda prompts: [[Generation(prompts(A_ROWS, A_PROMPT), A_OUTPUT)]],
            _whole_a_figures,
            max_repetitions=5,
        ),
    ],
    "b": [_batch("b", 1, 32, 96)],
    "c": [Workload("c", _c_blocks, _c_figures, max_repetitions=5)],
    "d": [Workload("d", _d_blocks, _d_figures)],
    "p": [Workload("p", lambda prompts: [[Generation(prompts(1, P_PROMPT), 1)]], _p_figures)],
    "g": [_batch("g", 1, 32, 128, times=6), _batch("g", 32, 128, 128, times=2)],
}
"""`g` runs on the tiny model, the others on the large one. `e` is `run_schema`."""


def run_workload(
    workload: Workload,
    engines: Sequence[EngineProcess],
    prompts: PromptSource,
    repetitions: int,
    hear: Callable[[str], None],
) -> list[list[list[Row]]]:
    """Figures by engine and repetition."""
    if workload.max_repetitions is not None:
        repetitions = min(repetitions, workload.max_repetitions)
    timings = alternate(engines, repetitions, lambda: workload.blocks(prompts), _run_block, hear)
    return [[workload.figures(blocks) for blocks in engine] for engine in timings]


def alternate(
    children: Sequence[C],
    repetitions: int,
    blocks: Callable[[], list[B]],
    run: Callable[[C, B], R],
    hear: Callable[[str], None],
) -> list[list[list[R]]]:
    """`run(child, block)` of every block, by child, repetition and block.

    Children take turns block by block, in an order that is reversed each time; in a turn all others rest. A child rests
    after its turn even if the next turn is its own, so that every turn begins alike. The first repetition warms up and
    is not kept; `hear` is told how long the others will take.
    """
    results: list[list[list[R]]] = [[] for _ in children]
    for child in children:
        child.rest()
    for repetition in range(repetitions + 1):
        started = time.perf_counter()
        kept: list[list[R]] = [[] for _ in children]
        for block in blocks():
            order = list(enumerate(children))
            for index, child in reversed(order) if repetition % 2 else order:
                child.wake()
                kept[index].append(run(child, block))
                child.rest()
        if repetition == 0:
            seconds = (time.perf_counter() - started) * repetitions
            hear(f"{repetitions} repetitions, about {seconds:.0f} s")
            continue
        for index, answers in enumerate(kept):
            results[index].append(answers)
    return results


def _run_block(engine: EngineProcess, block: Block) -> list[Timing]:
    timings = []
    for batch, max_tokens, n, temperature in block:
        timing = engine.generate(batch, max_tokens, n, temperature)
        asked = len(batch) * n * max_tokens
        if timing.num_tokens != asked:
            raise BenchmarkError(f"{engine.engine} answered {timing.num_tokens} tokens where {asked} were asked for")
        timings.append(timing)
    return timings
