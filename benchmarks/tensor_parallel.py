"""What tensor parallelism costs and brings on one machine: `python -m benchmarks.tensor_parallel`.

`sums`: one sum over two ranks, by shared memory and by gloo, in turns. `steps`: forward pass and draw of one rank with
one core against two ranks with one core each, in turns, on the shape of Qwen2.5-0.5B. Times are rank 0's medians; take
the ratios. Called by `manta bench cluster --parts tp`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from benchmarks.report import turns

HIDDEN = 896
SUM_ROWS = (1, 32, 512)
SUMS_OF_A_TURN = 40
STEPS_OF_A_TURN = 4
STEPS = {"decode, 1 row": (1, 1), "decode, 32 rows": (32, 1), "prefill, 1 x 512 tokens": (1, 512)}
"""Name to (sequences, tokens of each)."""
CONTEXT_LEN = 32
"""Tokens of each sequence before a decode step."""
TOKEN_ID = 5
"""The only one that may be drawn, so that ranks know what rank 0 drew without being told."""


class SumTimes(NamedTuple):
    """Microseconds of one sum of bfloat16 [rows, 896] over two ranks."""

    rows: int
    shared_memory: float
    gloo: float


class StepTimes(NamedTuple):
    """Milliseconds of a step."""

    name: str
    one_rank: float
    two_ranks: float
    ratio: float
    """Median over the turns of one rank's time over two ranks': above 1, two are faster."""


def measure_sums(num_turns: int = 30) -> Iterator[SumTimes]:
    """Yields each number of rows as it is measured."""
    ranks = _Ranks(2)
    try:
        ranks.open(_open_group)
        for rows in SUM_ROWS:
            yield SumTimes(rows, *(1e6 * each for each in ranks.call(_time_sums, rows, num_turns)))
    finally:
        ranks.close()


def measure_steps(model: str, num_turns: int = 10) -> Iterator[StepTimes]:
    """Yields each of `STEPS` as it is measured."""
    one, two = _Ranks(1), _Ranks(2)
    try:
        for ranks in (one, two):
            ranks.open(_open_worker, model)
        for name, (num_sequences, num_tokens) in STEPS.items():
            pairs = []
            for turn in turns(num_turns + 1, name):
                seconds = {}
                for ranks in (one, two) if turn % 2 else (two, one):
                    seconds[ranks] = ranks.call(_time_steps, num_sequences, num_tokens)
                pairs.append((seconds[one], seconds[two]))
            pairs = pairs[1:]  # the first warms up
            ratio = statistics.median(alone / together for alone, together in pairs)
            alone, together = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
            yield StepTimes(name, alone, together, ratio)
    finally:
        one.close()
        two.close()


class _Ranks:
    """Processes with one thread each, which run the same functions at the same time."""

    def __init__(self, num_ranks: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def open(self, function: Callable[..., Any], *arguments: Any) -> None:
        """`function(state, rank, num_ranks, address, *arguments)` on every rank."""
        self._pipes[0].send((_open_store, ()))
        address = self._pipes[0].recv()
        for rank, pipe in enumerate(self._pipes):
            pipe.send((function, (rank, len(self._pipes), address, *arguments)))
        for pipe in self._pipes:
            pipe.recv()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What rank 0 answers."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answer, *_ = [pipe.recv() for pipe in self._pipes]
        return answer

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


# ---- in the rank's process -------------------------------------------------------------------------------------------


class _State:
    folder: Any = None
    group: Any = None
    worker: Any = None
    num_steps = 0


def _serve(pipe: Connection) -> None:
    state = _State()
    while True:
        function, arguments = pipe.recv()
        pipe.send(function(state, *arguments))


def _open_store(state: _State) -> str:
    from manta.workers.parallel.group import private_address

    state.folder = tempfile.TemporaryDirectory()
    return private_address(pathlib.Path(state.folder.name))


def _open_group(state: _State, rank: int, num_ranks: int, address: str) -> None:
    from manta.workers.platforms import choose_platform

    state.group = choose_platform("cpu", 1).open_group(rank, num_ranks, address)


def _open_worker(state: _State, rank: int, num_ranks: int, address: str, model: str) -> None:
    from manta.workers.model_options import ModelOptions
    from manta.workers.ranks.rank_worker import RankPlace
    from manta.workers.torch_worker.torch_worker import TorchWorker

    options = ModelOptions(
        model=model,
        dtype="bfloat16",
        device="cpu",
        num_threads=1,
        tensor_parallel_size=num_ranks,
        max_model_len=1024,
        kv_cache_bytes=256 << 20,
        max_num_sequences=32,
    )
    state.worker = TorchWorker(options, RankPlace(rank, address))


def _time_sums(state: _State, rows: int, num_turns: int) -> list[float]:
    """Median seconds by shared memory and by gloo."""
    import torch

    from manta.workers.parallel.group import GlooGroup

    group = state.group
    x = torch.randn(rows, HIDDEN, dtype=torch.bfloat16)
    kinds: list[Callable[[], object]] = [
        lambda: group.all_reduce(x),
        lambda: GlooGroup.all_reduce(group, x),
    ]
    seconds: list[list[float]] = [[] for _ in kinds]
    for _ in range(num_turns):
        for kind, found in zip(kinds, seconds, strict=True):
            x.fill_(1.0)
            started = time.perf_counter()
            for _ in range(SUMS_OF_A_TURN):
                kind()
            found.append((time.perf_counter() - started) / SUMS_OF_A_TURN)
    return [statistics.median(found) for found in seconds]


def _time_steps(state: _State, num_sequences: int, num_tokens: int) -> float:
    """Median seconds of a few steps."""
    from manta.workers.sampling_params import SamplingParams
    from manta.workers.step import SamplePoint, ScheduledSequence, SequenceStart, StepInput

    params = SamplingParams(temperature=0, allowed_token_ids=(TOKEN_ID,))
    is_decode = num_tokens == 1
    prompt = [TOKEN_ID + index % 100 for index in range(CONTEXT_LEN if is_decode else num_tokens)]
    num_blocks = -(-(len(prompt) + STEPS_OF_A_TURN) // 16)
    ids = range(num_sequences)
    seconds = []

    def step(start: int, count: int, begins: bool) -> None:
        if not begins and state.worker.group.rank > 0:
            state.worker.adopt({sequence_id: [TOKEN_ID] for sequence_id in ids})
        blocks = {each: list(range(each * num_blocks, (each + 1) * num_blocks)) if begins else [] for each in ids}
        state.num_steps += 1
        step_input = StepInput(
            step_id=state.num_steps,
            finished=list(ids) if begins else [],
            started=[SequenceStart(each, params, 0, prompt, len(prompt)) for each in ids] if begins else [],
            scheduled=[ScheduledSequence(each, start, count, blocks[each]) for each in ids],
            sample_points=[SamplePoint((each + 1) * count - 1, each, start + count) for each in ids],
        )
        started = time.perf_counter()
        state.worker.execute(step_input)
        state.worker.sample()
        seconds.append(time.perf_counter() - started)

    for _ in range(1 if is_decode else STEPS_OF_A_TURN):
        step(0, len(prompt), begins=True)
    if is_decode:
        seconds.clear()
        for turn in range(STEPS_OF_A_TURN):
            step(len(prompt) + turn, 1, begins=False)
    return statistics.median(seconds)


def sum_table(sums: Iterable[SumTimes]) -> Iterator[str]:
    """Lines of Markdown, as are `step_table`'s."""
    yield "| sum over 2 ranks, bfloat16 | shared memory | gloo |"
    yield "| --- | --- | --- |"
    for each in sums:
        yield f"| {each.rows} x {HIDDEN} | {each.shared_memory:.1f} us | {each.gloo:.1f} us |"


def step_table(steps: Iterable[StepTimes]) -> Iterator[str]:
    yield "| step, one core a rank | 1 rank | 2 ranks | ratio |"
    yield "| --- | --- | --- | --- |"
    for each in steps:
        yield f"| {each.name} | {each.one_rank:.2f} ms | {each.two_ranks:.2f} ms | {each.ratio:.2f} |"


def print_tables(model: str, num_turns: int, parts: Sequence[str] = ("sums", "steps")) -> None:
    """Prints the tables of some `parts` row by row; `model` is a folder, or one of the shapes."""
    from benchmarks.checkpoints import SHAPES, benchmark_checkpoint

    if "steps" in parts and model in SHAPES:
        model = str(benchmark_checkpoint(model))
    tables = {
        "sums": lambda: sum_table(measure_sums(num_turns)),
        "steps": lambda: step_table(measure_steps(model, num_turns)),
    }
    for part in parts:
        for line in tables[part]():
            print(line, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    from benchmarks.checkpoints import SHAPES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="sums,steps", help="sums, steps (default: both)")
    parser.add_argument("--model", default="qwen2.5-0.5b", help="a folder, or one of the shapes: " + ", ".join(SHAPES))
    parser.add_argument("--turns", type=int, default=10, help="of each part (default: 10)")
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    if not {"sums", "steps"}.issuperset(parts):
        parser.error(f"--parts {options.parts}: use sums, steps or both")
    print_tables(options.model, options.turns, parts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
