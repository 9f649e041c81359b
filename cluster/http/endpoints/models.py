"""`GET /v1/models` and `GET /v1/models/{model}`: the served model by each of its names."""

from __future__ import annotations

from typing import Literal

import msgspec

from manta.cluster.http.exchange.exchange import Exchange
from manta.cluster.http.exchange.state import AppState
from manta.workers.pooling_info import PoolingTask


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "manta"
    max_model_len: int
    task: Literal["generate"] | PoolingTask
    """What the model answers with: text, vectors, or scores of labels."""


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


async def list_models(state: AppState, exchange: Exchange, _: None) -> ModelList:
    return ModelList([await _card(state, name) for name in (state.model_name, *state.config.model_aliases)])


async def one_model(state: AppState, exchange: Exchange, _: None) -> ModelCard:
    name = exchange.incoming.path_parameter
    state.admission.check_model(name)
    return await _card(state, name)


async def _card(state: AppState, name: str) -> ModelCard:
    info = await state.model_info()
    task: Literal["generate"] | PoolingTask = "generate" if info.pooling is None else info.pooling.task
    return ModelCard(id=name, created=state.created, max_model_len=info.max_model_len, task=task)
