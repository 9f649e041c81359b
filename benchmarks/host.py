"""`manta bench host`: what the host does for a step, with a model that costs nothing.

The engine, its scheduler, the masks' bookkeeping, the runner and the sampler's host part are the real ones; the model
returns the same tensors whatever it is asked, and the vocabulary is so small that a draw costs next to nothing.

    step        a decode step by number of rows: microseconds a sequence by who spends them, and milliseconds a step
    admission   the same for arrivals: `add_request`, then steps until all of them run
    loops       the plain step loop against the overlapped one, in turns (`benchmarks/overlap.py`)

The *floor* is what plain Python takes for the objects alone: a `ScheduledSequence`, a `SamplePoint` and a
`SequenceOutput` a sequence, a token appended to its list and to its array. Times are medians over steps; collections of
the garbage collector count, as they do in life.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.checkpoints import benchmark_checkpoint
from benchmarks.report import machine, markdown_head, markdown_row
from manta.cluster.config import EngineConfig
from manta.cluster.engine.engine import Engine
from manta.cluster.engine.executors.in_process import InProcessExecutor
from manta.cluster.engine.request import EngineRequest, SequenceOutput
from manta.structured.constraint import ConstraintSpec
from manta.workers.sampling_params import SamplingParams
from manta.workers.step import SamplePoint, ScheduledSequence, StepInput

ROWS = (1, 32, 256, 1024, 4096)
ARRIVALS = (256, 1024, 4096)
PROMPT = 8
WARM_UP_STEPS = 4
PHASES = ("schedule", "masks", "execute", "sample", "update")
"""Phases of a step, in order. `execute` and `sample` are the runner's."""
BAR_ROWS, BAR_MS = 256, 1.5
LOOP_ROWS = (1, 32, 256)
PARTS = ("step", "admission", "loops")


class FreeModel:
    """In the model's place: the same hidden states and logits for whatever comes, up to `max_tokens` tokens in a step
    and `max_rows` that draw.
    """

    def __init__(self, max_tokens: int, max_rows: int, vocab_size: int) -> None:
        self._hidden = torch.zeros(max_tokens, 1)
        self._logits = torch.zeros(max_rows, vocab_size)
        self._logits[:, 5] = 1.0

    def forward(self, token_ids: torch.Tensor, metadata: Any, kv_caches: Any) -> torch.Tensor:
        return self._hidden[: len(token_ids)]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits[: len(hidden)]


class FreeExecutor(InProcessExecutor):
    """The free model in a worker of its own."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        max_rows = max(config.max_num_sequences, config.max_num_batched_tokens)
        target = getattr(self.worker, "target", self.worker)  # of one that speculates, the model's own worker
        target.runner.model = FreeModel(max_rows, max_rows, self.model.vocab_size)


def make_engine(max_rows: int) -> Engine:
    """With the free model, and its grammar pool started as a server's is."""
    config = config_of("one-layer-llama", max_rows)
    engine = Engine(config, executor=FreeExecutor(config))
    constraint = ConstraintSpec(kind="regex", text="a")
    engine.constraints.resolve(constraint).result()  # what starts in the background is there now
    return engine


def config_of(checkpoint: str, max_rows: int, num_threads: int | None = 1) -> EngineConfig:
    return EngineConfig(
        model=str(benchmark_checkpoint(checkpoint)),
        max_num_sequences=max_rows,
        max_num_batched_tokens=max(2048, 2 * max_rows),  # so that prompts go in beside rows that decode
        max_num_waiting=max(ARRIVALS),
        kv_cache_bytes=2**28,
        max_model_len=1024,
        num_threads=num_threads,
    )


def add_requests(engine: Engine, count: int) -> None:
    """Greedy ones of `PROMPT` tokens, no two alike in their first block; they run until `finish`."""
    params = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
    for number in range(count):
        prompt = [5 + number % 500, 5 + number // 500, *[7] * (PROMPT - 2)]
        engine.add_request(EngineRequest(request_id=str(number), prompt_token_ids=prompt, params=params))


class Stopwatch:
    """Seconds of each phase, summed since the last `take`, for the methods that it watches."""

    def __init__(self, engine: Engine) -> None:
        self._seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        scheduler, masks, executor = engine.scheduler, engine.masks, engine.executor
        for owner, name, phase in (
            (scheduler, "schedule", "schedule"),
            (masks, "before_step", "masks"),
            (masks, "begin", "masks"),
            (executor, "execute", "execute"),
            (executor, "sample", "sample"),
            (scheduler, "update", "update"),
        ):
            setattr(owner, name, self._watched(getattr(owner, name), phase))

    def _watched(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def watched(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = function(*arguments)
            self._seconds[phase] += time.perf_counter() - started
            return result

        return watched

    def take(self) -> list[float]:
        """In the order of `PHASES`."""
        taken = list(self._seconds.values())
        self._seconds = dict.fromkeys(PHASES, 0.0)
        return taken


def run_all(engine: Engine, count: int) -> None:
    """Brings `count` requests to where all decode."""
    add_requests(engine, count)
    while engine.scheduler.num_waiting:
        engine.step()
    for _ in range(WARM_UP_STEPS):
        engine.step()


def finish(engine: Engine, count: int) -> None:
    for number in range(count):
        engine.abort(str(number))
    engine.step()


def measure_step(engine: Engine, watch: Stopwatch, count: int, num_steps: int) -> tuple[list[float], float]:
    """Median seconds of each phase, and of the whole step."""
    run_all(engine, count)
    watch.take()
    phases, whole = [], []
    for _ in range(num_steps):
        started = time.perf_counter()
        outputs = engine.step()
        whole.append(time.perf_counter() - started)
        phases.append(watch.take())
        assert len(outputs) == count, "a row was not decoding"
    finish(engine, count)
    return [statistics.median(column) for column in zip(*phases, strict=True)], statistics.median(whole)


def floor(count: int, num_steps: int = 20) -> float:
    """Seconds for the objects of one step."""
    lists: list[list[int]] = [[] for _ in range(count)]
    arrays = [np.zeros(num_steps, dtype=np.int32) for _ in range(count)]
    seconds = []
    for position in range(num_steps):
        started = time.perf_counter()
        step = StepInput(position)
        for number in range(count):
            step.scheduled.append(ScheduledSequence(number, position, 1, [], []))
            step.sample_points.append(SamplePoint(number, number, position))
        outputs = []
        for number in range(count):
            lists[number].append(5)
            arrays[number][position] = 5
            outputs.append(SequenceOutput("request", 0, [5]))
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def step_part(rows: Sequence[int], num_steps: int) -> None:
    """Prints a row for each number of rows."""
    engine = make_engine(max(rows))
    watch = Stopwatch(engine)
    markdown_head("rows", *PHASES, "rest", "together, us a sequence", "floor", "step, ms")
    whole_us, step_ms = {}, {}
    for count in rows:
        phases, whole = measure_step(engine, watch, count, num_steps)
        figures = [*phases, whole - sum(phases), whole, floor(count)]
        whole_us[count], step_ms[count] = whole / count * 1e6, whole * 1e3
        markdown_row(count, *(f"{figure / count * 1e6:.2f}" for figure in figures), f"{whole * 1e3:.3f}")
    if BAR_ROWS in step_ms:
        verdict = "met" if step_ms[BAR_ROWS] < BAR_MS else "not met"
        print(f"\n{BAR_ROWS} rows: {step_ms[BAR_ROWS]:.2f} ms a step, bar {BAR_MS} ms: {verdict}")
        most = max(rows)
        print(f"{most} rows cost {whole_us[most] / whole_us[BAR_ROWS]:.2f} times as much a sequence as {BAR_ROWS}")


def admission_part(arrivals: Sequence[int]) -> None:
    """Prints a row for each number of arrivals."""
    print()
    markdown_head("arrivals", "add_request, us each", "steps until all run, us each", "together, s")
    engine = make_engine(max(arrivals))
    for count in arrivals:
        started = time.perf_counter()
        add_requests(engine, count)
        added = time.perf_counter() - started
        while engine.scheduler.num_waiting:
            engine.step()
        whole = time.perf_counter() - started
        markdown_row(count, f"{added / count * 1e6:.1f}", f"{(whole - added) / count * 1e6:.1f}", f"{whole:.3f}")
        finish(engine, count)


def profile(count: int, num_steps: int) -> None:
    """Prints where the time of decode steps goes, by function."""
    engine = make_engine(count)
    run_all(engine, count)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(num_steps):
        engine.step()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="manta bench host", description="What the host does for a step, with a model that costs nothing."
    )
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="of `step` (default: %(default)s)")
    parser.add_argument("--arrivals", default=",".join(map(str, ARRIVALS)), help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="measured of each number of rows (default: 30)")
    parser.add_argument("--profile", type=int, metavar="ROWS", help="print a profile of so many rows, and nothing else")
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--parts {unknown[0]}: use some of {', '.join(PARTS)}")
    print(machine(), file=sys.stderr)
    gc.freeze()  # as a server does once its engine is loaded
    if options.profile is not None:
        profile(options.profile, options.steps)
        return 0
    if "step" in parts:
        step_part([int(count) for count in options.rows.split(",")], options.steps)
    if "admission" in parts:
        admission_part([int(count) for count in options.arrivals.split(",")])
    if "loops" in parts:
        from benchmarks.overlap import measure  # imports Ray

        measure(LOOP_ROWS, options.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
