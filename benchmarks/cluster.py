"""`manta bench cluster`: what ranks in processes of their own cost, batches, and streams that outlive their engine.

    transport   a decode step of the tiny model, by what carries it to its ranks: frames over TCP (what Manta does),
                with the plain step loop and the overlapped one, calls of Ray's actors, a compiled graph of Ray; over
                the same step in the engine's own process. One rank shows what the transport costs, two what it costs
                beside their sums over shared memory
    tp          forward pass and draw of one rank against two, and their sums (`benchmarks/tensor_parallel.py`)
    autoscaling engines that come and go with the load, none to three and back (`benchmarks/autoscaling.py`)
    batch       `manta batch` over `LLM.generate`, the same prompts (`benchmarks/batch.py`)
    resume      what streams that can go on elsewhere cost while nothing fails (`benchmarks/resume.py`)
    reconnecting  many resumable streams whose clients lose connections: their bytes, pauses and memory
                (`benchmarks/reconnecting.py`)
    own-ray     what a Ray of our own saves by leaving processes out (`benchmarks/own_ray.py`)
    http        what lies between clients and engines: listeners or Serve's proxies (`benchmarks/cluster_http.py`)
    routing     which engine gets which chat, in a simulation of a thousand and with four real ones, and what a client
                waits beside another one's flood (`benchmarks/routing.py`)

Blocks of each transport take turns in one process, one thread a rank. Frames are what the fault tests run on
(`tests/engine/test_ray_executor.py`); the others live here alone.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import ray
from ray.dag import InputNode, MultiOutputNode

from benchmarks.autoscaling import autoscaling
from benchmarks.batch import batch as measure_batches
from benchmarks.checkpoints import benchmark_checkpoint
from benchmarks.cluster_http import ALL_WAYS, STREAMS, http
from benchmarks.overlap import llm_on
from benchmarks.own_ray import own_ray_extras
from benchmarks.reconnecting import NUM_STREAMS, reconnecting
from benchmarks.report import machine, turns
from benchmarks.resume import resume
from benchmarks.tensor_parallel import print_tables
from manta.cluster import own_ray
from manta.cluster.config import EngineConfig
from manta.cluster.engine.executors.executor import SynchronousExecutor
from manta.cluster.engine.executors.in_process import InProcessExecutor
from manta.cluster.engine.ranks.actor import RankActor
from manta.cluster.engine.ranks.rank_messages import Answer, Message, Output, Sample, Step
from manta.cluster.engine.ranks.ray_executor import RayExecutor
from manta.cluster.llm import LLM, SamplingParams
from manta.structured.logits_processors import LogitsProcessorFactory
from manta.structured.masks import MaskBatch
from manta.workers.model_info import ModelInfo
from manta.workers.step import StepInput, StepOutput

RANKS = (1, 2)
ROWS = (1, 8, 32)
PROMPT, WARM_UP_STEPS = 16, 8
TP_SHAPE = "qwen2.5-0.5b"


class CalledRank(RankActor):
    """A rank that is told its steps by calls: whole ones, as there are no masks here."""

    def call(self, data: bytes) -> bytes:
        answer = self._handle(msgspec.msgpack.decode(data, type=Message))
        if answer is None:
            answer = self._handle(Sample())
        return msgspec.msgpack.encode(answer)


class CallExecutor(SynchronousExecutor):
    """Steps by calls of Ray's actors; `_call` sends a message to all ranks and returns what they answer."""

    def __init__(self, config: EngineConfig) -> None:
        actor_class: Any = ray.remote(num_cpus=0)(CalledRank)
        self.actors = [actor_class.remote(config.num_threads) for _ in range(config.tensor_parallel_size)]
        ray.get(self.actors[0].open_folder.remote())
        address = ray.get(self.actors[0].open_store.remote(True))
        infos = ray.get([actor.load.remote(config, rank, address) for rank, actor in enumerate(self.actors)])
        self._info: ModelInfo = infos[0]
        self._adopted: dict[int, list[int]] = {}
        self._answers: Any = None

    @property
    def model(self) -> ModelInfo:
        return self._info

    def execute(self, step: StepInput) -> None:
        self._answers = self._call(msgspec.msgpack.encode(Step(step, self._adopted)))

    def sample(self, masks: MaskBatch | None = None) -> StepOutput:
        first, *_ = [msgspec.msgpack.decode(answer, type=Answer) for answer in ray.get(self._answers)]
        assert isinstance(first, Output), first
        self._adopted = first.output.token_ids
        return first.output

    def _call(self, data: bytes) -> Any:
        return [actor.call.remote(data) for actor in self.actors]

    def register_logits_processor(self, name: str, factory: LogitsProcessorFactory) -> None:
        raise NotImplementedError

    def rebuild(self) -> None:
        raise RuntimeError("nothing fails here")


class GraphExecutor(CallExecutor):
    """Steps by a compiled graph of Ray: channels of shared memory, and a loop in each actor."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        with InputNode() as data:
            outputs = MultiOutputNode([actor.call.bind(data) for actor in self.actors])
        self._graph = outputs.experimental_compile()

    def _call(self, data: bytes) -> Any:
        return self._graph.execute(data)


IN_PROCESS = "in process"
TRANSPORTS: dict[str, tuple[Callable[[EngineConfig], SynchronousExecutor], str]] = {
    "frames": (RayExecutor, "off"),
    "frames, overlapped": (RayExecutor, "on"),
    "Ray calls": (CallExecutor, "off"),
    "compiled graph": (GraphExecutor, "off"),
}
"""The executor, and whether the driver plans a step while ranks run the one before it (`EngineConfig.overlap`)."""


def tensor_parallel(num_rounds: int, num_tokens: int) -> None:
    """Prints the tables of `benchmarks/tensor_parallel.py`, whose steps have a length of their own."""
    print_tables(TP_SHAPE, num_rounds)


def transport(num_rounds: int, num_tokens: int) -> None:
    """Prints a row for each transport, number of ranks and number of rows."""
    own_ray.start(2 * max(RANKS))  # what two executors claim; one engine runs at a time
    print("| ranks | rows | transport | steps | p50, ms | p99, ms | over in process |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for num_ranks in RANKS:
        engines = {IN_PROCESS: _engine(1, InProcessExecutor, "off")}
        engines |= {name: _engine(num_ranks, make, overlap) for name, (make, overlap) in TRANSPORTS.items()}
        for num_rows in ROWS:
            for name, figures in _turns(engines, num_rows, num_rounds, num_tokens).items():
                print(f"| {num_ranks} | {num_rows} | {name} | {figures} |", flush=True)
        del engines
        gc.collect()


def _turns(engines: dict[str, LLM], num_rows: int, num_rounds: int, num_tokens: int) -> dict[str, str]:
    """The figures of each engine as cells."""
    seconds: dict[str, list[list[float]]] = {name: [] for name in engines}
    for number in turns(num_rounds + 1, f"{num_rows} rows"):
        for name, llm in engines.items():
            block = _block(llm, num_rows, num_tokens)
            if number > 0:  # the first one warms up
                seconds[name].append(block)
    cells = {}
    for name, blocks in seconds.items():
        steps = sorted(second for block in blocks for second in block)
        pairs = zip(blocks, seconds[IN_PROCESS], strict=True)
        ratio = statistics.median(statistics.median(block) / statistics.median(base) for block, base in pairs)
        figures = statistics.median(steps) * 1e3, steps[int(0.99 * len(steps))] * 1e3, ratio
        cells[name] = " | ".join([str(len(steps)), *(f"{figure:.3f}" for figure in figures)])
    return cells


def _engine(num_ranks: int, make: Callable[[EngineConfig], SynchronousExecutor], overlap: str) -> LLM:
    config = EngineConfig(model=str(benchmark_checkpoint("tiny-llama")), kv_cache_bytes=1 << 27, num_threads=1)
    return llm_on(make, config, tensor_parallel_size=num_ranks, overlap=overlap)


def _block(llm: LLM, num_rows: int, num_tokens: int) -> list[float]:
    """Seconds of each decode step."""
    params = SamplingParams(temperature=0, max_tokens=WARM_UP_STEPS + num_tokens, ignore_eos=True)
    for row in range(num_rows):
        llm.add_request(str(row), [5 + row] * PROMPT, params)
    seconds = []
    while llm.engine.has_unfinished:
        started = time.perf_counter()
        llm.step()
        seconds.append(time.perf_counter() - started)
    return seconds[WARM_UP_STEPS:-1]


def routing(num_rounds: int) -> None:
    from benchmarks.routing import measure  # Ray's LLM library, which it compares with, takes a second to load

    measure(num_rounds)


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "transport": lambda options: transport(options.rounds, options.tokens),
    "tp": lambda options: tensor_parallel(options.rounds, options.tokens),
    "resume": lambda options: resume(options.rounds, options.tokens),
    "reconnecting": lambda options: reconnecting(options.kept),
    "own-ray": lambda options: own_ray_extras(options.rounds),
    "http": lambda options: http(
        options.starts,
        options.rounds,
        options.tokens,
        [int(count) for count in options.streams.split(",")],
        options.ways.split(","),
        options.peer_checkout,
    ),
    "autoscaling": lambda options: autoscaling(options.rounds, options.tokens),
    "batch": lambda options: measure_batches(options.rounds),
    "routing": lambda options: routing(options.rounds),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="manta bench cluster",
        description="What ranks in processes of their own cost, batches, and streams that outlive their engine.",
    )
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument(
        "--rounds",
        type=int,
        default=10,
        help="blocks of each transport, or of batches; resume takes three pairs for each (default: 10)",
    )
    parser.add_argument("--tokens", type=int, default=100, help="steps of a block (default: 100)")
    parser.add_argument("--streams", default=",".join(map(str, STREAMS)), help="http: how many at a time")
    parser.add_argument(
        "--kept", type=int, default=NUM_STREAMS, help=f"reconnecting: how many streams (default: {NUM_STREAMS})"
    )
    parser.add_argument("--ways", default=",".join(ALL_WAYS), help="http: some of these, compared with own Ray")
    parser.add_argument("--peer-checkout", metavar="PATH", help="http: compare each way with another commit's checkout")
    parser.add_argument("--starts", type=int, default=3, help="http: times that all servers start anew (default: 3)")
    options = parser.parse_args(arguments)
    print(machine(), file=sys.stderr)
    for part in options.parts.split(","):
        if part not in PARTS:
            parser.error(f"--parts {part}: use some of {', '.join(PARTS)}")
    for way in options.ways.split(","):
        if way not in ALL_WAYS:
            parser.error(f"--ways {way}: use some of {', '.join(ALL_WAYS)}")
    for part in options.parts.split(","):
        PARTS[part](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
