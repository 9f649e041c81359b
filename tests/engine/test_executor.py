"""The engine over another executor than its own: it knows the protocol, and no class."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import manta.cluster.engine.engine
from manta.cluster.config import EngineConfig
from manta.cluster.engine.executors.executor import SynchronousExecutor
from manta.cluster.engine.executors.in_process import InProcessExecutor
from manta.structured.logits_processors import LogitsProcessorFactory
from manta.structured.masks import MaskBatch
from manta.workers.model_info import ModelInfo
from manta.workers.step import StepInput, StepOutput
from tests.engine.test_constrained_drafts import answers, assert_same, mixed_params
from tests.engine.test_constrained_engine import make_llm

pytestmark = pytest.mark.usefixtures("plugin")


class PicklingExecutor(SynchronousExecutor):
    """As one whose rank is in another process: all that a step says and answers travels as bytes."""

    def __init__(self, config: EngineConfig) -> None:
        self._inner = InProcessExecutor(config)
        self.most_rows = 0
        """Largest number of rows in the masks of a step."""

    @property
    def model(self) -> ModelInfo:
        return self._inner.model

    def execute(self, step: StepInput) -> None:
        self._inner.execute(_sent(step))

    def is_computing(self) -> bool:
        return self._inner.is_computing()

    def sample(self, masks: MaskBatch | None = None) -> StepOutput:
        received = _sent(masks)
        if received is not None:
            self.most_rows = max(self.most_rows, len(received.rows))
        return _sent(self._inner.sample(received))

    def register_logits_processor(self, name: str, factory: LogitsProcessorFactory) -> None:
        self._inner.register_logits_processor(name, factory)

    def rebuild(self) -> None:
        self._inner.rebuild()


def _sent(message: Any) -> Any:
    return pickle.loads(pickle.dumps(message))


def test_a_serialised_step_draws_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts and constraints included. Of the masks' memory the rows of the step travel, each once."""
    params = mixed_params(max_tokens=40)[::3]
    expected = answers(make_llm(), params)
    monkeypatch.setattr(manta.cluster.engine.engine, "make_executor", PicklingExecutor)
    llm = make_llm(speculative={"proposers": ["forced", "ngram"], "adaptive": False})
    assert_same(answers(llm, params), expected)
    executor, pool = llm.engine.executor, llm.engine.masks.pool
    assert isinstance(executor, PicklingExecutor)
    assert pool is not None
    num_constrained = sum(one.constraint is not None for one in params)
    assert 1 < executor.most_rows <= num_constrained * 9, "a row for each sequence and each draft"
    assert executor.most_rows < len(pool.buffer.rows) // 2
