"""The executor whose ranks are Ray actors, on this machine or others.

Rank 0 draws the tokens, and the other ranks get them with the next step. A rank that dies or hangs costs one step: all
ranks are restarted, and the engine recomputes running sequences from their tokens. The engine's process needs no torch.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
import weakref
from collections.abc import Sequence

import msgspec
import ray
from ray import cloudpickle

from manta.cluster import own_ray
from manta.cluster.config import EngineConfig, ray_address
from manta.cluster.engine.executors.deadline import LATE_SHARE, StepDeadline
from manta.cluster.engine.executors.executor import SynchronousExecutor
from manta.cluster.engine.ranks.claims import cluster_gpus, cluster_tpus, node_cpus, threads_each, with_device
from manta.cluster.engine.ranks.rank_channel import RankLost
from manta.cluster.engine.ranks.rank_group import RankGroup
from manta.cluster.engine.ranks.rank_messages import (
    Answer,
    DropAdapter,
    DropKept,
    Failed,
    Held,
    HoldAdapter,
    KeepBlocks,
    Message,
    Moved,
    Output,
    PackedMasks,
    Ping,
    Register,
    Reset,
    RestoreBlocks,
    Sample,
    Step,
)
from manta.structured.host import num_cores
from manta.structured.logits_processors import LogitsProcessorError, LogitsProcessorFactory
from manta.structured.masks import MaskBatch
from manta.structured.visible_logs import logger_of
from manta.workers.model_info import AdapterInfo, ModelInfo
from manta.workers.models.model_config import ModelError
from manta.workers.prefix_store import BlockPart
from manta.workers.ranks.rank_worker import ReadAdapter
from manta.workers.step import StepInput, StepOutput

logger = logger_of(__name__)

CONTROL_S = 60.0
"""Seconds in which a rank must answer a message other than a step. Registering a logits processor may import a lot."""
START_ATTEMPTS = 2
"""Attempts to restart the ranks after a failure, because another rank may die meanwhile."""


class RankFailed(RuntimeError):
    """A rank raised an error; it still serves."""


class RanksAdapter:
    """An adapter that all ranks have read and keep under a number, as long as the engine has this object."""

    def __init__(self, number: int, digest: str, num_bytes: int) -> None:
        self.number = number
        self.digest = digest
        self.num_bytes = num_bytes
        """Bytes of the largest share of a rank."""


class RayExecutor(SynchronousExecutor):
    """Runs steps on Ray actors. Starts Ray on this machine unless the process is connected or `RAY_ADDRESS` is set.

    Raises `ModelError` or `ValueError` if the model cannot be served or the ranks cannot be placed.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.num_rank_rebuilds = 0
        self.num_rank_disagreements = 0
        self._factories: dict[str, bytes] = {}
        """Registered logits processors by name, as cloudpickle bytes; restarted ranks get them again."""
        self._adapter_numbers = itertools.count()
        self._reading = threading.Lock()
        """Lock of the thread that has an adapter read."""
        self._fixed: dict[str, AdapterInfo] | None = None
        """The adapters of the configuration as the first ranks have found them; None before."""
        self.deadline = StepDeadline()
        self._group = RankGroup(_on_ray(config))
        # The actors end with this process; the finalizer serves a process that outlives its engine
        weakref.finalize(self, self._group.stop)
        self._start()

    def _start(self) -> None:
        self._model, self._ranks = self._group.start()
        self._check_fixed_adapters()
        self._adapters: weakref.WeakValueDictionary[int, RanksAdapter] = weakref.WeakValueDictionary()
        """Adapters that these ranks have read, by number."""
        self.deadline.even_context = self._model.even_context
        self.deadline.restart()
        self._adopted: dict[int, list[int]] = {}
        """Sequence ids with the tokens that rank 0 drew in the last step."""
        self._is_asked = False
        """Whether rank 0 was asked to report the end of the last step's forward pass."""
        self._step: StepInput | None = None
        """The step whose `Sample` is still to be sent, or None."""
        self._size = 0, 0
        """Tokens and longest context of the last step, as `StepDeadline` counts them."""
        self._late_at = math.inf
        """Time at which the step under way counts as late; infinite between two steps."""
        for name, factory in self._factories.items():
            self._tell(Register(name, factory), 0)

    def _check_fixed_adapters(self) -> None:
        """Raises `ModelError` if restarted ranks have found other values in the folders of the configuration than
        those that requests of this engine name.
        """
        found = self._model.adapters
        for name, before in (self._fixed or found).items():
            if found[name].digest != before.digest:
                raise ModelError(f"adapter {name!r}: {before.path} has other values than when the engine started")
        self._fixed = found

    @property
    def model(self) -> ModelInfo:
        return self._model

    @property
    def rank_pids(self) -> list[int]:
        """Process ids of the present ranks, each on its node."""
        return self._ranks.pids

    # ---- steps ---------------------------------------------------------------------------------------------------

    def execute(self, step: StepInput) -> None:
        self._started = time.monotonic()
        self._step, self._size, self._is_asked = step, step.size, False
        self._late_at = self._started + LATE_SHARE * self.deadline.seconds(*self._size)
        self._ranks.send(Step(step, self._adopted), self._ranks.all, owing=self._ranks.followers)

    def is_computing(self) -> bool:
        try:
            if not self._is_asked:
                self._is_asked = True
                self._ranks.ask(Ping(), 0)
            is_late = time.monotonic() - self._started > self.deadline.seconds(*self._size)
            return self._ranks.owes(0) and not is_late
        except RankLost:  # `sample` raises it again
            return False

    def sample(self, masks: MaskBatch | None = None) -> StepOutput:
        step = self._step
        if step is None:
            raise RuntimeError("sample() was called without an execute() before it")
        self._ranks.ask(Sample(None if masks is None else PackedMasks.of(masks)), 0)
        self._step = None
        output, *others = _outputs(self._ranks.collect(self.deadline.seconds(*self._size)))
        self._late_at = math.inf
        if step.scheduled:
            num_tokens, context = self._size
            self.deadline.learn(num_tokens, time.monotonic() - self._started, context)
        self.num_rank_disagreements += sum(other.digest != output.digest for other in others)
        self._adopted = output.adopted
        return output

    # ---- between steps -------------------------------------------------------------------------------------------

    def register_logits_processor(self, name: str, factory: LogitsProcessorFactory) -> None:
        """Registers a factory with rank 0. Raises `LogitsProcessorError` if it cannot be sent or rank 0 refuses it."""
        try:
            pickled = cloudpickle.dumps(factory)
            with contextlib.suppress(RankLost):  # the next step fails too, and restarted ranks get the factory
                self._tell(Register(name, pickled), 0)
        except Exception as error:
            raise LogitsProcessorError.of(name, "unfit", f"it cannot be sent to its rank: {error}") from error
        self._factories[name] = pickled

    def has_lost_ranks(self) -> bool:
        try:
            self._ranks.owes(0)
        except RankLost:
            return True
        return False

    def is_late(self) -> bool:
        return time.monotonic() > self._late_at

    def restore_blocks(self, parts: Sequence[BlockPart]) -> list[bool]:
        return self._move(RestoreBlocks(list(parts)), otherwise=[False] * len(parts))

    def keep_blocks(self, parts: Sequence[BlockPart]) -> list[bool]:
        return self._move(KeepBlocks(list(parts)), otherwise=[True] * len(parts))

    def _move(self, message: RestoreBlocks | KeepBlocks, otherwise: list[bool]) -> list[bool]:
        """Returns what all ranks have done; `otherwise` if one is lost, because then the next step fails too."""
        try:
            answers = self._tell(message, *self._ranks.all)
        except (RankLost, RankFailed):
            return otherwise
        by_rank = [answer.are_done for answer in answers if isinstance(answer, Moved)]
        return [all(each) for each in zip(*by_rank, strict=True)]

    def drop_kept(self, hashes: Sequence[bytes]) -> None:
        with contextlib.suppress(RankLost, RankFailed):
            self._tell(DropKept(list(hashes)), *self._ranks.all)

    def read_adapter(self, path: str) -> ReadAdapter:
        with self._reading:
            number = next(self._adapter_numbers)
            try:
                shares = self._group.read_adapter(path, number, list(self._adapters))
            except RankLost as error:
                raise ConnectionError(str(error)) from error
            digest, _ = shares[0]
            if any(other != digest for other, _ in shares):
                raise ModelError(f"{path} has other values on other nodes; copy it there again")
            adapter = RanksAdapter(number, digest, max(num_bytes for _, num_bytes in shares))
            self._adapters[number] = adapter
            return adapter

    def hold_adapter(self, adapter: ReadAdapter) -> bool:
        assert isinstance(adapter, RanksAdapter), "it was read here"
        if self._adapters.get(adapter.number) is not adapter:
            raise ConnectionError("the ranks that have read the adapter are gone")
        try:
            answers = self._tell(HoldAdapter(adapter.number), *self._ranks.all)
        except (RankLost, RankFailed) as error:
            raise ConnectionError(str(error)) from error
        if all(answer.has_room for answer in answers if isinstance(answer, Held)):
            return True
        self.drop_adapter(adapter.digest)  # other ranks may have had room
        return False

    def drop_adapter(self, digest: str) -> None:
        with contextlib.suppress(RankLost, RankFailed):
            self._tell(DropAdapter(digest), *self._ranks.all)

    def rebuild(self) -> None:
        if self._reset():
            return
        self.num_rank_rebuilds += 1
        for attempt in range(1, START_ATTEMPTS + 1):
            started = time.monotonic()
            self._ranks.close()
            try:
                self._start()
                break
            except Exception:
                if attempt == START_ATTEMPTS:
                    self._group.stop()  # the replica that replaces this engine needs the resources
                    raise
                logger.exception("the ranks could not be started anew; trying once more")
        logger.warning("the ranks were started anew in %.1f s", time.monotonic() - started)

    def _reset(self) -> bool:
        """Makes all ranks forget every sequence; returns False if a rank is lost or fails.

        A step that has begun is finished first, because other ranks may wait for rank 0's part in it.
        """
        try:
            if self._step is not None:
                self._ranks.ask(Sample(), 0)
            self._step = None
            self._ranks.collect(self.deadline.seconds(*self._size))
            self._late_at = math.inf
            self._adopted = {}
            self._tell(Reset(), *self._ranks.all)
        except (RankLost, RankFailed) as error:
            logger.warning("the ranks are started anew: %s", error)
            return False
        return True

    def _tell(self, message: Message, *ranks: int) -> list[Answer]:
        """Returns the answers of the ranks to a message other than a step."""
        self._ranks.ask(message, *ranks)
        answers = self._ranks.collect(CONTROL_S)
        for answer in answers:
            if isinstance(answer, Failed):
                raise RankFailed(answer.reason)
        return answers


def _outputs(answers: list[Answer]) -> list[StepOutput]:
    """Returns the outputs of all ranks in order. Raises `RankFailed` if one failed."""
    for rank, answer in enumerate(answers):
        if isinstance(answer, Failed):
            raise RankFailed(f"rank {rank}: {answer.reason}")
    return [answer.output for answer in answers if isinstance(answer, Output)]


def _on_ray(config: EngineConfig) -> EngineConfig:
    """Connects to the cluster, or starts Ray here. Returns `config` with its device and `num_threads` of each rank
    resolved from the cluster's resources.
    """
    if not ray.is_initialized():
        if ray_address() is None:
            num_threads = threads_each(config, 1, [num_cores()])
            own_ray.start(num_threads * config.num_ranks)
        else:
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
    config = with_device(config, cluster_gpus(), cluster_tpus())
    return msgspec.structs.replace(config, num_threads=threads_each(config, 1, node_cpus()))
