"""One process's table of models, kept like what Serve runs: models come, change and go while the process goes on."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from typing import Any, NamedTuple, Protocol

import msgspec
import ray
from ray import serve

from manta.cluster.config import EngineConfig, ServeConfig, ServedModel
from manta.cluster.errors import ServingError
from manta.cluster.http.exchange.all_engines import AllEngines
from manta.cluster.http.exchange.condition import Condition
from manta.cluster.http.exchange.engines import Engines
from manta.cluster.http.exchange.metrics import Metrics
from manta.cluster.http.exchange.state import AppState, Models
from manta.cluster.serve.adapters.adapter_directory import SETTLING_S, NoEngines, open_directory, tell_nobody
from manta.cluster.serve.adapters.shared_call import SharedCall
from manta.cluster.serve.fleet.found import FoundModel, application_name, found_models, with_unloaded
from manta.cluster.serve.fleet.model_changes import ModelChanges, no_changes
from manta.cluster.serve.fleet.streams_of_models import StreamsOfModels
from manta.cluster.serve.recorded.streams import RecordedStreams
from manta.cluster.serve.requests.engine_client import ENGINE, EngineClient
from manta.cluster.serve.routing.replicas import own_node
from manta.cluster.serve.scaling.cluster_state import is_removed
from manta.cluster.serve.starting.start_failure import in_words
from manta.cluster.text.chat_template import template_process
from manta.cluster.text.kept_tokenizers import KeptTokenizers
from manta.cluster.text.tokenizer import Tokenizer
from manta.structured.client_shares import ClientShares
from manta.structured.visible_logs import logger_of
from manta.workers.checkpoints.model_folder import resolve_model_folder

logger = logger_of(__name__)

LOOK_S = 0.5
"""Seconds between two queries to Serve's controller for the models of the address."""


def tokenizer_of(config: ServeConfig, read: Callable[[str], Tokenizer] = Tokenizer) -> Tokenizer:
    """Returns the tokenizer of a configuration's model, which `read` reads from its folder, and starts the process that
    renders chat templates if the tokenizer has one.
    """
    tokenizer = read(config.engine.tokenizer or str(resolve_model_folder(config.engine.model)))
    if tokenizer.has_chat_template:
        template_process().start()
    return tokenizer


def _adapters_of(engine: EngineConfig) -> tuple[object, ...]:
    """Returns the options on which a model's adapters depend."""
    return engine.model, engine.adapter_roots, engine.adapters


class _Member:
    """One model of the table, with everything that this ingress holds for it."""

    def __init__(
        self,
        found: FoundModel,
        state: AppState,
        client: EngineClient | None,
        fault: Condition | None,
        handle: Any,
    ) -> None:
        self.found = found
        self.state = state
        self.client = client
        """None if the model cannot be served here."""
        self.fault = fault
        """Set if the model cannot be served here however its engines fare."""
        self.handle = handle
        """The handle of the engines; None without a client."""
        self.has_adapters = False
        """Whether the adapters that operators load are served."""
        self.asking: asyncio.Task[None] | None = None
        """Asks the engines for the model's properties; None before they have loaded."""


class _Prepared(NamedTuple):
    """A model's files and handle, as this process needs them."""

    tokenizer: Tokenizer | None
    """None if the model cannot be served here, or has no engines now."""
    fault: Condition | None
    """The reason why it cannot be served here."""
    handle: Any
    """The handle of its engines; None without a tokenizer."""


class Table(Protocol):
    """What answers for the models: the application of an ingress, or the endpoints of batches."""

    def add_model(
        self, config: ServeConfig, tokenizer: Tokenizer | None, engines: Engines, metrics: Metrics
    ) -> AppState: ...

    def remove_model(self, name: str) -> None: ...

    def let_leave(self, names: Collection[str]) -> None: ...


class Fleet:
    """Owns the clients of all models' engines in one process, which are of the type `client`.

    - `address` is the name of the application that answers requests, and `replica` that of the ingress if there are
      several.
    - `streams` records streams; None records none.
    - `on_demand` are the models that the table has whether they are loaded or not.
    - `find` returns the models of an address, some of whose applications are served already, `changes` what operators
      have changed of them, and `handle_of` the handle of a deployment of an application.
    - `tell_others` makes the other processes that serve call `refresh_adapters`.
    """

    def __init__(
        self,
        address: str,
        config: ServeConfig,
        table: Table,
        streams: StreamsOfModels | None = None,
        replica: str | None = None,
        on_demand: Iterable[ServedModel] = (),
        client: type[EngineClient] = EngineClient,
        find: Callable[[str, Collection[str]], list[FoundModel]] = found_models,
        changes: Callable[[], ModelChanges] = no_changes,
        handle_of: Callable[[str, str], Any] = serve.get_deployment_handle,
        tell_others: Callable[[], Awaitable[None]] = tell_nobody,
    ) -> None:
        self._address = address
        self._config = config
        self._table = table
        self._streams = streams
        self._replica = replica
        self._on_demand = tuple(on_demand)
        self._client_type = client
        self._find = find
        self._changes = changes
        self._handle_of = handle_of
        self._tell_others = tell_others
        self._settled = time.monotonic() + SETTLING_S
        self._tokenizers = KeptTokenizers()
        self._members: dict[str, _Member] = {}
        self._retiring: dict[EngineClient, str] = {}
        """Clients of engines that requests still use, and the names of their models, which have left the table."""
        self._looking = SharedCall(self._look)
        self._shares = ClientShares(config.streams.max_bytes, config.streams.max_client_bytes, drops_own=True)
        self._watching: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def applications(self) -> dict[str, str]:
        """The names of the models by those of their applications."""
        return {member.found.application: name for name, member in self._members.items() if member.found.application}

    def is_served(self, name: str) -> bool:
        """Returns whether a model's engines can be called with its adapters, or it cannot be served here however they
        fare.
        """
        member = self._members.get(name)
        return member is not None and (member.fault is not None or (member.client is not None and member.has_adapters))

    def is_running(self, name: str) -> bool:
        """Returns whether engines work for this process, also for clients that have left."""
        member = self._members.get(name)
        clients = [client for client, model in self._retiring.items() if model == name]
        if member is not None and member.client is not None:
            clients.append(member.client)
        return any(client.runs for client in clients)

    async def start(self) -> None:
        """Brings the table up to date, and keeps it so from now on. Later calls do nothing."""
        if self._watching is None:
            await self.look()
            self._watching = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except Exception as error:  # the controller may be restarting, and Ray raises many types
                logger.warning("Serve does not tell its models: %s", in_words(error))

    async def look(self) -> None:
        """Makes the table like what Serve tells now."""
        await self._looking()

    async def _look(self) -> None:
        models, leaving = await asyncio.to_thread(self._told)
        told = {each.model.model_name: each for each in models}
        self._table.let_leave(leaving)
        for name in self._members.keys() - told.keys():
            self._remove(name)
        new = {name: found for name, found in told.items() if self._is_new(name, found)}
        for name in told.keys() - new.keys():
            member = self._members[name]
            self._tell(member, msgspec.structs.replace(told[name], model=member.found.model))
        prepared = await asyncio.gather(*map(self._prepare, new.values()), return_exceptions=True)
        for (name, found), each in zip(new.items(), prepared, strict=True):
            if isinstance(each, _Prepared):
                self._put(name, found, each)
            else:
                logger.warning("the model %s is not served yet: %s", name, in_words(each))
        members = [member for member in self._members.values() if not member.has_adapters]
        await asyncio.gather(*map(self._use_adapters, members))

    def _told(self) -> tuple[list[FoundModel], frozenset[str]]:
        """Returns the models that Serve tells, with those on demand, and the names of those that operators have
        removed. These stay as long as their engines, because requests may still use them. Another application's model
        of such a name is not removed.
        """
        found, changes = self._find(self._address, self.applications.keys()), self._changes()
        listed = changes.placed(self._on_demand)
        removed = {application_name(self._address, name): name for name in changes.removed}
        leaving = frozenset(removed[each.application] for each in found if each.application in removed)
        failed = {name: load.reason for name, load in changes.failed.items()}
        return with_unloaded(found, (model for model in listed if model.on_demand), failed), leaving

    def _is_new(self, name: str, found: FoundModel) -> bool:
        """Returns whether a model is not in the table as it was found: it comes, it has other engines, or all its
        engines have other options.
        """
        member = self._members.get(name)
        if member is None or member.found.application != found.application:
            return True
        return found.is_settled and found.model != member.found.model

    async def _prepare(self, found: FoundModel) -> _Prepared:
        """Reads what a model needs here, from files and from Serve."""
        if not found.application:
            return _Prepared(None, None, None)
        tokenizer, fault = await self._tokenizer(self._config.of_model(found.model))
        handle = None
        if tokenizer is not None and self._client_of(found) is None:
            handle = await asyncio.to_thread(self._handle_of, ENGINE, found.application)
        return _Prepared(tokenizer, fault, handle)

    def _client_of(self, found: FoundModel) -> EngineClient | None:
        """Returns the client of a model's engines, if this process has one."""
        member = self._members.get(found.model.model_name)
        return member.client if member is not None and member.found.application == found.application else None

    def _put(self, name: str, found: FoundModel, prepared: _Prepared) -> None:
        before, client = self._members.get(name), self._client_of(found)
        if before is not None and client is not None and prepared.tokenizer is not None:
            self._change(before, found, prepared.tokenizer, client)
        else:
            self._add(name, found, before, prepared)

    def _add(self, name: str, found: FoundModel, before: _Member | None, prepared: _Prepared) -> None:
        """Adds a model to the table, or puts it in the place of what it was `before`, which requests under way keep."""
        config, tokenizer = self._config.of_model(found.model), prepared.tokenizer
        metrics = Metrics(name, self._replica) if before is None else before.state.metrics
        metrics.show_options(config)
        client = None if tokenizer is None else self._client(prepared.handle, found, config, tokenizer, metrics)
        if before is not None:
            self._let_go(name, before)
        if client is not None and self._streams is not None:
            self._streams.put(name, RecordedStreams(client, config.streams, own_node(), self._shares))
        engines: Engines = AllEngines(Models()) if client is None else client
        state = self._table.add_model(config, tokenizer, engines, metrics)
        state.is_on_demand = found.model.on_demand
        if before is not None and _adapters_of(before.state.config.engine) == _adapters_of(config.engine):
            state.use_adapters(before.state.loaded_adapters)  # until the table is read for these engines
        member = self._members[name] = _Member(found, state, client, prepared.fault, prepared.handle)
        self._tell(member, found)
        if found.application:
            logger.info("the model %s is served from the application %s", name, found.application)

    def _client(
        self, handle: Any, found: FoundModel, config: ServeConfig, tokenizer: Tokenizer, metrics: Metrics
    ) -> EngineClient:
        return self._client_type(
            handle,
            tokenizer,
            ray.util.get_node_ip_address(),
            metrics,
            None,
            config.engine.max_num_waiting,
            functools.partial(is_removed, found.application),
        )

    def _change(self, member: _Member, found: FoundModel, tokenizer: Tokenizer, client: EngineClient) -> None:
        """Takes the new options of a model, whose engines have been replaced by now. Its streams go on."""
        before, config = member.state.config.engine, self._config.of_model(found.model)
        client.tokenizer = tokenizer
        client.metrics.show_options(config)
        client.hold_at_most(config.engine.max_num_waiting)
        member.state = self._table.add_model(config, tokenizer, client, client.metrics)
        member.state.is_on_demand = found.model.on_demand
        if _adapters_of(before) != _adapters_of(config.engine):
            member.has_adapters = False
        elif member.has_adapters:
            member.state.use_adapters(client.loaded_adapters)
        self._tell(member, found)

    async def _use_adapters(self, member: _Member) -> None:
        """Serves the adapters that operators load for a model. Their names stay its own while it is not loaded."""
        state, client = member.state, member.client
        engines = NoEngines(application_name(self._address, state.model_name)) if client is None else client
        directory = open_directory(state.config, engines, self._tell_others, self._settled - time.monotonic())
        if directory is not None:
            await directory.follow()
        if client is not None:
            client.loaded_adapters = directory
        state.use_adapters(directory)
        member.has_adapters = True
        if directory is not None:
            await directory.follow()  # others may have told this process of a change meanwhile

    async def refresh_adapters(self) -> None:
        """Learns which adapters are loaded."""
        for member in list(self._members.values()):
            await member.state.refresh_adapters()

    async def _tokenizer(self, config: ServeConfig) -> tuple[Tokenizer | None, Condition | None]:
        """Returns a model's tokenizer, or the condition of a model whose tokenizer cannot be read here."""
        try:
            return await asyncio.to_thread(tokenizer_of, config, self._tokenizers.read), None
        except Exception as error:  # files of any kind may be there, and libraries raise many types
            reason = f"its tokenizer cannot be read on the ingress's node: {in_words(error)}"
            return None, Condition("failed", reason)

    def _tell(self, member: _Member, found: FoundModel) -> None:
        """Notes how a model fares. Of one that has just loaded its properties are asked, for the list of models."""
        condition = member.fault or found.condition
        member.found, member.state.condition = found, condition
        is_unknown = condition.stage == "loaded" and member.state.known_model is None
        if is_unknown and (member.asking is None or member.asking.done()):
            member.asking = self._begin(self._ask(member.state))

    def _remove(self, name: str) -> None:
        member = self._members.pop(name)
        self._table.remove_model(name)
        self._let_go(name, member)
        logger.info("the model %s is served no more: the application %s has gone", name, member.found.application)

    def _let_go(self, name: str, member: _Member) -> None:
        """Lets go of what this process held for a model whose engines have gone."""
        if self._streams is not None:
            self._streams.remove(name)
        if member.client is not None:
            self._retiring[member.client] = name
            self._begin(self._retire(member.client, member.handle))

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _ask(self, state: AppState) -> None:
        with contextlib.suppress(ServingError):
            await state.model_info()

    async def _retire(self, client: EngineClient, handle: Any) -> None:
        """Closes the client of a model that is gone, when its last requests have ended, and its handle."""
        while client.runs:
            await asyncio.sleep(LOOK_S)
        del self._retiring[client]
        await client.close()
        await handle.shutdown_async()  # an open handle wakes up ten times a second
