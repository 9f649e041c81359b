"""The executor of one worker in the engine's own process. On a device that computes asynchronously it runs ahead by a
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from manta.cluster.config import EngineConfig
from manta.cluster.engine.executors.deadline import StepWatch
from manta.cluster.engine.executors.executor import Collect, StepCall, SynchronousExecutor
from manta.structured.logits_processors import LogitsProcessorFactory
from manta.structured.masks import MaskBatch
from manta.workers.model_info import ModelInfo
from manta.workers.prefix_store import BlockPart
from manta.workers.ranks.rank_worker import (
    AdapterHolder,
    Drawn,
    PrefixKeeper,
    RankWorker,
    ReadAdapter,
    RunAheadWorker,
)
from manta.workers.step import StepInput, StepOutput


class InProcessExecutor(SynchronousExecutor):
    """Calls its worker directly; torch releases the GIL while the model runs.

    `depth` is 1 if the worker `runs_ahead` and the configuration does not switch overlap off. Calls then return before
    the device is done, and the device assembles the next step's input ids.
    """

    def __init__(self, config: EngineConfig) -> None:
        # Imports torch, which a driver of rank actors does not need.
        from manta.cluster.engine.executors.worker_factory import make_worker

        self.worker: RankWorker = make_worker(config)
        self.watch = StepWatch(self.worker.info.even_context)
        if self.worker.runs_ahead and config.overlap != "off":
            self.depth = 1

    @property
    def model(self) -> ModelInfo:
        return self.worker.info

    def submit(self, step: StepInput) -> StepCall:
        if not self.depth:
            return super().submit(step)
        self.execute(step)
        return _DeviceCall(self)

    def execute(self, step: StepInput) -> None:
        self.watch.begin(*step.size)
        self.worker.execute(step)

    def is_computing(self) -> bool:
        return self.worker.is_computing()

    def sample(self, masks: MaskBatch | None = None) -> StepOutput:
        output = self.worker.sample(masks)
        self.watch.end()
        return output

    def draw(self, masks: MaskBatch | None = None) -> Drawn:
        """Draws like `sample`, without waiting for the device. Requires a worker that `runs_ahead`."""
        return cast(RunAheadWorker, self.worker).draw(masks)

    def is_late(self) -> bool:
        return self.watch.is_late()

    def is_hung(self) -> bool:
        return self.watch.is_hung()

    def register_logits_processor(self, name: str, factory: LogitsProcessorFactory) -> None:
        self.worker.register_logits_processor(name, factory)

    def restore_blocks(self, parts: Sequence[BlockPart]) -> list[bool]:
        return self._keeper.restore(parts)

    def keep_blocks(self, parts: Sequence[BlockPart]) -> list[bool]:
        return self._keeper.keep(parts)

    def drop_kept(self, hashes: Sequence[bytes]) -> None:
        self._keeper.drop(hashes)

    def read_adapter(self, path: str) -> ReadAdapter:
        return self._adapters.read(path)

    def hold_adapter(self, adapter: ReadAdapter) -> bool:
        return self._adapters.hold(adapter)

    def drop_adapter(self, digest: str) -> None:
        self._adapters.drop(digest)

    @property
    def _keeper(self) -> PrefixKeeper:
        keeper = self.worker.keeper
        assert keeper is not None, "`ModelInfo.prefix_store` is set"
        return keeper

    @property
    def _adapters(self) -> AdapterHolder:
        adapters = self.worker.adapters
        assert adapters is not None, "the options name adapters or folders for them"
        return adapters

    def rebuild(self) -> None:
        self.watch.forget()
        self.worker.reset()


class _DeviceCall:
    def __init__(self, executor: InProcessExecutor) -> None:
        self._executor = executor

    def draw(self, collect: Collect) -> None:
        self._drawn = self._executor.draw(collect(self._executor.is_computing))

    def result(self) -> StepOutput:
        output = self._drawn.result()
        self._executor.watch.end()
        return output
