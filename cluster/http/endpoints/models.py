"""`GET /v1/models` and `GET /v1/models/{model}`: the served model and its adapters, by each of their names."""

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
    root: str
    """The name of the model that is computed; an adapter's is that of its model."""
    parent: str | None = None
    """The model that an adapter belongs to; null for the model itself."""


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


async def list_models(state: AppState, exchange: Exchange, _: None) -> ModelList:
    return ModelList([await _card(state, name) for name in state.admission.names.listed])


async def one_model(state: AppState, exchange: Exchange, _: None) -> ModelCard:
    name = exchange.incoming.path_parameter
    state.admission.check_model(name)
    return await _card(state, name)


async def _card(state: AppState, name: str) -> ModelCard:
    info, names = await state.model_info(), state.admission.names
    task: Literal["generate"] | PoolingTask = "generate" if info.pooling is None else info.pooling.task
    return ModelCard(
        id=name,
        created=state.created,
        max_model_len=info.max_model_len,
        task=task,
        root=names.model,
        parent=names.model if names.adapter_of(name) else None,
    )
