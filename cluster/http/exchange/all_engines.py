"""The engines of several models together, for what concerns no single one of them."""

from __future__ import annotations

import asyncio
from typing import NoReturn

from manta.cluster.engine.pooling_request import PoolingRequest, PoolingResult
from manta.cluster.engine.stats import EngineStats
from manta.cluster.errors import ServingError
from manta.cluster.http.exchange.engines import UNMETERED, Generation, GenerationRequest, Meter
from manta.cluster.http.exchange.state import AppState, Models
from manta.structured.constraint import ConstraintSpec
from manta.workers.model_info import ModelInfo


class AllEngines:
    """The engines of all models, for what concerns no single one: statistics, health and what is deleted. Implements
    `manta.cluster.http.exchange.engines.Engines`, and answers no generation.
    """

    def __init__(self, models: Models) -> None:
        self._models = models

    @property
    def num_held(self) -> int:
        return sum(state.engines.num_held for state in self._models)

    async def stats(self) -> list[EngineStats]:
        return [stats for _, of_model in await stats_by_model(self._models) for stats in of_model]

    async def check_reachable(self) -> None:
        for state in self._models:
            await state.engines.check_reachable()

    async def drop_kept(self, hashes: list[bytes]) -> None:
        await asyncio.gather(*(state.engines.drop_kept(hashes) for state in self._models))

    async def model(self) -> ModelInfo:
        _no_model()

    async def resolve(self, spec: ConstraintSpec, client: str = "") -> tuple[ConstraintSpec, list[str]]:
        _no_model()

    async def pool(self, request: PoolingRequest) -> PoolingResult:
        _no_model()

    async def submit(self, request: GenerationRequest, meter: Meter = UNMETERED) -> Generation:
        _no_model()


def _no_model() -> NoReturn:
    raise AssertionError("a request names its model before it asks an engine")


async def stats_by_model(models: Models) -> list[tuple[AppState, list[EngineStats]]]:
    """Returns each of several models with the statistics of its engines, as far as they answer."""
    states = list(models)
    answers = await asyncio.gather(*(state.engines.stats() for state in states), return_exceptions=True)
    found = []
    for state, answer in zip(states, answers, strict=True):
        if isinstance(answer, BaseException) and not isinstance(answer, ServingError):
            raise answer
        found.append((state, [] if isinstance(answer, BaseException) else answer))
    return found
