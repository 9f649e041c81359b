"""`manta bench batch`: what a batch's lines cost beside the engine, over `LLM.generate` of the same prompts in turns.

The batch goes the way of `manta batch`: lines from a file, the endpoints in this process, an engine in its own, and a
journal on the disk. `LLM` has a process to itself. Both have one thread a core, which spins as shortly.
What a batch does once (Ray, loading) is not in the figures. Every round has new prompts; half the tokens of each are
common to 16 lines.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import pathlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import msgspec

from benchmarks.checkpoints import benchmark_checkpoint
from benchmarks.report import machine, markdown_head, markdown_row, ratio_of, turns
from manta.cluster.batch.batch_job import Answer, BatchJob, run
from manta.cluster.batch.journal import Journal
from manta.cluster.cli.batch import answering_by, num_in_flight
from manta.cluster.config import EngineConfig, ServeConfig
from manta.cluster.llm import LLM, SamplingParams
from manta.cluster.serve.starting.replica_process import REPLICA_ENVIRONMENT
from manta.workers.checkpoints.model_folder import resolve_model_folder
from manta.workers.model_options import DEMO_MODEL

MODELS = {"tiny": ("tiny-llama", 2000), "demo": (DEMO_MODEL, 2000), "0.5B": ("qwen2.5-0.5b", 256)}
"""Checkpoint and lines. The first two have next to no work for the model, so that what is beside it shows most."""
PROMPT, GROUP = 64, 16
OUTPUT = (32, 96)
KV_CACHE_BYTES = 1 << 28


class Round(NamedTuple):
    """Seconds of each way for the same lines."""

    offline: float
    batch: float
    num_tokens: int
    """The tokens of all outputs together."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="manta bench batch", description="What a batch costs beside its engine.")
    parser.add_argument("--rounds", type=int, default=10, help="of each model (default: 10)")
    num_rounds = parser.parse_args(arguments).rounds
    print(machine(), file=sys.stderr)
    markdown_head("model", "lines", "LLM.generate, output tokens/s", "manta batch, output tokens/s", "ratio")
    os.environ.update(REPLICA_ENVIRONMENT)  # as `manta batch` has it; Serve reads it when a process imports it
    for name, (model, num_lines) in MODELS.items():
        folder = str(resolve_model_folder(model) if model == DEMO_MODEL else benchmark_checkpoint(model))
        with _process() as apart:
            rounds = apart.submit(_measured, folder, num_rounds, num_lines).result()
        speeds = [statistics.median(each.num_tokens / each[way] for each in rounds) for way in (0, 1)]
        ratio = ratio_of([each.offline for each in rounds], [each.batch for each in rounds])
        markdown_row(name, num_lines, f"{speeds[0]:,.0f}", f"{speeds[1]:,.0f}", ratio)
    return 0


def _process(*arguments: Any) -> ProcessPoolExecutor:
    """A new one; `arguments` are a function that it calls first, and that function's."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), *arguments)


def _measured(model: str, num_rounds: int, num_lines: int) -> list[Round]:
    return asyncio.run(_measure(model, num_rounds, num_lines))


async def _measure(model: str, num_rounds: int, num_lines: int) -> list[Round]:
    from manta.cluster.serve import app

    config = ServeConfig(engine=EngineConfig(model=model, kv_cache_bytes=KV_CACHE_BYTES))
    name = app.engines_name("bench", config)
    engine, host = await asyncio.to_thread(app.start_engines, config, name)
    # As Manta's replicas have it: threads that spin for long starve what else runs
    os.environ["GOMP_SPINCOUNT"] = "1000"
    try:
        with _process(_load, (model,)) as offline:
            vocab_size = offline.submit(_vocab_size).result()
            async with answering_by(engine, host, config) as answer:
                lines = _lines(config.model_name, num_lines, vocab_size)
                which = turns(num_rounds + 1, pathlib.Path(model).name)
                rounds = [await _round(offline, answer, config, next(lines)) for _ in which]
        return rounds[1:]  # the first one warms up
    finally:
        await asyncio.to_thread(app.stop)


def _lines(model: str, count: int, vocab_size: int) -> Iterator[list[dict[str, Any]]]:
    """Bodies of `/v1/completions`, new ones each time."""
    chance = random.Random(1)
    while True:
        found: list[dict[str, Any]] = []
        for number in range(count):
            if number % GROUP == 0:
                common = [chance.randrange(5, vocab_size) for _ in range(PROMPT // 2)]
            own = [chance.randrange(5, vocab_size) for _ in range(PROMPT // 2)]
            body = {"model": model, "prompt": common + own, "temperature": 0, "ignore_eos": True}
            found.append({**body, "max_tokens": chance.randrange(*OUTPUT)})
        yield found


_llms: list[LLM] = []
"""The `LLM` of the process that has one; else empty."""


def _load(model: str) -> None:
    _llms.append(LLM(model, kv_cache_bytes=KV_CACHE_BYTES))


def _vocab_size() -> int:
    return _llms[0].engine.vocab_size


def _generate(bodies: list[dict[str, Any]]) -> float:
    """Seconds."""
    prompts = [body["prompt"] for body in bodies]
    params = [SamplingParams(temperature=0, max_tokens=body["max_tokens"], ignore_eos=True) for body in bodies]
    started = time.perf_counter()
    _llms[0].generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - started


async def _round(
    offline: ProcessPoolExecutor, answer: Answer, config: ServeConfig, bodies: list[dict[str, Any]]
) -> Round:
    alone = offline.submit(_generate, bodies).result()
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "in.jsonl"
        requests = [{"custom_id": str(n), "url": "/v1/completions", "body": body} for n, body in enumerate(bodies)]
        source.write_bytes(b"\n".join(map(msgspec.json.encode, requests)))
        started = time.perf_counter()
        target = pathlib.Path(folder) / "out.jsonl"
        with source.open("rb") as lines, Journal(target, lines, config.max_body_bytes) as journal:
            places = asyncio.Semaphore(num_in_flight(config))
            failed: list[bool] = []
            report = lambda progress: failed.append(progress.has_failed)  # noqa: E731
            await run(BatchJob(answer, journal, places, config.max_body_bytes, report), lines)
        took = time.perf_counter() - started
    assert failed == [False] * len(bodies), f"{sum(failed)} of {len(failed)} lines failed"
    return Round(alone, took, sum(body["max_tokens"] for body in bodies))
