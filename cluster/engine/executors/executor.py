"""Where the model runs: the engine submits steps to an executor, which calls the workers of all ranks.

`Executor` is what the engine sees. Its `depth` says how many steps may be under way while the next one is planned: 0
where a call waits until the work is done, 1 where the device works by itself or a thread waits for it. Imports neither
torch nor ray.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from structured.logits_processors import LogitsProcessorFactory
from structured.masks import MaskBatch
from workers.model_info import ModelInfo
from workers.step import StepInput, StepOutput

Collect = Callable[[Callable[[], bool]], MaskBatch | None]
"""Returns the masks of a step, once its forward pass is over, as the function that it is given says."""


def no_masks(is_computing: Callable[[], bool]) -> None:
    """A `Collect` for a step without constraints."""


class StepCall(Protocol):
    """One step under way: `draw`, then `result`. What either raises is a failure of the engine; that of a row is a
    value of `StepOutput`.
    """

    def draw(self, collect: Collect) -> None:
        """Has the ranks draw the step's tokens, under the masks that `collect` returns when the forward pass is over;
        the gap between the two is where masks hide.
        """
        ...

    def result(self) -> StepOutput:
        """Waits for the tokens."""
        ...


class Executor(Protocol):
    """Runs steps on all ranks, in the order in which they are submitted. `submit`, and then everything of its result,
    may raise; after that nothing is submitted before `rebuild`.
    """

    depth: int
    """Steps that may be under way while another one is submitted."""

    @property
    def num_rank_rebuilds(self) -> int:
        """Times that all ranks were started anew, for one had died or hung."""
        ...

    @property
    def num_rank_disagreements(self) -> int:
        """Answers of a rank whose hidden states were not rank 0's."""
        ...

    @property
    def model(self) -> ModelInfo: ...

    def submit(self, step: StepInput) -> StepCall:
        """Starts a step's forward pass behind the steps under way, where `depth` is above 0."""
        ...

    def register_logits_processor(self, name: str, factory: LogitsProcessorFactory) -> None:
        """Makes a factory known to the rank that samples. Raises `LogitsProcessorError` where the name is taken."""
        ...

    def has_lost_ranks(self) -> bool:
        """Returns whether a rank has died, as far as can be told at once. Called between two steps. Raises nothing."""
        ...

    def rebuild(self) -> None:
        """Drops every sequence and all keys and values that the workers hold; the weights stay, but those of a rank
        that is lost: it is started anew. Raises `RuntimeError` where that cannot be done.
        """
        ...


# ---- one step at a time ----------------------------------------------------------------------------------------------


class SynchronousExecutor:
    """An executor whose calls wait until the work is done: `execute` and `sample` of each step, one after the other."""

    depth = 0
    num_rank_rebuilds = 0
    num_rank_disagreements = 0

    @property
    def model(self) -> ModelInfo:
        raise NotImplementedError

    def execute(self, step: StepInput) -> None:
        """Runs a step's forward pass, or starts it."""
        raise NotImplementedError

    def is_computing(self) -> bool:
        """Returns whether the forward pass of that step goes on, so that nobody is held up who waits for a mask. Raises
        nothing.
        """
        return False

    def sample(self, masks: MaskBatch | None = None) -> StepOutput:
        """Draws the tokens of the step that `execute` was given."""
        raise NotImplementedError

    def submit(self, step: StepInput) -> StepCall:
        """The step runs when its masks are asked for, as its `draw` begins."""
        return _SynchronousCall(self, step)

    def register_logits_processor(self, name: str, factory: LogitsProcessorFactory) -> None:
        raise NotImplementedError

    def has_lost_ranks(self) -> bool:
        return False

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
