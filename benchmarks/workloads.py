"""The offline workloads, by letter: what is generated, how often, and which figures come of it.

    a  32 requests of 128 tokens in and 128 out       b  one request, 32 in and 128 out
    d  16 requests of 1,024 shared and 32 own tokens in, 32 out, with the shared part unseen, and seen
    g  the tiny model, one row and 32 rows: what a step costs besides the model

Everything is greedy and runs past end-of-sequence tokens; prompts are random token ids, fresh for every run, so that
the prefix cache helps only where a workload shares a prefix. Engines are measured in turns with the same prompts,
because a shared machine is faster in one minute than in the next.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.processes import BenchmarkError, EngineProcess

Prompts = list[list[int]]


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
        generator = random.Random(self._seed)
        return [[generator.randrange(300, self.token_limit) for _ in range(length)] for _ in range(count)]


Job = list[tuple[str, Prompts, int]]
"""Generations in order: (name, prompts, output tokens each)."""


class Workload(NamedTuple):
    """How to warm up, what one repetition generates, and the figures that follow from its times in seconds."""

    letter: str
    warm_up: Callable[[PromptSource], Job]
    job: Callable[[PromptSource], Job]
    figures: Callable[[dict[str, float]], list[Row]]
    extra_repetitions: int = 0


def _batch(letter: str, count: int, prompt: int, output: int) -> Workload:
    """A batch of equal requests, run to its first token and run whole: the difference is decoding."""

    rows_text = f"{count} row{'s' if count > 1 else ''}"

    def figures(seconds: dict[str, float]) -> list[Row]:
        step = (seconds["whole"] - seconds["first token"]) / (output - 1)
        rows = [
            Row(letter, f"output, {rows_text}", count * output / seconds["whole"], "tok/s"),
            Row(letter, f"decode step, {rows_text}", step * 1e3, "ms"),
        ]
        if count > 1:
            return [*rows, Row(letter, "prefill", count * prompt / seconds["first token"], "tok/s")]
        return [*rows, Row(letter, "first token", seconds["first token"] * 1e3, "ms")]

    return Workload(
        letter,
        warm_up=lambda prompts: [("warm-up", prompts(count, prompt), 4 if count > 1 else 8)],
        job=lambda prompts: [("first token", prompts(count, prompt), 1), ("whole", prompts(count, prompt), output)],
        figures=figures,
        extra_repetitions=2 if count == 1 else 0,
    )


def _shared_prefix_job(prompts: PromptSource) -> Job:
    prefix = prompts(1, 1024)[0]
    return [
        ("nothing shared", prompts(16, 1056), 32),
        ("shared, cold", [prefix + own for own in prompts(16, 32)], 32),
        ("shared, warm", [prefix + own for own in prompts(16, 32)], 32),
    ]


WORKLOADS = {
    "a": [_batch("a", 32, 128, 128)],
    "b": [_batch("b", 1, 32, 128)],
    "d": [
        Workload(
            "d",
            warm_up=lambda prompts: [],
            job=_shared_prefix_job,
            figures=lambda seconds: [Row("d", name, value, "s") for name, value in seconds.items()],
        )
    ],
    "g": [
        _batch("g", 1, 32, 128),
        _batch("g", 32, 128, 128),
    ],
}
"""`g` runs on the tiny model, the others on the large one."""


def run_workload(
    workload: Workload,
    engines: list[EngineProcess],
    prompts: PromptSource,
    repetitions: int,
    report_idle: Callable[[str, float], None],
) -> list[list[dict[str, float]]]:
    """Seconds by generation name, for each engine and repetition.

    Engines take turns, in an order that is reversed each time; before a turn the others are given the time to stop
    spinning, and `report_idle(engine, cpu_share)` hears of one that does not.
    """
    warm_up = workload.warm_up(prompts)
    for engine in engines:
        for _, batch, max_tokens in warm_up:
            engine.generate(batch, max_tokens)
    seconds: list[list[dict[str, float]]] = [[] for _ in engines]
    for repetition in range(repetitions):
        job = workload.job(prompts)
        order = list(enumerate(engines))
        for index, engine in reversed(order) if repetition % 2 else order:
            for other in engines:
                if other is not engine:
                    report_idle(other.engine, other.wait_until_idle())
            seconds[index].append(_run_job(engine, job))
    return seconds


def _run_job(engine: EngineProcess, job: Job) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for name, batch, max_tokens in job:
        seconds[name], num_tokens = engine.generate(batch, max_tokens)
        if num_tokens != len(batch) * max_tokens:
            raise BenchmarkError(
                f"{engine.engine} answered {num_tokens} tokens where {len(batch)} x {max_tokens} were asked for"
            )
    return seconds
