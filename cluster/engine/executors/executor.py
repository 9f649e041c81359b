"""The executor contract: the engine submits steps to an executor, which calls the workers of all ranks.

The engine sees only `Executor`. Its `depth` is the number of steps that may be under way while the next one is planned.
The depth is 0 where a call waits until the work is done, and 1 where the device works asynchronously or a thread waits
for it. Imports neither torch nor ray.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from manta.structured.logits_processors import LogitsProcessorFactory
from manta.structured.masks import MaskBatch
from manta.workers.model_info import ModelInfo
from manta.workers.prefix_store import BlockPart
from manta.workers.ranks.rank_worker import ReadAdapter
from manta.workers.step import StepInput, StepOutput

Collect = Callable[[Callable[[], bool]], MaskBatch | None]
"""Returns the masks of a step when its forward pass is over. Its argument returns whether the forward pass still runs.
"""


def no_masks(is_computing: Callable[[], bool]) -> None:
    """Serves as the `Collect` of a step without constraints: returns None."""


class StepCall(Protocol):
    """A submitted step; call `draw`, then `result`. An exception of either is a failure of the engine. A failed row is
    a value of `StepOutput`.
    """

    def draw(self, collect: Collect) -> None:
        """Makes the ranks draw the step's tokens, under the masks that `collect` returns when the forward pass is over.
        Grammar workers fill the masks between `submit` and the end of the forward pass.
        """
        ...

    def result(self) -> StepOutput:
        """Waits for the output of the step."""
        ...


class Executor(Protocol):
    """Runs steps on all ranks, in the order in which they are submitted.

    `submit` and the methods of its result may raise. After that the caller calls `rebuild` before it submits another
    step.
    """

    depth: int
    """Number of steps that may be under way while another one is submitted."""

    @property
    def num_rank_rebuilds(self) -> int:
        """Number of restarts of all ranks, because one had died or hung."""
        ...

    @property
    def num_rank_disagreements(self) -> int:
        """Number of answers of a rank whose digest differs from rank 0's."""
        ...

    @property
    def model(self) -> ModelInfo: ...

    def submit(self, step: StepInput) -> StepCall:
        """Submits a step. With a `depth` above 0, its forward pass starts behind the steps under way."""
        ...

    def register_logits_processor(self, name: str, factory: LogitsProcessorFactory) -> None:
        """Registers a factory with the rank that draws. Raises `LogitsProcessorError` if the name is taken."""
        ...

    def has_lost_ranks(self) -> bool:
        """Returns at once whether a rank is known to have died. Called between two steps; raises nothing."""
        ...

    def is_late(self) -> bool:
        """Returns at once whether a step takes so long that it may hang. Any thread may call it."""
        ...

    def is_hung(self) -> bool:
        """Returns at once whether a step hangs and only the end of this process ends it. Any thread may call it."""
        ...

    def restore_blocks(self, parts: Sequence[BlockPart]) -> list[bool]:
        """Fills blocks and slots from the ranks' prefix stores, behind the steps under way. Returns for each part
        whether every rank had it; none if a rank is lost. Called only if `ModelInfo.prefix_store` is set.
        """
        ...

    def keep_blocks(self, parts: Sequence[BlockPart]) -> list[bool]:
        """Has the ranks keep blocks and slots as they are after the steps under way; see `restore_blocks`. Returns for
        each part whether every rank took it; the others may be tried again.
        """
        ...

    def drop_kept(self, hashes: Sequence[bytes]) -> None:
        """Removes the blocks with these hashes from the ranks' prefix stores; see `restore_blocks`."""
        ...

    def read_adapter(self, path: str) -> ReadAdapter:
        """Makes all ranks read the adapter in a folder, for `hold_adapter`. Any thread may call it, also while steps
        run. Raises `ModelError` if the adapter is damaged or does not fit the model, and `ConnectionError` if a rank is
        lost. Called only if the options have `adapter_roots`, as the next two.
        """
        ...

    def hold_adapter(self, adapter: ReadAdapter) -> bool:
        """Lets the sequences of later steps have an adapter. Returns False if there is no room for it. Raises
        `ConnectionError` if the ranks that have read it are lost: read it again.
        """
        ...

    def drop_adapter(self, digest: str) -> None:
        """Forgets an adapter after the steps under way. No later step may use it."""
        ...

    def rebuild(self) -> None:
        """Drops every sequence and all keys and values that the workers hold.

        The weights stay, unless a rank is lost; then the ranks are started anew. Raises `RuntimeError` on failure.
        """
        ...


# ---- one step at a time ----------------------------------------------------------------------------------------------


class SynchronousExecutor:
    """An executor whose calls wait until the work is done: `execute`, then `sample`, for one step after the other."""

    depth = 0
    num_rank_rebuilds = 0
    num_rank_disagreements = 0

    @property
    def model(self) -> ModelInfo:
        raise NotImplementedError

    def execute(self, step: StepInput) -> None:
        """Runs or starts the forward pass of a step."""
        raise NotImplementedError

    def is_computing(self) -> bool:
        """Returns whether the forward pass of the last step still runs, so that waiting for masks costs nothing. Raises
        nothing.
        """
        return False

    def sample(self, masks: MaskBatch | None = None) -> StepOutput:
        """Draws the tokens of the last executed step."""
        raise NotImplementedError

    def submit(self, step: StepInput) -> StepCall:
        """Returns a call that runs the whole step in its `draw`."""
        return _SynchronousCall(self, step)

    def register_logits_processor(self, name: str, factory: LogitsProcessorFactory) -> None:
        raise NotImplementedError

    def has_lost_ranks(self) -> bool:
        return False

    def is_late(self) -> bool:
        return False

    def is_hung(self) -> bool:
        return False

    def restore_blocks(self, parts: Sequence[BlockPart]) -> list[bool]:
        raise NotImplementedError

    def keep_blocks(self, parts: Sequence[BlockPart]) -> list[bool]:
        raise NotImplementedError

    def drop_kept(self, hashes: Sequence[bytes]) -> None:
        raise NotImplementedError

    def read_adapter(self, path: str) -> ReadAdapter:
        raise NotImplementedError

    def hold_adapter(self, adapter: ReadAdapter) -> bool:
        raise NotImplementedError

    def drop_adapter(self, digest: str) -> None:
        raise NotImplementedError

    def rebuild(self) -> None:
        raise NotImplementedError


class _SynchronousCall:
    def __init__(self, executor: SynchronousExecutor, step: StepInput) -> None:
        self._executor = executor
        self._step = step

    def draw(self, collect: Collect) -> None:
        self._executor.execute(self._step)
        self._output = self._executor.sample(collect(self._executor.is_computing))

    def result(self) -> StepOutput:
        return self._output
