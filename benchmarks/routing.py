"""Which engine gets which chat, and what that is worth: `manta bench cluster --parts routing`.

First the simulation of `benchmarks/routing_simulation.py`. Then four engines of the tiny model behind one ingress, with
chats of several turns under a few system prompts, by the router that Serve asks: Manta's, round robin, Serve's own
(two choices by queue length) and the prefix router of Ray's LLM library. Last, what a client waits who asks for one
thing at a time beside another one with 500 requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import secrets
import statistics
import time
import timeit
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

from ray import serve
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
from ray.serve.config import ProxyLocation, RequestRouterConfig
from ray.serve.experimental.round_robin_router import RoundRobinRouter
from ray.serve.request_router import PendingRequest, RunningReplica

from benchmarks import routing_simulation as simulation
from benchmarks.checkpoints import benchmark_checkpoint
from benchmarks.http_load import posted
from benchmarks.processes import BenchmarkError, free_port
from manta.cluster import own_ray
from manta.cluster.config import EngineConfig, ServeConfig
from manta.cluster.engine.kv_blocks import hash_blocks
from manta.cluster.engine.request import EngineRequest
from manta.cluster.serve.engine_deployment import engine_deployment
from manta.cluster.serve.ingress import ingress_deployment
from manta.cluster.serve.routing.prefix_index import block_keys

NUM_ENGINES = 4
NUM_STREAMS, NUM_SYSTEM_PROMPTS, NUM_CHATS_OF_PROMPT, NUM_TURNS = 8, 4, 12, 6
SYSTEM_TOKENS, TURN_TOKENS, OUTPUT_TOKENS = 512, 96, 16
KV_TOKENS = 16_384
"""KV cache of each engine: room for a quarter of a round's chats, and for the system prompts."""
LOOKED_UP_AND_FOUND = "prefix_cache_queries_total", "prefix_cache_hits_total"
"""Metrics that count prompt tokens."""
FLOOD, NUM_ASKED = 500, 30
KEYS = {"flood": "flood-0123456789abcdef", "other": "other-0123456789abcdef"}


class AffinityRouter(PrefixCacheAffinityRouter):
    """The one of Ray's LLM library, which goes by text: a character stands for each token."""

    def _extract_text_from_request(self, pending_request: PendingRequest) -> str:
        return "".join(chr(0x10000 + token_id) for token_id in pending_request.args[0].prompt_token_ids)

    async def _prefix_match_best_replicas(
        self, pending_request: PendingRequest | None, candidate_replicas: list[RunningReplica]
    ) -> list[list[RunningReplica]]:
        if not _is_prompt(pending_request):
            return [[]]
        return await super()._prefix_match_best_replicas(pending_request, candidate_replicas)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: Any, result: Any) -> None:
        if _is_prompt(pending_request):
            super().on_request_routed(pending_request, replica_id, result)


def _is_prompt(pending: PendingRequest | None) -> bool:
    return pending is not None and bool(pending.args) and isinstance(pending.args[0], EngineRequest)


ROUTERS: dict[str, RequestRouterConfig | None] = {
    "Manta": None,
    "round robin": RequestRouterConfig(request_router_class=RoundRobinRouter),  # type: ignore[arg-type]
    "Serve's two choices": RequestRouterConfig(),
    "Ray LLM's prefix router": RequestRouterConfig(request_router_class=AffinityRouter),  # type: ignore[arg-type]
}


class Measured(NamedTuple):
    hit_rate: float
    ttft: list[float]
    seconds: float


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


# ---- a thousand replicas -----------------------------------------------------------------------------------------


def simulated(workload: simulation.Workload) -> Iterator[str]:
    """Rows of a table, each as soon as its router is done."""
    yield (
        f"{workload.num_replicas} simulated replicas, {workload.num_ingresses} ingresses, reports every "
        f"{simulation.BEAT_S} s; load: choices at a replica, mean of the last {workload.seconds / 2:g} s"
    )
    yield ""
    columns = (
        "router",
        "requests",
        "hit rate",
        "of the most possible",
        "TTFT p50 / p99, ms",
        "load",
        "p1, p99, most, of the mean",
        "decision p50 / p99, us",
    )
    yield f"| {' | '.join(columns)} |"
    yield f"|{' --- |' * len(columns)}"
    for router in (simulation.Manta, simulation.Oracle, simulation.TwoChoices, simulation.RoundRobin):
        outcome = simulation.simulate(workload, router)
        mean = statistics.mean(outcome.loads)
        cells = [
            router.__name__,
            str(outcome.num_requests),
            f"{outcome.hit_rate:.3f}",
            f"{outcome.hit_rate / outcome.best_hit_rate:.3f}",
            " / ".join(f"{quantile(outcome.ttft, share) * 1e3:.0f}" for share in (0.5, 0.99)),
            f"{mean:.1f}",
            ", ".join(f"{quantile(outcome.loads, share) / mean:.2f}" for share in (0.01, 0.99, 1)),
            " / ".join(f"{quantile(outcome.decision_s, share) * 1e6:.0f}" for share in (0.5, 0.99)),
        ]
        yield f"| {' | '.join(cells)} |"
        if router is simulation.Manta:
            num_blocks = outcome.num_index_blocks
    yield ""
    yield f"an ingress's index: {num_blocks} blocks; to hash one, before the decision: {hash_s() * 1e6:.2f} us"


def hash_s(num_blocks: int = 128) -> float:
    """Seconds for a block of a prompt of so many: its hash, and its key in the index. The best of ten."""
    size = simulation.BLOCK_SIZE
    token_ids = list(range(num_blocks * size))
    return min(timeit.repeat(lambda: block_keys(hash_blocks(token_ids, num_blocks, size)), number=1)) / num_blocks


# ---- four engines ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def running(router: RequestRouterConfig | None, num_engines: int, **options: Any) -> Iterator[tuple[int, str]]:
    """The application with a router, on the Ray of this process; gives port and model name."""
    folder = benchmark_checkpoint("tiny-llama")
    # 4 layers, 2 KV heads of 64, keys and values, bfloat16
    engine = EngineConfig(model=str(folder), kv_cache_bytes=KV_TOKENS * 4 * 2 * 64 * 2 * 2, num_threads=1, **options)
    config = ServeConfig(
        engine=engine,
        http_server="listener",
        port=free_port(),
        num_engine_replicas=num_engines,
        log_requests=False,
        api_keys=tuple(f"{name}:{key}" for name, key in KEYS.items()),
    )
    engines = engine_deployment(engine, num_engines)
    if router is not None:
        engines = engines.options(request_router_config=router)
    application = ingress_deployment(config, num_nodes=1).bind(config, engines.bind(engine), secrets.token_bytes())
    serve.run(application, name="routing", route_prefix=None)
    try:
        yield config.port, config.model_name
    finally:
        serve.delete("routing")


def _counted(port: int, *names: str) -> list[float]:
    """Values of metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    values = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    return [values[f"manta:{name}"] for name in names]


class Asked(NamedTuple):
    """Seconds of one answer."""

    ttft: float
    step: float
    """Mean seconds between two of its later tokens."""


async def _ask(port: int, model: str, prompt: list[int], max_tokens: int, client: str) -> Asked:
    """The answer is read to its end."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    sent, first, last = time.perf_counter(), 0.0, 0.0
    async with posted(port, "/v1/completions", body, {"Authorization": f"Bearer {KEYS[client]}"}) as response:
        text = b""
        async for piece in response.pieces:
            text += piece
            if b"data: {" in piece:
                last = time.perf_counter() - sent
                first = first or last
        if response.status != 200 or b"[DONE]" not in text:
            raise BenchmarkError(f"the server answered {response.status}: {text[:300].decode()}")
    return Asked(first, (last - first) / (max_tokens - 1))


async def _chats(port: int, model: str, seed: int) -> list[float]:
    """Seconds to the first token of every turn; each of `NUM_STREAMS` has one chat after the other."""
    rng = random.Random(seed)
    draw = lambda count: [rng.randrange(5, 30_000) for _ in range(count)]  # noqa: E731
    systems = [draw(SYSTEM_TOKENS) for _ in range(NUM_SYSTEM_PROMPTS)]
    chats = iter([(system, [draw(TURN_TOKENS) for _ in range(NUM_TURNS)]) for system in systems * NUM_CHATS_OF_PROMPT])
    ttft: list[float] = []

    async def stream() -> None:
        for system, turns in chats:
            prompt = list(system)
            for turn in turns:
                prompt += turn
                ttft.append((await _ask(port, model, prompt, OUTPUT_TOKENS, "other")).ttft)

    await asyncio.gather(*(stream() for _ in range(NUM_STREAMS)))
    return ttft


def chats(router: RequestRouterConfig | None, seed: int) -> Measured:
    with running(router, NUM_ENGINES) as (port, model):
        asyncio.run(_ask(port, model, [5, 6, 7], 2, "other"))
        before = _counted(port, *LOOKED_UP_AND_FOUND)
        started = time.perf_counter()
        ttft = asyncio.run(_chats(port, model, seed))
        seconds = time.perf_counter() - started
        after = _counted(port, *LOOKED_UP_AND_FOUND)
        return Measured((after[1] - before[1]) / (after[0] - before[0]), ttft, seconds)


def real(num_rounds: int) -> Iterator[str]:
    """Rows of a table: every router has its turn in every round. After several rounds come rows of all of them."""
    found: dict[str, list[Measured]] = {name: [] for name in ROUTERS}
    yield (
        f"{NUM_ENGINES} engines of the tiny model; {NUM_STREAMS} streams, {NUM_SYSTEM_PROMPTS} system prompts, "
        f"{NUM_CHATS_OF_PROMPT} chats of {NUM_TURNS} turns under each"
    )
    yield ""
    yield "| round | router | hit rate | TTFT p50, ms | TTFT p99, ms | seconds |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for number, (name, router) in itertools.product(range(num_rounds), ROUTERS.items()):
        found[name].append(chats(router, number))
        yield _row(str(1 + number), name, found[name][-1:])
    if num_rounds > 1:
        for name, rounds in found.items():
            yield _row("all", name, rounds)


def _row(label: str, router: str, rounds: list[Measured]) -> str:
    ttft = [second for measured in rounds for second in measured.ttft]
    figures = [
        f"{statistics.mean(measured.hit_rate for measured in rounds):.3f}",
        *(f"{quantile(ttft, share) * 1e3:.1f}" for share in (0.5, 0.99)),
        f"{statistics.median(measured.seconds for measured in rounds):.1f}",
    ]
    return f"| {' | '.join([label, router, *figures])} |"


# ---- fairness ----------------------------------------------------------------------------------------------------


async def _beside_a_flood(port: int, model: str) -> tuple[list[Asked], list[Asked]]:
    """One client's requests: alone, and while another has `FLOOD` in the queue."""
    rng = random.Random(1)
    draw = lambda: [rng.randrange(5, 30_000) for _ in range(128)]  # noqa: E731
    await _ask(port, model, draw(), 2, "other")
    alone = [await _ask(port, model, draw(), 8, "other") for _ in range(NUM_ASKED)]
    flood = [asyncio.ensure_future(_ask(port, model, draw(), 512, "flood")) for _ in range(FLOOD)]
    while sum(await asyncio.to_thread(_counted, port, "num_requests_running", "num_requests_waiting")) < 0.9 * FLOOD:
        await asyncio.sleep(0.1)
    beside = [await _ask(port, model, draw(), 8, "other") for _ in range(NUM_ASKED)]
    if all(each.done() for each in flood):
        raise BenchmarkError("the flood was over too soon")
    for each in flood:
        each.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    return alone, beside


def fairness() -> Iterator[str]:
    yield f"a client with one request at a time, alone and beside another one with {FLOOD} in the queue"
    yield ""
    yield "| engines | TTFT p50 / p99 alone, ms | beside the flood | a step then, ms | bar: twice alone and a step |"
    yield "| --- | --- | --- | --- | --- |"
    for num_engines in (1, 2):
        with running(None, num_engines, max_num_sequences=16) as (port, model):
            both = asyncio.run(_beside_a_flood(port, model))
        alone, beside = ([each.ttft for each in asked] for asked in both)
        step = quantile([each.step for each in both[1]], 0.5)
        cells = [" / ".join(f"{quantile(ttft, share) * 1e3:.1f}" for share in (0.5, 0.99)) for ttft in (alone, beside)]
        cells += [f"{step * 1e3:.1f}", f"{(2 * quantile(alone, 0.5) + step) * 1e3:.1f}"]
        yield f"| {num_engines} | {' | '.join(cells)} |"


def measure(num_rounds: int) -> None:
    """Prints the three tables, row by row."""
    _print(simulated(simulation.Workload()))
    os.environ.setdefault("RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP", "0")  # as `manta serve` has it
    os.environ.setdefault("RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD", "0")
    own_ray.start(NUM_ENGINES)
    serve.start(ProxyLocation.Disabled, logging_config={"enable_access_log": False})
    try:
        _print(real(num_rounds))
        _print(fairness())
    finally:
        serve.shutdown()
        own_ray.stop()


def _print(lines: Iterator[str]) -> None:
    for line in lines:
        print(line, flush=True)
    print(flush=True)
