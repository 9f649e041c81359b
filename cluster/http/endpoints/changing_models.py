"""`POST /v1/models`, and `PATCH` and `DELETE /v1/models/{model}`: operators change the models of an address while it
runs. Other models' requests go on.

The bodies have the fields of an entry of `models` in a configuration. The answer to `DELETE` is OpenAI's.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from manta.cluster.errors import refuse
from manta.cluster.http.exchange.exchange import Exchange
from manta.cluster.http.exchange.on_demand import OnDemand
from manta.cluster.http.exchange.state import AppState
from manta.cluster.operated_models import checked_fields, new_entry


class ModelFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An entry of `models`, or what is changed of one."""

    must_know_fields: ClassVar[bool] = True
    fields_elsewhere: ClassVar[dict[str, str]] = {"model": "it belongs into engine here: engine.model"}

    name: str | UnsetType = UNSET
    """Name of the model. It is left out in a change, because the path has it."""
    aliases: list[str] | UnsetType = UNSET
    on_demand: bool | UnsetType = UNSET
    engine: dict[str, Any] | UnsetType = UNSET
    """Options of the model replica. `model` is a path below one of `model_roots`; a relative one begins there."""
    num_engine_replicas: int | UnsetType = UNSET
    autoscaling: dict[str, Any] | UnsetType | None = UNSET

    def check(self) -> None:
        """Does nothing, because what the fields say together depends on the entry that they change."""

    @property
    def given(self) -> dict[str, Any]:
        """The fields that the body has."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: value for name, value in fields.items() if value is not UNSET}


class ModelChanged(msgspec.Struct, kw_only=True):
    """A model that was added or changed. `/v1/models` tells how it fares."""

    id: str
    object: Literal["model"] = "model"


class ModelDeleted(msgspec.Struct, kw_only=True):
    """A model that is served no more, as OpenAI's API says it."""

    id: str
    object: Literal["model"] = "model"
    deleted: bool = True


async def add(state: AppState, exchange: Exchange, body: ModelFields) -> ModelChanged:
    """Serves another model. It begins to load, unless it is on demand."""
    models = changed_models(state)
    entry = new_entry(checked_fields(body.given, state.config.model_roots), state.config.engine)
    _check_free(state, entry.model_name, entry.names)
    await models.add(entry)
    return ModelChanged(id=entry.model_name)


async def update(state: AppState, exchange: Exchange, body: ModelFields) -> ModelChanged:
    """Changes a model. If its engines are loaded, new ones take their streams over."""
    name = exchange.incoming.path_parameter
    models, fields = changed_models(state), checked_fields(body.given, state.config.model_roots)
    _check_free(state, name, body.given.get("aliases") or ())
    await models.update(name, fields)
    return ModelChanged(id=name)


async def remove(state: AppState, exchange: Exchange, _: None) -> ModelDeleted:
    """Serves a model no more. Its running requests end first."""
    name = exchange.incoming.path_parameter
    await changed_models(state).remove(name)
    return ModelDeleted(id=name)


def _check_free(state: AppState, model: str, names: Collection[str]) -> None:
    """Refuses names of a model that others have, also those of adapters that were loaded: the loader knows the list
    alone, and the model would answer the requests for the adapter.
    """
    for name in names:
        owner = state.models.owner_of(name)
        if owner is not None and (owner.model_name != model or owner.admission.names.adapter_of(name)):
            field = "name" if name == model else "aliases"
            refuse("name_taken", field, name, f"a name of the model {owner.model_name}", "give another name")


def changed_models(state: AppState) -> OnDemand:
    """Returns what changes the models of the address. Refuses if it has only one."""
    if state.models.on_demand is None:
        cause, remedy = "this server has one model", "start it with several, or with --models-dir"
        refuse("unsupported", "model", state.model_name or None, remedy=remedy, cause=cause)
    return state.models.on_demand
