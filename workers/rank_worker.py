"""What an executor needs of a rank's worker, whether it speculates or not. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from structured.logits_processors import LogitsProcessorFactory
from structured.masks import MaskBatch
from workers.model_info import ModelInfo
from workers.step import StepInput, StepOutput


class RankWorker(Protocol):
    """The worker of one rank: `workers/worker.py::Worker` or `specdecode/speculative_worker.py::SpeculativeWorker`.

    The executor runs one step at a time: `execute`, then `sample`. If one of them raises, the engine has failed; if a
    single row fails, its `RowError` is in the `StepOutput`.
    """

    @property
    def info(self) -> ModelInfo: ...

    def execute(self, step: StepInput) -> None:
        """Starts a step's forward pass."""
        ...

    def is_computing(self) -> bool:
        """Whether the device still works on what it was told."""
        ...

    def sample(self, masks: MaskBatch | None = None) -> StepOutput:
        """Draws the tokens of the step that `execute` was given."""
        ...

    def adopt(self, token_ids: Mapping[int, list[int]]) -> None:
        """Tells a rank that does not draw what rank 0 drew in the step before, by sequence; called before `execute`.
        Such a rank's `sample` gets no masks, computes its part of the logits and answers with no tokens.
        """
        ...

    def register_logits_processor(self, name: str, factory: LogitsProcessorFactory) -> None:
        """Raises `LogitsProcessorError` if the name is taken. cloudpickle carries the factory to an actor."""
        ...

    def reset(self) -> None:
        """Drops every sequence and all keys and values; the weights stay."""
        ...
