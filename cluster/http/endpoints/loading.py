"""`POST /models/load` and `POST /models/unload`, in the shapes of llama.cpp's router, for operators.

Source: https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md. Both answer at once, and `/v1/models`
tells how the model fares.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from manta.cluster.errors import refuse
from manta.cluster.http.exchange.exchange import Exchange
from manta.cluster.http.exchange.state import AppState


class ModelRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of both."""

    model: str
    needs_model: ClassVar[bool] = False
    """The handlers themselves load and unload."""

    def check(self) -> None:
        """Does nothing, because every name is looked up."""


class Begun(msgspec.Struct):
    success: bool = True


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
