"""Runs steps on the workers. `InProcessExecutor` holds one worker in this process: one device, no Ray.

`ranks/executor.py` spreads ranks over actors of Ray. The engine is the only caller of both, and `make_executor` alone
asks which of the two it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from cluster.config import EngineConfig
from structured.logits_processors import LogitsProcessorFactory
from structured.masks import MaskBatch
from workers.model_info import ModelInfo
from workers.step import StepInput, StepOutput

if TYPE_CHECKING:
    from workers.pending_draw import PendingDraw  # imports torch


class Executor(Protocol):
    """One step at a time: `execute`, then `sample`. Whatever these raise is a failure of the engine; that of a row is a
    value of `StepOutput`.
    """

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

    def execute(self, step: StepInput) -> None:
        """Starts a step's forward pass."""
        ...

    def is_computing(self) -> bool:
        """Whether the forward pass of that step goes on, so that nobody is held up who waits for a mask. Raises
        nothing.
        """
        ...

    def sample(self, masks: MaskBatch | None = None) -> StepOutput:
        """Draws the tokens of the step that `execute` was given; the gap between the two is where masks hide."""
        ...

    def register_logits_processor(self, name: str, factory: LogitsProcessorFactory) -> None:
        """Makes a factory known to the rank that samples. Raises `LogitsProcessorError` where the name is taken."""
        ...

    def has_lost_ranks(self) -> bool:
        """Whether a rank has died, as far as can be told at once. Called between two steps. Raises nothing."""
        ...

    def rebuild(self) -> None:
        """Drops every sequence and all keys and values that the workers hold; the weights stay, but those of a rank
        that is lost: it is started anew. Raises `RuntimeError` where that cannot be done.
        """
        ...


def make_executor(config: EngineConfig) -> Executor:
    """Loads the model. Raises `ModelError` or `ValueError` where it cannot be served."""
    if config.tensor_parallel_size == 1:
        return InProcessExecutor(config)
    from cluster.engine.ranks.executor import RayExecutor  # imports Ray

    return RayExecutor(config)


class InProcessExecutor:
    """One worker, called directly: a call costs nothing, and torch releases the GIL while the model runs.

    `draw` is for the overlapped loop, and not for a worker that speculates.
    """

    num_rank_rebuilds = 0
    num_rank_disagreements = 0

    def __init__(self, config: EngineConfig) -> None:
        # Imports torch, which the driver of actors needs not.
        from cluster.engine.ranks.worker_factory import make_worker

        self._worker = make_worker(config)

    @property
    def model(self) -> ModelInfo:
        return self._worker.info

    def execute(self, step: StepInput) -> None:
        self._worker.execute(step)

    def is_computing(self) -> bool:
        return self._worker.is_computing()

    def sample(self, masks: MaskBatch | None = None) -> StepOutput:
        return self._worker.sample(masks)

    def draw(self, masks: MaskBatch | None = None) -> PendingDraw:
        """As `sample`, but whoever calls it waits later."""
        return self._worker.draw(masks)  # type: ignore[attr-defined]

    def register_logits_processor(self, name: str, factory: LogitsProcessorFactory) -> None:
        self._worker.register_logits_processor(name, factory)

    def has_lost_ranks(self) -> bool:
        return False

    def rebuild(self) -> None:
        self._worker.reset()
