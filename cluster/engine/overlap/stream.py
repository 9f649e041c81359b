"""Streams of steps: these run in the order in which they were asked for, and whoever asks does not wait.

Two kinds: `DeviceStream` for a device that works through what it was told by itself, `ThreadStream` for one whose calls
wait until the work is done. A stream stands around the executor that holds the worker, and serves one engine.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from cluster.engine.executor import Executor, InProcessExecutor
from structured.logits_processors import LogitsProcessorFactory
from structured.masks import MaskBatch
from workers.model_info import ModelInfo
from workers.step import StepInput, StepOutput


class Drawn(Protocol):
    """The tokens of a step, on their way."""

    def result(self) -> StepOutput:
        """Waits for them. Raises what the step, or drawing, raised."""
        ...


class Stream(Executor, Protocol):
    """An executor that also takes a step before the tokens of the one before it are known to whoever asks.

    One step after the other: `execute`, which raises what is known to have failed by then; the `result` of the step
    before it; `draw`.
    """

    def draw(self, masks: MaskBatch | None = None) -> Drawn:
        """Draws the tokens of the last step that was executed. Raises nothing."""
        ...


class DeviceStream:
    """Calls launch work and return. The next step's input ids are put together on the device."""

    num_rank_rebuilds = num_rank_disagreements = 0

    def __init__(self, inner: InProcessExecutor) -> None:
        self.inner = inner
        self._has_failed = False
        """Whether the last draw failed, as its result will say."""

    @property
    def model(self) -> ModelInfo:
        return self.inner.model

    def execute(self, step: StepInput) -> None:
        if not self._has_failed:  # else there are no tokens to compute
            self.inner.execute(step)

    def draw(self, masks: MaskBatch | None = None) -> Drawn:
        try:
            return self.inner.draw(masks)
        except Exception as error:
            self._has_failed = True
            failed: Future[StepOutput] = Future()
            failed.set_exception(error)
            return failed

    def sample(self, masks: MaskBatch | None = None) -> StepOutput:
        return self.inner.sample(masks)

    def is_computing(self) -> bool:
        return self.inner.is_computing()

    def register_logits_processor(self, name: str, factory: LogitsProcessorFactory) -> None:
        self.inner.register_logits_processor(name, factory)

    def has_lost_ranks(self) -> bool:
        return self.inner.has_lost_ranks()

    def rebuild(self) -> None:
        self._has_failed = False
        self.inner.rebuild()


class ThreadStream:
    """A thread makes the calls, which wait until the work is done, and nobody else does. The model's kernels release
    the interpreter's lock, and ranks are processes of their own, so the engine's own work goes on beside them.
    """

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="manta-stream")
        self._forward: Future[None] = Future()
        """Of the last step that was executed."""
        self._drawn: Future[StepOutput] | None = None
        """Of the last step that was drawn since the ranks were rebuilt."""

    @property
    def model(self) -> ModelInfo:
        return self.inner.model

    @property
    def num_rank_rebuilds(self) -> int:
        return self.inner.num_rank_rebuilds

    @property
    def num_rank_disagreements(self) -> int:
        return self.inner.num_rank_disagreements

    def execute(self, step: StepInput) -> None:
        drawn = self._drawn

        def execute_after_draw() -> None:
            if drawn is not None:
                drawn.result()  # the step reads these tokens: where there are none it fails too
            self.inner.execute(step)

        self._forward = self._thread.submit(execute_after_draw)

    def draw(self, masks: MaskBatch | None = None) -> Drawn:
        forward = self._forward

        def draw_after_forward() -> StepOutput:
            forward.result()
            return self.inner.sample(masks)

        self._drawn = self._thread.submit(draw_after_forward)
        return self._drawn

    def sample(self, masks: MaskBatch | None = None) -> StepOutput:
        return self.draw(masks).result()

    def is_computing(self) -> bool:
        return not self._forward.done() or self.inner.is_computing()  # its thread rests until the draw

    def register_logits_processor(self, name: str, factory: LogitsProcessorFactory) -> None:
        self._thread.submit(self.inner.register_logits_processor, name, factory).result()

    def has_lost_ranks(self) -> bool:
        return self._thread.submit(self.inner.has_lost_ranks).result()

    def rebuild(self) -> None:
        """Comes after all that was asked for before, whatever that comes to."""
        self._drawn = None
        self._thread.submit(self.inner.rebuild).result()
