"""What an executor needs of a rank, whether it speculates or not. Imports no torch."""

from __future__ import annotations

from typing import Protocol

from structured.logits_processors import LogitsProcessorFactory
from structured.masks import MaskBatch
from workers.model_info import ModelInfo
from workers.step import StepInput, StepOutput


class RankWorker(Protocol):
    """`workers/worker.py::Worker` and `specdecode/worker.py::SpeculativeWorker`. One step at a time: `execute`, then
    `sample`. Whatever they raise is a failure of the engine; that of a row is a value of `StepOutput`.
    """

    @property
    def info(self) -> ModelInfo: ...

    def execute(self, step: StepInput) -> None:
        """Starts a step's forward pass."""
        ...

    def sample(self, masks: MaskBatch | None = None) -> StepOutput:
        """Draws the tokens of the step that `execute` was given."""
        ...

    def register_logits_processor(self, name: str, factory: LogitsProcessorFactory) -> None:
        """Raises `LogitsProcessorError` where the name is taken. An actor gets the factory by cloudpickle."""
        ...

    def adopt(self, token_ids: dict[int, list[int]]) -> None:
        """Tells a rank that does not draw (`WorkerConfig.rank` above 0) which tokens rank 0's sequences gained in the
        step before, by sequence id. Comes before the next `execute`.
        """
        ...

    def reset(self) -> None:
        """Drops every sequence and all keys and values; the weights stay."""
        ...
