"""Runs steps on the workers. `InProcessExecutor` holds one worker in this process: one device, no Ray.

An executor that spreads ranks over a Ray placement group is another class here and another line of `make_executor`. The
engine is the only caller.
"""

from __future__ import annotations

from typing import Protocol

from cluster.config import EngineConfig
from specdecode.config import SpeculativeConfig
from specdecode.worker import SpeculativeWorker
from structured.logits_processors import LogitsProcessorFactory
from structured.masks import MaskBatch
from workers.model_info import ModelInfo
from workers.rank_worker import RankWorker
from workers.step import StepInput, StepOutput
from workers.worker import Worker, WorkerConfig


class Executor(Protocol):
    """One step at a time: `execute`, then `sample`. Whatever these raise is a failure of the engine; that of a row is a
    value of `StepOutput`.
    """

    @property
    def model(self) -> ModelInfo: ...

    def execute(self, step: StepInput) -> None:
        """Starts a step's forward pass."""
        ...

    def sample(self, masks: MaskBatch | None = None) -> StepOutput:
        """Draws the tokens of the step that `execute` was given; the gap between the two is where masks hide."""
        ...

    def register_logits_processor(self, name: str, factory: LogitsProcessorFactory) -> None:
        """Makes a factory known to the rank that samples. Raises `LogitsProcessorError` where the name is taken."""
        ...

    def rebuild(self) -> None:
        """Drops every sequence and all keys and values that the workers hold; the weights stay."""
        ...


def make_executor(config: EngineConfig) -> Executor:
    """Loads the model. Raises `ModelError` or `ValueError` where it cannot be served."""
    return InProcessExecutor(config)


class InProcessExecutor:
    """One worker, called directly: a call costs nothing, and torch releases the GIL while the model runs."""

    def __init__(self, config: EngineConfig) -> None:
        worker_config = WorkerConfig(
            model=config.model,
            dtype=config.dtype,
            device=config.device,
            num_threads=config.num_threads,
            max_model_len=config.max_model_len,
            block_size=config.block_size,
            kv_cache_bytes=config.kv_cache_bytes,
            kv_cache_fraction=config.kv_cache_fraction,
            max_num_sequences=config.max_num_sequences,
            logits_processors=config.logits_processors,
        )
        self._worker = _make_worker(worker_config, config.speculative, config.tokenizer)

    @property
    def model(self) -> ModelInfo:
        return self._worker.info

    def execute(self, step: StepInput) -> None:
        self._worker.execute(step)

    def sample(self, masks: MaskBatch | None = None) -> StepOutput:
        return self._worker.sample(masks)

    def register_logits_processor(self, name: str, factory: LogitsProcessorFactory) -> None:
        self._worker.register_logits_processor(name, factory)

    def rebuild(self) -> None:
        self._worker.reset()


def _make_worker(config: WorkerConfig, speculative: SpeculativeConfig | None, tokenizer: str | None) -> RankWorker:
    """Every worker verifies drafts; one that proposes some or measures what they cost is made where that is wanted."""
    if speculative is None or not (speculative.rank_proposers or speculative.adaptive):
        return Worker(config)
    return SpeculativeWorker(config, speculative, tokenizer)
