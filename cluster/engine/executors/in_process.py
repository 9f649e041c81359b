"""Executors of one worker in the engine's own process: one step at a time, or one behind another on a device that works
by itself.
"""

from __future__ import annotations

from typing import cast

from cluster.config import EngineConfig
from cluster.engine.executors.executor import Collect, StepCall, SynchronousExecutor
from structured.logits_processors import LogitsProcessorFactory
from structured.masks import MaskBatch
from workers.model_info import ModelInfo
from workers.ranks.rank_worker import Drawn, RankWorker, RunAheadWorker
from workers.step import StepInput, StepOutput


class InProcessExecutor(SynchronousExecutor):
    """One worker, called directly: a call costs nothing, and torch releases the GIL while the model runs."""

    def __init__(self, config: EngineConfig) -> None:
        # Imports torch, which the driver of actors needs not.
        from cluster.engine.executors.worker_factory import make_worker

        self._worker: RankWorker = make_worker(config)

    @property
    def model(self) -> ModelInfo:
        return self._worker.info

    @property
    def runs_ahead(self) -> bool:
        """Whether the device works by itself, so that a step can be launched behind another one."""
        return self._worker.runs_ahead

    def execute(self, step: StepInput) -> None:
        self._worker.execute(step)

    def is_computing(self) -> bool:
        return self._worker.is_computing()

    def sample(self, masks: MaskBatch | None = None) -> StepOutput:
        return self._worker.sample(masks)

    def draw(self, masks: MaskBatch | None = None) -> Drawn:
        """As `sample`, where the worker `runs_ahead`; but whoever calls it waits later."""
        return cast(RunAheadWorker, self._worker).draw(masks)

    def register_logits_processor(self, name: str, factory: LogitsProcessorFactory) -> None:
        self._worker.register_logits_processor(name, factory)

    def rebuild(self) -> None:
        self._worker.reset()


class DeviceExecutor:
    """Launches steps on a device that works by itself: calls return before the work is done, and the device puts the
    next step's input ids together.
    """

    depth = 1
    num_rank_rebuilds = 0
    num_rank_disagreements = 0

    def __init__(self, inner: InProcessExecutor) -> None:
        self.inner = inner

    @property
    def model(self) -> ModelInfo:
        return self.inner.model

    def submit(self, step: StepInput) -> StepCall:
        self.inner.execute(step)
        return _DeviceCall(self.inner)

    def register_logits_processor(self, name: str, factory: LogitsProcessorFactory) -> None:
        self.inner.register_logits_processor(name, factory)

    def has_lost_ranks(self) -> bool:
        return self.inner.has_lost_ranks()

    def rebuild(self) -> None:
        self.inner.rebuild()


class _DeviceCall:
    def __init__(self, inner: InProcessExecutor) -> None:
        self._inner = inner

    def draw(self, collect: Collect) -> None:
        self._drawn = self._inner.draw(collect(self._inner.is_computing))

    def result(self) -> StepOutput:
        return self._drawn.result()
