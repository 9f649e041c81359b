"""A step of a model that pools that takes far too long: texts leave for another engine, and Serve replaces this one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from manta.cluster.config import EngineConfig
from manta.cluster.engine import pooling_engine
from manta.cluster.engine.executors.deadline import StepTimes
from manta.cluster.engine.pooling_engine import ModelBroken
from manta.cluster.engine.pooling_request import PooledInput, PoolingRequest, PoolingResult
from manta.cluster.serve.engine import pooling_replica
from manta.cluster.serve.engine.pooling_replica import PoolingReplica
from manta.cluster.serve.requests.pooling_calls import pool
from manta.cluster.serve.routing.replicas import Replicas
from manta.workers.phases import Phases
from tests.async_tests import async_test
from tests.engine.test_pooling_engine import Asked, Counting
from tests.patience import PATIENCE_S, until

AT_ONCE = StepTimes(unknown_s=0.0, first_s=0.0, shortest_s=0.0)
"""Bounds under which a step is late after twenty times what those before it took."""


def text(token: int) -> PoolingRequest:
    request_id = f"text {token}"
    return PoolingRequest(request_id=request_id, texts=[PooledInput([token] * 4, 4)], deadline_s=PATIENCE_S)


class Hanging:
    """A replica whose model waits in the next layer until `goes_on` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = Counting()
        monkeypatch.setattr(pooling_engine, "PoolingWorker", lambda config: self.model)
        self.replica = PoolingReplica(EngineConfig(), Phases())
        self.goes_on = threading.Event()

    def hang(self) -> None:
        """Makes the next step hang. It is late at once."""
        self.replica.engine.watch.deadline.times = AT_ONCE
        self.model.on_layer = [lambda: self.goes_on.wait(PATIENCE_S)]

    def close(self) -> None:
        self.goes_on.set()
        self.replica.close()


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Hanging]]:
    made: list[Hanging] = []

    def make() -> Hanging:
        made.append(Hanging(monkeypatch))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("others_serve", [False, True])
@async_test
async def test_texts_leave_a_late_step_if_another_engine_is_there(
    others_serve: bool, hanging: Callable[[], Hanging], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooling_replica, "has_siblings", lambda: others_serve)
    late = hanging()
    await late.replica.check_health()
    late.hang()
    asked = asyncio.ensure_future(late.replica.pool(text(5)))
    await until(lambda: late.replica.engine.is_hung)
    with pytest.raises(RuntimeError, match="a step of the engine hangs"):
        await late.replica.check_health()
    assert not (await late.replica.stats()).is_serving
    if others_serve:
        with pytest.raises(ConnectionError):
            await asked
        asked = asyncio.ensure_future(late.replica.pool(text(6)))  # its caller knows of none that is better
        await asyncio.sleep(3 * pooling_replica.BEAT_S)
    assert not asked.done()
    late.goes_on.set()
    assert (await asked).rows().tolist() == [[6.0 if others_serve else 5.0, 4.0]]
    await until(lambda: not late.replica.engine.is_away)
    await late.replica.check_health()


@async_test
async def test_a_request_in_a_late_step_is_answered_by_the_other_engine(
    hanging: Callable[[], Hanging], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooling_replica, "has_siblings", lambda: True)
    known, engines = Replicas(), {"first": hanging(), "second": hanging()}
    known.set_running("engine", engines)
    asked: list[str] = []

    class Caller:
        async def until_awake(self, deadline_s: float, client: str) -> float:
            return deadline_s

        async def pool_once(self, request: PoolingRequest) -> PoolingResult:
            asked.append(known.place_texts(request, "engine"))
            if len(asked) == 1:
                engines[asked[0]].hang()
            return await engines[asked[-1]].replica.pool(request)

    assert (await pool(Caller(), known, text(7))).rows().tolist() == [[7.0, 4.0]]
    assert sorted(asked) == ["first", "second"]


def test_a_step_that_fails_is_not_under_way_any_more() -> None:
    asked = Asked()
    asked.engine.watch.deadline.times = AT_ONCE
    asked.add("a", 1)
    asked.run()
    assert not asked.engine.is_away
    asked.add("b", 2)
    asked.model.fails = True
    with pytest.raises(ModelBroken):
        asked.run()
    assert not asked.engine.is_away
