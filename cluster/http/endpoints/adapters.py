"""`POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`: adapters that come and go while the server runs.
`GET /lora-adapters` and `POST /lora-adapters`: their scales.

The bodies of the first two are those of vLLM and SGLang, and the answer is SGLang's. The others are llama.cpp's. Only
operators may call them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import msgspec

from manta.cluster.errors import ServingError, error_of, refuse
from manta.cluster.http.exchange.chosen_adapter import names_of, scaled_adapters
from manta.cluster.http.exchange.codec import decode_query
from manta.cluster.http.exchange.exchange import Exchange
from manta.cluster.http.exchange.loaded_adapters import LoadedAdapters
from manta.cluster.http.exchange.state import AppState
from manta.cluster.named_paths import check_new_name
from manta.cluster.protocol.adapter_scales import AdapterScale
from manta.cluster.protocol.error_bodies import under_field
from manta.structured.refusals import Refusal


class LoadAdapterRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/load_lora_adapter`."""

    lora_name: str
    """The name that requests give as their `model`."""
    lora_path: str
    """The adapter's folder, as PEFT saved it, below one of `engine.adapter_roots`. A relative path begins there."""
    load_inplace: bool = False
    """Whether it may take the place of the adapter of this name."""
    base_model_name: str | None = None
    """The model that the adapter belongs to, if the server has several."""

    def check(self) -> None:
        _check_name(self.lora_name)
        if not self.lora_path:
            refuse("empty", "lora_path", remedy="give the adapter's folder")
        if "\0" in self.lora_path:
            refuse("wrong_value", "lora_path", self.lora_path, "a path, without null characters")


class UnloadAdapterRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: str
    wait: bool = False
    """Whether the answer comes when the adapter's requests have ended."""

    def check(self) -> None:
        _check_name(self.lora_name)


class AdaptersAnswer(msgspec.Struct, kw_only=True):
    """The adapters that are loaded after a change."""

    success: bool = True
    error_message: str = ""
    loaded_adapters: dict[str, str]
    """Folders by name, without those of the configuration."""


class ScaledAdapter(msgspec.Struct, kw_only=True):
    """An adapter in the list of `/lora-adapters`."""

    id: int
    """Its place in the list, by which requests name it."""
    name: str
    path: str
    scale: float
    """Its scale in requests that name the model itself; 0 if they do without it."""


class ScalesQuery(msgspec.Struct, kw_only=True):
    """The query of `/lora-adapters`."""

    model: str | None = None
    """The model that the adapters belong to, if the server has several."""


class ScalesSet(msgspec.Struct):
    success: bool = True


async def load(state: AppState, exchange: Exchange, request: LoadAdapterRequest) -> AdaptersAnswer:
    exchange.adapter = request.lora_name
    base_model = _base_model(state, exchange, request.base_model_name, "base_model_name")
    async with base_model.in_use(exchange) as of_model:
        loaded = of_model.loaded_adapters
        if loaded is None:
            cause, remedy = "this server loads no adapters over HTTP", "set engine.adapter_roots"
            refuse("not_allowed", "lora_path", request.lora_path, remedy=remedy, cause=cause)
        await _refresh(state)
        _check_free(state, of_model, request)
        is_new = request.lora_name not in loaded.paths
        await loaded.load(request.lora_name, request.lora_path, request.load_inplace)
        if is_new:
            await _check_alone(state, of_model, loaded, request.lora_name)
        exchange.adapter_key = loaded.digest_of(request.lora_name) or ""
        return AdaptersAnswer(loaded_adapters=dict(loaded.paths))


async def unload(state: AppState, exchange: Exchange, request: UnloadAdapterRequest) -> AdaptersAnswer:
    name = exchange.adapter = request.lora_name
    await _refresh(state)
    loaded_by = {adapter: each for each in state.models for adapter in _loaded_for(each)}
    if name in loaded_by:
        async with loaded_by[name].in_use(exchange) as of_model:
            assert of_model.loaded_adapters is not None
            await of_model.refresh_adapters()
            await of_model.loaded_adapters.unload(name, request.wait)
            return AdaptersAnswer(loaded_adapters=dict(of_model.loaded_adapters.paths))
    if any(name in each.config.engine.adapters for each in state.models):
        cause, remedy = "the configuration names it", "take it out of engine.adapters"
        refuse("not_allowed", "lora_name", name, remedy=remedy, cause=cause)
    raise error_of(Refusal("unknown_model", "lora_name", name, tuple(loaded_by) or "no adapter"))


async def _refresh(state: AppState) -> None:
    """Learns which adapters are loaded for each model."""
    await asyncio.gather(*(each.refresh_adapters() for each in state.models))


async def _check_alone(state: AppState, of_model: AppState, loaded: LoadedAdapters, name: str) -> None:
    """Refuses an adapter that was loaded for a model while another ingress loaded one of its name for another model,
    and unloads it. Each model has a table of its own, so neither of the two loads has kept the other out.
    """
    await _refresh(state)
    other = next((each for each in state.models if each is not of_model and name in _loaded_for(each)), None)
    if other is not None:
        await loaded.unload(name)
        refuse("name_taken", "lora_name", name, f"a name of the model {other.model_name}", "give another name")


def _loaded_for(of_model: AppState) -> Collection[str]:
    """Returns the names of a model's loaded adapters."""
    return () if of_model.loaded_adapters is None else of_model.loaded_adapters.paths


async def scales(state: AppState, exchange: Exchange, _: None) -> list[ScaledAdapter]:
    of_model = _asked_model(state, exchange)
    await of_model.refresh_adapters()
    loaded, configured = of_model.loaded_adapters, of_model.config.engine.adapters
    paths = configured if loaded is None else {**configured, **loaded.paths}
    of_names = {} if loaded is None else {each.name: each.scale for each in loaded.applied}
    return [
        ScaledAdapter(id=number, name=name, path=paths[name], scale=of_names.get(name, 0.0))
        for number, name in enumerate(of_model.admission.names.adapters)
    ]


async def set_scales(state: AppState, exchange: Exchange, body: list[AdapterScale]) -> ScalesSet:
    async with _asked_model(state, exchange).in_use(exchange) as of_model:
        if of_model.loaded_adapters is None:
            cause, remedy = "this server changes no adapters over HTTP", "set engine.adapter_roots"
            refuse("not_allowed", remedy=remedy, cause=cause)
        await of_model.refresh_adapters()
        applied = scaled_adapters(of_model, body, "", None)
        exchange.adapter = names_of(applied)
        await of_model.loaded_adapters.apply(applied)
        return ScalesSet()


def _asked_model(state: AppState, exchange: Exchange) -> AppState:
    """Returns the model that the query of `/lora-adapters` is about."""
    return _base_model(state, exchange, decode_query(ScalesQuery, exchange.incoming.query).model, "model")


def _base_model(state: AppState, exchange: Exchange, asked: str | None, field: str) -> AppState:
    """Returns the model that an adapter is for: the one that `field` names, the default one, or the only one."""
    only = next(iter(state.models)) if len(state.models) == 1 else None
    try:
        found = only if only is not None and asked is None else state.models.find(asked, exchange.caller)
        if asked is not None:
            found.admission.check_model(asked)
    except ServingError as error:
        raise error_of(under_field(error.refusal, field)) from error
    return found


def _check_name(name: str) -> None:
    if not name:
        refuse("empty", "lora_name", remedy="give the name that requests will have as their model")
    check_new_name("lora_name", name)


def _check_free(state: AppState, of_model: AppState, request: LoadAdapterRequest) -> None:
    """Refuses a name that something else has: a model, an alias, an adapter of another model, or an adapter that is not
    to be replaced.
    """
    name = request.lora_name
    for owner in state.models:
        if owner.admission.names.adapter_of(name) is None:
            continue
        is_adapter = owner is of_model and name in owner.admission.names.adapters
        if not is_adapter:
            refuse("name_taken", "lora_name", name, f"a name of the model {owner.model_name}", "give another name")
        if not request.load_inplace:
            remedy = "unload it first, or send load_inplace: true"
            refuse("name_taken", "lora_name", name, "an adapter that is loaded", remedy)
