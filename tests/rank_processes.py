"""Ranks in processes of their own, and an executor over pipes that holds them: real processes and groups, no Ray.

It plays the part of an executor over actors: the same steps to every rank, masks to rank 0, its tokens to the others
with the next step, digests compared.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
from ray import cloudpickle

import cluster.engine.engine
from cluster.config import EngineConfig
from structured.logits_processors import LogitsProcessorFactory
from structured.masks import MaskBatch
from tests.conftest import PLUGIN
from workers.model_info import ModelInfo
from workers.step import StepInput, StepOutput
from workers.worker import Worker, WorkerConfig

ANSWER_SECONDS = 120.0


class RankFailed(RuntimeError):
    """A rank's answer is an exception."""


class RankProcesses:
    """`num_ranks` processes, which hold one model after the other: starting them takes longer than most tests."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self.processes = []
        with _environment(OMP_NUM_THREADS="1"):
            for _ in range(num_ranks):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs,), daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self.processes.append(process)

    def tell(self, rank: int, function: Callable[..., Any], *arguments: Any) -> None:
        """`function(rank's holder, *arguments)` there; `answer` brings what it returns."""
        self._pipes[rank].send_bytes(cloudpickle.dumps((function, arguments)))

    def answer(self, rank: int) -> Any:
        """Raises `RankFailed` with what was raised there, `EOFError` where the rank is dead."""
        assert self._pipes[rank].poll(ANSWER_SECONDS), f"rank {rank} gives no answer"
        answer, error = pickle.loads(self._pipes[rank].recv_bytes())
        if error is not None:
            raise RankFailed(f"rank {rank}: {error}")
        return answer

    def call(self, rank: int, function: Callable[..., Any], *arguments: Any) -> Any:
        self.tell(rank, function, *arguments)
        return self.answer(rank)

    def call_all(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        for rank in range(self.num_ranks):
            self.tell(rank, function, *arguments)
        return [self.answer(rank) for rank in range(self.num_ranks)]

    def make_workers(self, config: EngineConfig) -> list[ModelInfo]:
        address = self.call(0, _open_store)
        for rank in range(self.num_ranks):
            self.tell(rank, _make_worker, config, rank, self.num_ranks, address)
        return [self.answer(rank) for rank in range(self.num_ranks)]

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self.processes, strict=True):
            pipe.close()
            process.kill()
            process.join()


class PipeExecutor:
    """An `Executor` over `RankProcesses`."""

    def __init__(self, config: EngineConfig, ranks: RankProcesses) -> None:
        self._ranks = ranks
        self.infos = ranks.make_workers(config)
        self.num_steps = 0
        self.num_disagreements = 0
        self._gained: dict[int, list[int]] = {}

    @property
    def model(self) -> ModelInfo:
        return self.infos[0]

    def execute(self, step: StepInput) -> None:
        for rank in range(self._ranks.num_ranks):
            self._ranks.tell(rank, _execute, step, None if rank == 0 else self._gained)
        self._gained = {}
        for rank in range(self._ranks.num_ranks):
            self._ranks.answer(rank)

    def sample(self, masks: MaskBatch | None = None) -> StepOutput:
        for rank in range(self._ranks.num_ranks):
            self._ranks.tell(rank, _sample, masks if rank == 0 else None)
        output, *others = (self._ranks.answer(rank) for rank in range(self._ranks.num_ranks))
        for other in others:
            assert other.step_id == output.step_id
            assert not other.token_ids
            assert not other.prompt_logprobs
            self.num_disagreements += other.digest != output.digest
        self.num_steps += 1
        self._gained = output.token_ids
        return output

    def register_logits_processor(self, name: str, factory: LogitsProcessorFactory) -> None:
        self._ranks.call(0, _register, name, factory)

    def rebuild(self) -> None:
        self._gained = {}
        self._ranks.call_all(_reset)


@contextlib.contextmanager
def over_ranks(ranks: RankProcesses) -> Iterator[list[PipeExecutor]]:
    """Engines made within it run on `ranks`, one engine at a time; the executors are in the list."""
    made: list[PipeExecutor] = []

    def make_executor(config: EngineConfig) -> PipeExecutor:
        made.append(PipeExecutor(config, ranks))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster.engine.engine, "make_executor", make_executor)
        yield made
    for executor in made:
        assert executor.num_steps > 0
        assert executor.num_disagreements == 0


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        yield


# ---- in the rank's process -------------------------------------------------------------------------------------------


class Holder:
    """What a rank's process keeps between two calls."""

    store: Any = None
    worker: Any = None


def _serve(pipe: Connection) -> None:
    sys.path.append(str(PLUGIN))
    holder = Holder()
    while True:
        try:
            function, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        answer, error = None, None
        try:
            answer = function(holder, *arguments)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}\n{traceback.format_exc()}"
        pipe.send_bytes(cloudpickle.dumps((answer, error)))


def _open_store(holder: Holder) -> str:
    from workers.parallel.group import open_store

    holder.store, address = open_store("127.0.0.1")
    return address


def _make_worker(holder: Holder, config: EngineConfig, rank: int, num_ranks: int, address: str) -> ModelInfo:
    from specdecode.worker import SpeculativeWorker

    worker_config = WorkerConfig(
        model=config.model,
        dtype=config.dtype,
        device=config.device,
        num_threads=1,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        kv_cache_bytes=config.kv_cache_bytes,
        kv_cache_fraction=config.kv_cache_fraction,
        max_num_sequences=config.max_num_sequences,
        logits_processors=config.logits_processors,
        rank=rank,
        num_ranks=num_ranks,
        group_address=address,
    )
    holder.worker = None
    speculative = config.speculative
    if rank == 0 and speculative is not None and (speculative.rank_proposers or speculative.adaptive):
        holder.worker = SpeculativeWorker(worker_config, speculative, config.tokenizer)
    else:
        holder.worker = Worker(worker_config)
    return holder.worker.info


def _execute(holder: Holder, step: StepInput, gained: dict[int, list[int]] | None) -> None:
    if gained:
        holder.worker.adopt(gained)
    holder.worker.execute(step)


def _sample(holder: Holder, masks: MaskBatch | None) -> StepOutput:
    return holder.worker.sample(masks)


def _register(holder: Holder, name: str, factory: LogitsProcessorFactory) -> None:
    holder.worker.register_logits_processor(name, factory)


def _reset(holder: Holder) -> None:
    holder.worker.reset()
