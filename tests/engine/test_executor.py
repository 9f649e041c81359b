"""The engine over another executor than its own: it knows the protocol, and no class."""

from __future__ import annotations

import asyncio
import pickle
import threading
import types
from typing import Any

import pytest

import manta.cluster.engine.engine
from manta.cluster.config import EngineConfig
from manta.cluster.engine.executors import deadline
from manta.cluster.engine.executors.deadline import FACTOR, LONG_FACTOR, NUM_RECENT, StepDeadline, StepTimes, StepWatch
from manta.cluster.engine.executors.executor import SynchronousExecutor
from manta.cluster.engine.executors.in_process import InProcessExecutor
from manta.cluster.engine.request import EngineRequest, FinishStatus
from manta.cluster.serve.channel.token_channel import OutputReceiver
from manta.structured.logits_processors import LogitsProcessorFactory
from manta.structured.masks import MaskBatch
from manta.workers.model_info import ModelInfo
from manta.workers.sampling_params import SamplingParams
from manta.workers.step import StepInput, StepOutput
from tests.engine.test_constrained_drafts import answers, assert_same, mixed_params
from tests.engine.test_constrained_engine import make_llm
from tests.patience import PATIENCE_S, until
from tests.replicas import Replicas

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


def test_a_deadline_follows_the_steps() -> None:
    bound = StepDeadline(StepTimes(unknown_s=600.0, first_s=60.0, shortest_s=4.0))
    bound.restart()
    assert bound.seconds(1) == 600.0
    bound.learn(4, 0.01)
    assert bound.seconds(1) == bound.seconds(4) == 4.0
    bound.learn(4, 0.5)
    assert bound.seconds(3) == 0.5 * FACTOR
    assert bound.seconds(2048) == 0.5 * FACTOR * 2048 / 4
    bound.learn(2000, 1.0)
    assert bound.seconds(2048) == 1.0 * FACTOR
    for _ in range(NUM_RECENT):
        bound.learn(4, 0.3)
    assert bound.seconds(4) == 0.3 * FACTOR
    bound.restart()
    assert bound.seconds(4) == 60.0
    bound.learn(4, 0.3)
    assert bound.seconds(4) == 0.3 * FACTOR


def test_a_deadline_knows_that_a_long_context_takes_longer() -> None:
    """A prompt whose beginning is cached goes from short contexts to a long one at once. A chunk over 16,384 tokens is
    expected to take as long as one of as many tokens over 2,048, times (8192 + 16384) / (8192 + 2048).
    """
    bound = StepDeadline(StepTimes(unknown_s=600.0, first_s=60.0, shortest_s=4.0), even_context=8192)
    bound.learn(2048, 1.0, 1000)
    assert bound.seconds(2048, 2048) == 1.0 * FACTOR, "over short contexts attention takes a small part"
    assert bound.seconds(2048, 16_384) == pytest.approx(FACTOR + LONG_FACTOR * 1.4)
    hangs_after_s = bound.seconds(2048, 131_072)
    assert hangs_after_s == pytest.approx(FACTOR + LONG_FACTOR * 12.6), "which is expected to take 13.6 s"
    bound.learn(2048, 5.0, 100_000)
    assert bound.seconds(1024, 131_072) == bound.seconds(2048, 90_000) == pytest.approx(hangs_after_s)
    assert bound.seconds(2048, 1000) == 1.0 * FACTOR
    bound.learn(2048, 40.0, 100_000)
    assert bound.seconds(2048, 100_000) == 40.0 * LONG_FACTOR, "it takes longer than expected"
    slow = StepDeadline(bound.times, even_context=8192)
    slow.learn(2048, 20.0, 1000)
    assert slow.seconds(2048, 131_072) == 600.0
    slow.learn(2048, 40.0, 1000)
    assert slow.seconds(4096, 200_000) == slow.seconds(4096, 1000) == 40.0 * FACTOR * 2, "above the bound as it is"
    windowed = StepDeadline(bound.times)
    windowed.learn(2048, 1.0, 1000)
    assert windowed.seconds(2048, 131_072) == 1.0 * FACTOR, "no layer sees the whole context"


def test_a_step_that_hangs_is_late_and_then_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch judges by the older one of two steps under way. The test sets the clock that the watch reads."""
    now = [100.0]
    monkeypatch.setattr(deadline, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    watch = StepWatch()

    def state(seconds: float) -> tuple[bool, bool]:
        """Returns whether a step is late and whether it is hung, so many seconds later."""
        now[0] += seconds
        return watch.is_late(), watch.is_hung()

    assert state(1000.0) == (False, False), "nothing has begun"
    watch.begin(4)
    assert state(299.0) == (False, False), "an engine's first step may take long"
    assert state(2.0) == (True, False)
    assert state(300.0) == (True, True)
    watch.forget()
    assert state(0.0) == (False, False)
    for _ in range(2):
        watch.begin(4)
    now[0] += 0.01
    watch.end()
    assert state(1.0) == (False, False)
    watch.end()
    watch.begin(4)
    assert state(FACTOR * 1.01 / 2 + 0.1) == (True, False)
    assert state(50.0) == (True, True), "a start takes long too"


def test_an_engine_says_that_its_step_hangs(new_replica: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    """To ingresses, which move its requests, and to Serve, which replaces it."""
    replica = new_replica()
    executor = replica.engine.executor
    assert isinstance(executor, InProcessExecutor)
    executor.watch.deadline.times = StepTimes(unknown_s=0.0, first_s=0.0, shortest_s=0.0)
    goes_on, execute = threading.Event(), executor.worker.execute

    def hang(step: StepInput) -> None:
        goes_on.wait(PATIENCE_S)
        execute(step)

    monkeypatch.setattr(executor.worker, "execute", hang)
    told: list[bool] = []
    receiver = OutputReceiver("127.0.0.1", lambda _, connection: told.append(connection.is_away), lambda _: None)

    async def scenario() -> None:
        await replica.check_health()
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        request = EngineRequest(request_id="a", prompt_token_ids=[5, 9], params=params)
        running = asyncio.ensure_future(replica.generate(request, await receiver.start()))
        await until(lambda: bool(told) and told[-1])
        with pytest.raises(RuntimeError, match="a step of the engine hangs"):
            await replica.check_health()
        assert not (await replica.stats()).is_serving
        goes_on.set()
        assert (await running).finish is FinishStatus.FINISHED_LENGTH
        await until(lambda: not told[-1])
        await replica.check_health()

    asyncio.run(scenario())
