"""Ranks in processes of their own, and an executor over pipes that holds them: real processes and groups, no Ray.

It plays the part of an executor over actors: the same steps to every rank, masks to rank 0, its tokens to the others
with the next step, digests compared.
"""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import pickle
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import pytest
from ray import cloudpickle

import manta.cluster.engine.engine
from manta.cluster.config import EngineConfig
from manta.cluster.engine.executor_choice import with_depth
from manta.cluster.engine.executors.executor import Executor, SynchronousExecutor
from manta.structured.logits_processors import LogitsProcessorFactory
from manta.structured.masks import MaskBatch
from manta.workers.model_info import ModelInfo
from manta.workers.step import StepInput, StepOutput
from tests.patience import PATIENCE_S
from tests.workers import rank_child


class RankFailed(RuntimeError):
    """A rank's answer is an exception."""


class RankProcesses:
    """`num_ranks` processes, which hold one model after the other: starting them takes longer than most tests."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([rank_child.__name__])  # imported once for all of them
        self._pipes: list[Connection] = []
        self.processes = []
        for _ in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=rank_child.serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def first(self, num_ranks: int) -> RankProcesses:
        """These of them as ranks of their own; the others rest."""
        fewer = copy.copy(self)
        fewer.num_ranks = num_ranks
        return fewer

    def tell(self, rank: int, function: Callable[..., Any], *arguments: Any) -> None:
        """`function(rank's holder, *arguments)` there; `answer` brings what it returns."""
        self._pipes[rank].send_bytes(cloudpickle.dumps((function, arguments)))

    def answer(self, rank: int) -> Any:
        """Raises `RankFailed` with what was raised there, `EOFError` where the rank is dead."""
        assert self._pipes[rank].poll(PATIENCE_S), f"rank {rank} gives no answer"
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
        address = self.call(0, rank_child.open_address)
        for rank in range(self.num_ranks):
            self.tell(rank, rank_child.make_worker, config, rank, self.num_ranks, address)
        return [self.answer(rank) for rank in range(self.num_ranks)]

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self.processes, strict=True):
            pipe.close()
            process.kill()
            process.join()


class PipeExecutor(SynchronousExecutor):
    """An `Executor` over `RankProcesses`."""

    def __init__(self, config: EngineConfig, ranks: RankProcesses) -> None:
        self._ranks = ranks
        self.infos = ranks.make_workers(config)
        self.num_steps = 0
        self.num_disagreements = 0
        self.num_rebuilt = 0
        self.gained: dict[int, list[int]] = {}

    @property
    def model(self) -> ModelInfo:
        return self.infos[0]

    def execute(self, step: StepInput) -> None:
        for rank in range(self._ranks.num_ranks):
            self._ranks.tell(rank, rank_child.execute, step, None if rank == 0 else self.gained)
        self.gained = {}
        self._answers()

    def sample(self, masks: MaskBatch | None = None) -> StepOutput:
        for rank in range(self._ranks.num_ranks):
            self._ranks.tell(rank, rank_child.sample, masks if rank == 0 else None)
        output, *others = self._answers()
        for other in others:
            assert other.step_id == output.step_id
            assert not other.token_ids
            assert not other.prompt_logprobs
            self.num_disagreements += other.digest != output.digest
        self.num_steps += 1
        self.gained = output.adopted
        return output

    def _answers(self) -> list[Any]:
        """Of every rank, before what one of them raised is raised: another's would be taken for the next call's."""
        answers, errors = [], []
        for rank in range(self._ranks.num_ranks):
            try:
                answers.append(self._ranks.answer(rank))
            except RankFailed as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return answers

    def register_logits_processor(self, name: str, factory: LogitsProcessorFactory) -> None:
        self._ranks.call(0, rank_child.register, name, factory)

    def rebuild(self) -> None:
        self.num_rebuilt += 1
        self.gained = {}
        self._ranks.call_all(rank_child.reset)


@contextlib.contextmanager
def in_forms(ranks: RankProcesses, names: Sequence[str]) -> Iterator[None]:
    """Workers made within it have kernels of these forms, which ranks take in turn."""
    try:
        for rank in range(ranks.num_ranks):
            ranks.call(rank, rank_child.use_form, names[rank % len(names)])
        yield
    finally:
        ranks.call_all(rank_child.use_form, None)


@contextlib.contextmanager
def over_ranks(ranks: RankProcesses) -> Iterator[list[PipeExecutor]]:
    """Engines made within it run on `ranks`, one at a time; the list gets their executors."""
    made: list[PipeExecutor] = []

    def make_executor(config: EngineConfig) -> Executor:
        made.append(PipeExecutor(config, ranks))
        return with_depth(made[-1], config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manta.cluster.engine.engine, "make_executor", make_executor)
        yield made
