"""`POST /models/load` and `POST /models/unload`, for operators, and `GET /models/sse`, in the shapes of llama.cpp's
router.

Source: https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md. The former two answer at once. The
events, and `/v1/models`, tell how the model fares.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from manta.cluster.errors import refuse
from manta.cluster.http.access.request_admission import Caller
from manta.cluster.http.exchange.codec import sse_event
from manta.cluster.http.exchange.condition import Condition, Stage
from manta.cluster.http.exchange.exchange import Exchange
from manta.cluster.http.exchange.state import AppState
from manta.workers.load_meter import LoadProgress


class ModelRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of both."""

    model: str
    needs_model: ClassVar[bool] = False
    """The handlers themselves load and unload."""

    def check(self) -> None:
        """Does nothing, because every name is looked up."""


class Begun(msgspec.Struct):
    success: bool = True


KEEP_ALIVE_S = 15.0
"""Longest time in seconds without a line, so that whatever stands between knows that the connection is used."""
_KEEP_ALIVE = b":\n\n"


class ModelStatus(msgspec.Struct, frozen=True):
    """The state of a model, with the reason if it has failed, and how far it is if it loads."""

    status: Stage
    reason: str | UnsetType = UNSET
    progress: LoadProgress | UnsetType = UNSET


class ModelEvent(msgspec.Struct, kw_only=True):
    """One event of `/models/sse`: a model fares otherwise than it was last told, or is served no more."""

    model: str
    event: Literal["status_change", "model_remove"]
    data: ModelStatus | UnsetType = UNSET


async def load(state: AppState, exchange: Exchange, body: ModelRequest) -> Begun:
    """Begins to load a model on demand, within `request_timeout_s`. One that is loaded already stays as it is."""
    state.admission.check_model(body.model)
    if state.loader is not None:
        await state.loader.load(state.model_name, exchange.remaining_s)
    elif state.condition is not None:
        state.condition.check(state.model_name)
    return Begun()


async def unload(state: AppState, exchange: Exchange, body: ModelRequest) -> Begun:
    """Makes a model on demand leave once its requests have ended. Refuses one that is loaded at the start."""
    state.admission.check_model(body.model)
    if state.loader is None:
        cause = "it is loaded when the server starts, and stays"
        refuse("unsupported", "model", state.model_name, remedy="set on_demand in its entry of models", cause=cause)
    await state.loader.unload(state.model_name)
    return Begun()


async def follow(state: AppState, exchange: Exchange, _: None) -> None:
    """Sends how each model fares, and then each change, until the client leaves or this replica drains."""
    await exchange.reply.send_events(model_events(state, exchange.caller))


async def model_events(state: AppState, caller: Caller, keep_alive_s: float = KEEP_ALIVE_S) -> AsyncIterator[bytes]:
    """Yields events about the models that a client may use. A change that is undone before it was sent is left out."""
    told: dict[str, ModelStatus] = {}
    while not state.server.drains:
        news, found = state.models.news, _statuses(state, caller)
        for name in told.keys() - found.keys():
            yield sse_event(ModelEvent(model=name, event="model_remove"))
        for name, status in found.items():
            if told.get(name) != status:
                yield sse_event(ModelEvent(model=name, event="status_change", data=status))
        told = found
        try:
            async with asyncio.timeout(keep_alive_s):
                await news.wait()
        except TimeoutError:
            yield _KEEP_ALIVE


def _statuses(state: AppState, caller: Caller) -> dict[str, ModelStatus]:
    may = [each for each in state.models if caller.may_use(each.admission.names, each.model_name)]
    return {each.model_name: _status(each.condition) for each in may}


def _status(condition: Condition | None) -> ModelStatus:
    if condition is None:
        return ModelStatus("loaded")
    return ModelStatus(condition.stage, condition.reason or UNSET, condition.progress or UNSET)
