"""A request to a model that pools, when the engine that has it is lost."""

from __future__ import annotations

import ast
import asyncio

import pytest

from manta.cluster.engine.pooling_request import PooledInput, PoolingRequest, PoolingResult
from manta.cluster.errors import Unavailable
from manta.cluster.serve.engine.engine_replica import EngineReplica
from manta.cluster.serve.engine.pooling_replica import PoolingReplica
from manta.cluster.serve.requests import engine_client
from manta.cluster.serve.requests.pooling_calls import MAX_ATTEMPTS, pool
from manta.cluster.serve.requests.takeover import TakeoverTimes
from manta.cluster.serve.routing.replicas import Replicas
from tests.house.syntax_trees import modules

REQUEST = PoolingRequest(request_id="a", texts=[PooledInput([1, 2], 2)], deadline_s=60.0)


class Losing:
    """Loses the first `num_lost` calls, each on another of its engines."""

    def __init__(self, known: Replicas, num_lost: int) -> None:
        self.asked: list[str] = []
        self._known = known
        self._num_lost = num_lost

    async def until_awake(self, deadline_s: float, client: str) -> float:
        return deadline_s

    async def pool_once(self, request: PoolingRequest) -> PoolingResult:
        self.asked.append(self._known.place_texts(request, "engine"))
        if len(self.asked) <= self._num_lost:
            raise ConnectionError
        return PoolingResult(dimension=1)


def asked(num_lost: int, num_engines: int = 6) -> tuple[Losing, Replicas]:
    known = Replicas()
    known.set_running("engine", [f"engine {number}" for number in range(num_engines)])
    return Losing(known, num_lost), known


def test_a_lost_request_goes_to_another_engine_at_once() -> None:
    caller, known = asked(num_lost=2)
    assert asyncio.run(pool(caller, known, REQUEST, TakeoverTimes(retry_s=3600.0))).dimension == 1
    assert len(set(caller.asked)) == 3
    assert not known.routed


def test_a_request_that_ends_engine_after_engine_is_given_up() -> None:
    caller, known = asked(num_lost=100)
    with pytest.raises(Unavailable):
        asyncio.run(pool(caller, known, REQUEST))
    assert len(caller.asked) == MAX_ATTEMPTS


def test_what_every_engine_is_asked_each_kind_answers() -> None:
    """Whether a model generates or pools is known to its engines alone."""
    methods = {
        argument.value
        for node in ast.walk(modules("manta.cluster.serve.requests")[engine_client.__name__])
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) in ("broadcast", "_ask_all")
        for argument in node.args[:1]
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    }
    assert {"connect", "stats", "drop_kept"} <= methods
    of_adapters = {"read_adapter", "uses_adapter"}  # which a model that pools has none of
    for method in methods - of_adapters:
        for kind in (EngineReplica, PoolingReplica):
            assert callable(getattr(kind, method, None)), f"{kind.__name__} does not answer {method}"


def test_requests_are_spread_over_the_engines() -> None:
    known = asked(0, num_engines=3)[1]
    requests = [PoolingRequest(request_id=f"{number}", texts=REQUEST.texts) for number in range(9)]
    placed = [known.place_texts(request, "engine") for request in requests]
    assert sorted(map(placed.count, set(placed))) == [3, 3, 3]
