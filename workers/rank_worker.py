"""What an executor needs of a rank's worker, whether it speculates or not. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from structured.logits_processors import LogitsProcessorFactory
from structured.masks import MaskBatch
from workers.model_info import ModelInfo
from workers.step import StepInput, StepOutput


class RankWorker(Protocol):
    """The worker of one rank: `workers/worker.py::Worker` or `specdecode/worker.py::SpeculativeWorker`.

    The executor runs one step at a time: `execute`, then `sample`. An exception of theirs is a failure of the engine;
    if a single row fails, that is a `RowError` in the `StepOutput`.
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
        """Of several ranks, those that do not draw are told before `execute` what rank 0 drew in the step before, by
        sequence. They `sample` without masks, for their part of the logits, and answer with no tokens.
        """
        ...

    def register_logits_processor(self, name: str, factory: LogitsProcessorFactory) -> None:
        """Raises `LogitsProcessorError` if the name is taken. cloudpickle carries the factory to an actor."""
        ...

    def reset(self) -> None:
        """Drops every sequence and all keys and values; the weights stay."""
        ...
