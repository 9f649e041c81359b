"""`GET /v1/models` and `GET /v1/models/{model}`: the served models and their adapters, by each of their names."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from manta.cluster.http.exchange.condition import Stage
from manta.cluster.http.exchange.exchange import Exchange
from manta.cluster.http.exchange.state import AppState
from manta.workers.load_meter import LoadProgress
from manta.workers.pooling_info import PoolingTask


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "manta"
    max_model_len: int | UnsetType = UNSET
    """Tokens of the longest sequence. Left out while none of several models' engines has told it."""
    task: Literal["generate"] | PoolingTask | UnsetType = UNSET
    """What the model answers with: text, vectors, or scores of labels. Left out likewise."""
    root: str
    """The name of the model that is computed; an adapter's is that of its model."""
    parent: str | None = None
    """The model that an adapter belongs to; null for the model itself."""
    state: Stage | UnsetType = UNSET
    """How one of several models fares. Left out by a server of one model."""
    reason: str | UnsetType = UNSET
    """Reason why one of several models is not loaded, or why its last change had no effect."""
    progress: LoadProgress | UnsetType = UNSET
    """How far one of several models has loaded, by the bytes of its tensors."""
    updating: bool | UnsetType = UNSET
    """True while engines of one of several models are being replaced by ones with other options."""


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


async def list_models(state: AppState, exchange: Exchange, _: None) -> ModelList:
    caller, named = exchange.caller, [(each, name) for each in state.models for name in each.model_names]
    may = [(each, name) for each, name in named if caller.may_use(each.admission.names, name)]
    return ModelList([await _card(each, name) for each, name in may])


async def one_model(state: AppState, exchange: Exchange, _: None) -> ModelCard:
    name = exchange.incoming.path_parameter
    served = state.models.find(name, exchange.caller)
    served.admission.check_model(name)
    return await _card(served, name)


async def _card(state: AppState, name: str) -> ModelCard:
    info, names = await state.model_info() if state.condition is None else state.known_model, state.admission.names
    parent = names.model if names.adapter_of(name) else None
    card = ModelCard(id=name, created=state.created, root=names.model, parent=parent)
    if info is not None:
        card.max_model_len = info.max_model_len
        card.task = "generate" if info.pooling is None else info.pooling.task
    if state.condition is not None:
        card.state, card.reason = state.condition.stage, state.condition.reason or UNSET
        card.progress = state.condition.progress or UNSET
        card.updating = state.condition.is_updating or UNSET
    return card
