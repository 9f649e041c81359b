"""`manta bench cluster --parts resume`: the cost of streams that can continue elsewhere, while nothing fails.

- As throughput: the same processes serve the same load with and without what a continuation needs, in turns. Without
  it, an ingress keeps no tokens and watches no engine, and an engine sends no signs of life. Only the benchmark can
  ask for that. The tiny model has the shortest steps, so the cost weighs most beside it.
- Directly, because throughput varies by more than that: what an ingress adds to each frame and several times a second,
  and what an engine adds, as shares of a step with as many streams.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ray import serve

from benchmarks.checkpoints import benchmark_checkpoint
from benchmarks.http_load import run_load
from benchmarks.processes import free_port
from benchmarks.report import bootstrap_interval, turns
from benchmarks.workloads import PromptSource
from manta.cluster.config import EngineConfig, ServeConfig
from manta.cluster.engine.request import EngineRequest, SequenceOutput
from manta.cluster.serve import app, engine_deployment, ingress
from manta.cluster.serve.routing.replicas import Replicas
from manta.cluster.serve.streams.engine_client import EngineClient
from manta.cluster.serve.streams.progress import Progress
from manta.cluster.serve.streams.prompt_run import PromptRun
from manta.cluster.serve.streams.token_channel import BEAT_S, OutputReceiver, OutputSender
from manta.workers.sampling_params import SamplingParams

NUM_STREAMS = 32
PROMPT, TOKEN_LIMIT = 16, 30_000
"""Tokens of each prompt, and of the tiny model's vocabulary those that are drawn for prompts."""
REQUESTS = 5
"""Number of requests of each stream in a turn. With fewer, a turn ends within half a second."""
PAIRS_A_ROUND = 3
BAR = 0.99
"""Least ratio of the throughput to that without."""
NUM_STEPS = 2000
STEP_S = 0.025
"""Assumed seconds of a step. On two cores the 0.5B shape takes twice as long, so the printed share is an upper
bound.
"""


# ---- as throughput ---------------------------------------------------------------------------------------------------


def add_without_keeping(progress: Progress, output: SequenceOutput) -> bool:
    """As `Progress.add` for whoever never asks for a continuation: the ends alone are noted."""
    if output.finish is not None:
        progress.end(output.index)
    return bool(output.token_ids or output.prompt_logprobs) or output.finish is not None


def hear_nothing(replicas: Replicas, replica: str, is_away: bool = False) -> None: ...


async def watch_nothing(client: EngineClient) -> None:
    client._watching = None


WITH: dict[tuple[type, str], Any] = {
    (Progress, "add"): Progress.add,
    (Replicas, "hear"): Replicas.hear,
    (EngineClient, "_watch"): EngineClient._watch,
}
WITHOUT = dict(zip(WITH, (add_without_keeping, hear_nothing, watch_nothing), strict=True))


def switch(resumes: bool) -> None:
    """What an ingress's process does from now on."""
    for (owner, name), function in (WITH if resumes else WITHOUT).items():
        setattr(owner, name, function)


class SwitchedIngress(ingress.DeployedIngress):
    async def set_resumes(self, resumes: bool) -> float:
        """Returns the seconds of CPU time that this process has taken."""
        while self._client._watching is not None:  # it would take an engine that is not heard for one that hangs
            await asyncio.sleep(BEAT_S)
        switch(resumes)
        return time.process_time()


class SwitchedEngine(engine_deployment.DeployedEngine):
    _resumes = True

    async def set_resumes(self, resumes: bool) -> float:
        self._resumes = resumes
        return time.process_time()

    async def _beat(self) -> None:
        if self._resumes:
            await super()._beat()
        self._beating = None


class Turn(NamedTuple):
    tokens_per_s: float
    ingress_us: float
    """CPU time a token, as is the engine's."""
    engine_us: float


async def measure_turns(num_pairs: int, num_tokens: int) -> list[tuple[Turn, Turn]]:
    """Pairs (with, without) of `num_tokens` for each request, after one that warms up."""
    model = str(benchmark_checkpoint("tiny-llama"))
    config = ServeConfig(engine=EngineConfig(model=model, kv_cache_bytes=1 << 28), port=free_port())
    replicas = ingress.DeployedIngress, engine_deployment.DeployedEngine
    ingress.DeployedIngress, engine_deployment.DeployedEngine = SwitchedIngress, SwitchedEngine  # type: ignore[misc]
    try:
        await asyncio.to_thread(app.start, config)
    finally:
        ingress.DeployedIngress, engine_deployment.DeployedEngine = replicas  # type: ignore[misc]
    try:
        which = turns(num_pairs + 1, "with and without")
        pairs = [await _pair(config, number % 2 == 0, num_tokens) for number in which]
        return pairs[1:]
    finally:
        await asyncio.to_thread(app.stop)


async def _pair(config: ServeConfig, begins_with: bool, num_tokens: int) -> tuple[Turn, Turn]:
    turns = {resumes: await _turn(config, resumes, num_tokens) for resumes in (begins_with, not begins_with)}
    return turns[True], turns[False]


_prompts = PromptSource(TOKEN_LIMIT)


async def _turn(config: ServeConfig, resumes: bool, num_tokens: int) -> Turn:
    prompts = _prompts(REQUESTS * NUM_STREAMS, PROMPT)
    before = await _set_resumes(resumes)
    load = await asyncio.to_thread(run_load, config.port, config.model_name, prompts, num_tokens, NUM_STREAMS)
    after = await _set_resumes(resumes)
    costs = ((end - start) / load.num_tokens * 1e6 for start, end in zip(before, after, strict=True))
    return Turn(load.num_tokens / load.seconds, *costs)


async def _set_resumes(resumes: bool) -> list[float]:
    handles = [serve.get_deployment_handle(name, app.APP_NAME) for name in ("ingress", "engine")]
    return [await handle.set_resumes.remote(resumes) for handle in handles]


def turns_table(pairs: list[tuple[Turn, Turn]]) -> list[str]:
    """Markdown, with the verdict on the bar."""
    lines = [f"| {NUM_STREAMS} streams | with | without | with over without |", "| --- | --- | --- | --- |"]
    names = ("output, tokens/s", "the ingress's CPU time, us a token", "the engine's CPU time, us a token")
    for column, name in enumerate(names):
        figures = [statistics.median(pair[side][column] for pair in pairs) for side in (0, 1)]
        ratios = [kept[column] / other[column] for kept, other in pairs]
        low, high = bootstrap_interval(ratios)
        verdict = "" if column else f"; bar {BAR} {'met' if low >= BAR else 'missed' if high < BAR else 'undecided'}"
        ratio = f"{statistics.median(ratios):.4f} ({low:.4f} to {high:.4f}{verdict})"
        lines.append(f"| {name} | {figures[0]:,.1f} | {figures[1]:,.1f} | {ratio} |")
    return lines


def resume(num_rounds: int, num_tokens: int) -> None:
    """Prints both tables."""
    for line in table(STEP_S):
        print(line, flush=True)
    print()
    num_pairs = PAIRS_A_ROUND * num_rounds
    turn = f"{NUM_STREAMS} x {REQUESTS} x {num_tokens} tokens"
    print(f"{num_pairs} pairs of turns, {turn} each", file=sys.stderr, flush=True)
    print(*turns_table(asyncio.run(measure_turns(num_pairs, num_tokens))), sep="\n", flush=True)


# ---- directly --------------------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    what: str
    seconds: float
    """A step for what comes with steps, a second for what comes with time."""
    is_by_step: bool


class _Connection:
    replica = "a"


class _Caller:
    """In the place of the ingress."""

    def forget_sent(self, request_id: str) -> None: ...

    def note_output(self, request_id: str) -> None: ...


def measure() -> Iterator[Cost]:
    """For `NUM_STREAMS` streams of one engine."""
    caller, connection = _Caller(), _Connection()
    runs = [PromptRun(caller, _request(index), lambda _: None) for index in range(NUM_STREAMS)]  # type: ignore[arg-type]
    outputs = [SequenceOutput(f"request-{index}", 0, [index]) for index in range(NUM_STREAMS)]
    replicas = Replicas()
    replicas.running["engine"] = frozenset({"a", "b"})

    def keep_tokens() -> None:
        replicas.hear("a")
        for run, output in zip(runs, outputs, strict=True):
            run.receive(output, connection)  # type: ignore[arg-type]

    def watch() -> None:
        owing = {run.replica or "" for run in runs}
        replicas.beat(owing)
        _ = {replica for replica in owing if not replicas.is_good(replica)}

    beats = 1 / BEAT_S
    yield Cost("ingress: tokens kept, engine heard", _time(keep_tokens), is_by_step=True)
    yield Cost("ingress: watch", beats * _time(watch), is_by_step=False)
    yield Cost("engine and ingress: empty frames", beats * asyncio.run(_time_beat()), is_by_step=False)


def table(step_s: float) -> Iterator[str]:
    """Markdown; a step with `NUM_STREAMS` streams takes `step_s`."""
    yield f"| {NUM_STREAMS} streams, steps of {step_s * 1e3:g} ms | us | share of the time, % |"
    yield "| --- | --- | --- |"
    total = 0.0
    for cost in measure():
        share = cost.seconds / step_s if cost.is_by_step else cost.seconds
        total += share
        unit = "a step" if cost.is_by_step else "a second"
        yield f"| {cost.what} | {cost.seconds * 1e6:.1f} {unit} | {share * 100:.3f} |"
    yield f"| together | | {total * 100:.3f} |"


def _request(index: int) -> EngineRequest:
    params = SamplingParams(seed=index)
    return EngineRequest(request_id=f"request-{index}", prompt_token_ids=[5], params=params, deadline_s=60.0)


def _time(function: Callable[[], None]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    for _ in range(NUM_STEPS):
        function()
    return (time.perf_counter() - started) / NUM_STEPS


async def _time_beat() -> float:
    """Seconds of one empty frame, sent and received in this process."""
    num_received = 0
    done, lost = asyncio.Event(), asyncio.Event()

    def on_outputs(*_: object) -> None:
        nonlocal num_received
        num_received += 1
        if num_received == NUM_STEPS:
            done.set()

    receiver = OutputReceiver("127.0.0.1", on_outputs, lambda _: lost.set())
    sender = OutputSender("engine", "node", lambda _: None, lambda _: None)
    address = await receiver.start()
    await sender.connect(address)
    sender.send(address, [])
    started = time.perf_counter()
    while num_received < NUM_STEPS:
        sender.beat()
        await asyncio.sleep(0)
    await done.wait()
    seconds = time.perf_counter() - started
    sender._connections[address].result().close()
    await lost.wait()
    return seconds / NUM_STEPS
