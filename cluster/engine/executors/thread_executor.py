"""An executor that overlaps steps by calling a synchronous executor from a thread.

Kernels release the GIL and ranks are separate processes, so the engine's own work runs beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from manta.cluster.engine.executors.executor import Collect, StepCall, SynchronousExecutor
from manta.structured.logits_processors import LogitsProcessorFactory
from manta.workers.model_info import ModelInfo
from manta.workers.prefix_store import BlockPart
from manta.workers.ranks.rank_worker import ReadAdapter
from manta.workers.step import StepInput, StepOutput


class ThreadExecutor:
    """Calls `inner`, which no one else may call, on one thread. Failures are raised by `StepCall.result`."""

    depth = 1

    def __init__(self, inner: SynchronousExecutor) -> None:
        self.inner = inner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="manta-executor")
        self._drawn: Future[StepOutput] | None = None
        """The output of the step drawn last; None after a rebuild."""

    @property
    def model(self) -> ModelInfo:
        return self.inner.model

    @property
    def num_rank_rebuilds(self) -> int:
        return self.inner.num_rank_rebuilds

    @property
    def num_rank_disagreements(self) -> int:
        return self.inner.num_rank_disagreements

    def submit(self, step: StepInput) -> StepCall:
        before = self._drawn

        def execute_after_draw() -> None:
            if before is not None:
                before.result()  # the step reads these tokens, so it fails if their draw failed
            self.inner.execute(step)

        return _ThreadCall(self, self._thread.submit(execute_after_draw))

    def draw(self, forward: Future[None], collect: Collect) -> Future[StepOutput]:
        """Makes the thread draw after the forward pass, under the masks that are ready at its end."""
        # The thread is idle between the end of `execute` and the draw, so `is_computing` is safe to call from here
        masks = collect(lambda: not forward.done() or self.inner.is_computing())

        def draw_after_forward() -> StepOutput:
            forward.result()
            return self.inner.sample(masks)

        self._drawn = self._thread.submit(draw_after_forward)
        return self._drawn

    def register_logits_processor(self, name: str, factory: LogitsProcessorFactory) -> None:
        self._thread.submit(self.inner.register_logits_processor, name, factory).result()

    def has_lost_ranks(self) -> bool:
        return self._thread.submit(self.inner.has_lost_ranks).result()

    def is_late(self) -> bool:
        return self.inner.is_late()

    def is_hung(self) -> bool:
        return self.inner.is_hung()

    def restore_blocks(self, parts: Sequence[BlockPart]) -> list[bool]:
        return self._thread.submit(self.inner.restore_blocks, parts).result()

    def keep_blocks(self, parts: Sequence[BlockPart]) -> list[bool]:
        return self._thread.submit(self.inner.keep_blocks, parts).result()

    def drop_kept(self, hashes: Sequence[bytes]) -> None:
        self._thread.submit(self.inner.drop_kept, hashes)

    def read_adapter(self, path: str) -> ReadAdapter:
        return self.inner.read_adapter(path)  # in the caller's thread, beside the steps

    def hold_adapter(self, adapter: ReadAdapter) -> bool:
        return self._thread.submit(self.inner.hold_adapter, adapter).result()

    def drop_adapter(self, digest: str) -> None:
        self._thread.submit(self.inner.drop_adapter, digest)

    def rebuild(self) -> None:
        """Rebuilds `inner` after all calls queued before, whether or not they failed."""
        self._drawn = None
        self._thread.submit(self.inner.rebuild).result()


class _ThreadCall:
    def __init__(self, executor: ThreadExecutor, forward: Future[None]) -> None:
        self._executor = executor
        self._forward = forward

    def draw(self, collect: Collect) -> None:
        self._drawn = self._executor.draw(self._forward, collect)

    def result(self) -> StepOutput:
        return self._drawn.result()
