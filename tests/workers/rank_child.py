"""A rank's process of `tests/workers/rank_processes.py` runs these functions, called by name, on what it holds."""

from __future__ import annotations

import os
import pathlib
import pickle
import sys
import tempfile
import traceback
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch

from manta.cluster.config import EngineConfig
from manta.cluster.engine.executors import worker_factory
from manta.structured.logits_processors import LogitsProcessorFactory
from manta.structured.masks import MaskBatch
from manta.workers.kernels import cpu_all_reduce, processor, shared_prefixes
from manta.workers.model_info import ModelInfo
from manta.workers.parallel.group import GlooGroup, private_address
from manta.workers.step import StepInput, StepOutput
from tests.workers.cpu_forms import environment_of, forget_libraries


class Holder:
    """What the process keeps between two calls."""

    folder: Any = None
    worker: Any = None


def serve(pipe: Connection) -> None:
    sys.path.append(str(pathlib.Path(__file__).parents[1] / "plugin"))
    shared_prefixes.MEMBER_COST_KEYS = 16  # as the fixture cheap_groups
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
        pipe.send_bytes(pickle.dumps((answer, error)))


def open_address(holder: Holder) -> str:
    holder.folder = tempfile.TemporaryDirectory()
    return private_address(pathlib.Path(holder.folder.name))


def make_worker(holder: Holder, config: EngineConfig, rank: int, num_ranks: int, address: str) -> ModelInfo:
    holder.worker = None  # what it held is free before the next one loads
    config = msgspec.structs.replace(config, num_threads=config.num_threads or 1, tensor_parallel_size=num_ranks)
    holder.worker = worker_factory.make_worker(config, rank, address)
    return holder.worker.info


def execute(holder: Holder, step: StepInput, gained: dict[int, list[int]] | None) -> None:
    if gained:
        holder.worker.adopt(gained)
    holder.worker.execute(step)


def sample(holder: Holder, masks: MaskBatch | None) -> StepOutput:
    return holder.worker.sample(masks)


def register(holder: Holder, name: str, factory: LogitsProcessorFactory) -> None:
    holder.worker.register_logits_processor(name, factory)


def reset(holder: Holder) -> None:
    holder.worker.reset()


def fail_next_step(holder: Holder) -> None:
    """As where something raises that no one foresaw: on every rank, before the ranks need each other."""
    forward = holder.worker.runner._forward

    def failing(step: StepInput) -> torch.Tensor:
        holder.worker.runner._forward = forward
        raise RuntimeError("the step fails")

    holder.worker.runner._forward = failing


def share_memory(holder: Holder, allowed: bool) -> None:
    """Whether groups that are made from now on may."""
    cpu_all_reduce.create_file = _CREATE_FILE if allowed else lambda num_ranks: None  # type: ignore[assignment]


_CREATE_FILE = cpu_all_reduce.create_file


def use_form(holder: Holder, name: str | None) -> None:
    """Sets the form of the kernels for later workers; None is the form that the process began with."""
    holder.worker = None
    for variable, value in _FIRST_FORM.items():
        os.environ.pop(variable, None)
        if value is not None:
            os.environ[variable] = value
    if name is not None:
        os.environ.update(environment_of(name))
    forget_libraries()


_FIRST_FORM = {variable: os.environ.get(variable) for variable in (processor.VARIABLE, "CXX")}


def shares_memory(holder: Holder) -> bool:
    return holder.worker.group.shared is not None


def num_sharing_memory(holder: Holder) -> int:
    return holder.worker.group.num_sharing_memory


def num_called_back(holder: Holder) -> int | None:
    """Linears that the one call of all layers leaves C++ for; None where there is no such call."""
    layers = holder.worker.runner.model.compiled
    return None if layers is None else len(layers.called_back)


def all_reduce(holder: Holder, parts: list[torch.Tensor]) -> torch.Tensor:
    """Of this rank's part."""
    group = holder.worker.group
    return group.all_reduce(parts[group.rank])


def all_reduce_over_tcp(holder: Holder, parts: list[torch.Tensor]) -> torch.Tensor:
    group = holder.worker.group
    return GlooGroup.all_reduce(group, parts[group.rank])


def gather(holder: Holder, parts: list[torch.Tensor]) -> list[torch.Tensor] | None:
    group = holder.worker.group
    return group.gather(parts[group.rank])


def all_gather(holder: Holder, parts: list[torch.Tensor]) -> torch.Tensor:
    """Returns every rank's part, side by side."""
    group = holder.worker.group
    return group.shared.all_gather(parts[group.rank])
