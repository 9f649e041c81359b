"""All endpoints share the form of a route, and the state with configuration, tokenizer, engines and metrics.

An address of one model has one `AppState`. An address of several has one for each model, and one for routes that name
no model; `cluster/serve/fleet/` adds them, and they share one `ServerState`. `cluster/http/routes.py` holds the routes.
`cluster/http/app.py` makes the state, and finds the route of a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from typing import Any, ClassVar, NoReturn, TypeVar

import msgspec
from prometheus_client.metrics_core import Metric

from manta.cluster.config import ServeConfig
from manta.cluster.engine.stats import EngineStats
from manta.cluster.errors import refuse
from manta.cluster.http.access.prefix_scope import PrefixScope
from manta.cluster.http.access.request_admission import Admission, Caller
from manta.cluster.http.exchange.apart import Apart
from manta.cluster.http.exchange.condition import Condition
from manta.cluster.http.exchange.engines import Engines
from manta.cluster.http.exchange.exchange import Exchange, GenerationExchange
from manta.cluster.http.exchange.last_answer import LastAnswer
from manta.cluster.http.exchange.loaded_adapters import LoadedAdapters
from manta.cluster.http.exchange.metrics import Metrics
from manta.cluster.http.exchange.on_demand import OnDemand
from manta.cluster.http.exchange.recordings import NoStreams, Streams
from manta.cluster.protocol.error_bodies import Writer, openai_body
from manta.cluster.storage.kept_responses import KeptResponses
from manta.cluster.storage.records import Records
from manta.cluster.storage.storage import Storage
from manta.cluster.text.tokenizer import Tokenizer
from manta.structured.refusals import MAX_LISTED
from manta.workers.model_info import ModelInfo
from manta.workers.pooling_info import PoolingInfo, PoolingTask

Result = TypeVar("Result")
NOUNS: dict[PoolingTask, str] = {"embed": "embeddings", "classify": "scores of labels"}
"""What models that pool answer with."""
OtherMetrics = Callable[[], Awaitable[list[list[Metric]]]]
"""Function that returns the metrics of the other replicas of the endpoint, as far as they answer."""


Handler = Callable[["AppState", Exchange, Any], Awaitable[Any]]
"""Function that gets the decoded body (None if the route takes none). Its result is sent as JSON; it returns None if it
has sent the answer itself.
"""


class DeploymentState(msgspec.Struct, kw_only=True):
    """Ray Serve's view of one deployment: the engines, the ingress or the standbys."""

    name: str
    status: str
    """Ray Serve's status, such as HEALTHY or UPSCALING."""
    replicas: dict[str, int]
    """Number of replicas in each state, such as RUNNING or STARTING."""
    num_wanted: int | None = None
    """Number of replicas that Serve tries to run; None if it is unknown."""
    note: str | None = None
    """Reason why the deployment waits or does not start; None if Serve reports none."""


class NodeState(msgspec.Struct, kw_only=True):
    """A node of the Ray cluster."""

    address: str
    alive: bool
    resources: dict[str, float]
    """Ray's resources of the node by name, such as CPU, GPU and memory (bytes)."""


ClusterState = Callable[[], Awaitable[tuple[list[DeploymentState], list[NodeState]]]]
"""Function that returns the deployments and nodes as Ray reports them, including those that answer no request."""


@dataclasses.dataclass(frozen=True)
class Route:
    """An endpoint: everything that the application and its OpenAPI document know about it."""

    method: str
    path: str
    """Path of the endpoint. A parameter `{name}` matches the rest of a request's path, except for the text that follows
    the parameter.
    """
    handler: Handler
    summary: str
    _: dataclasses.KW_ONLY
    alias: str | None = None
    """Another path at which it is found, as on other servers."""
    body: type[Any] | None = None
    """Type to which the body is decoded and checked before the handler is called: a `Body`, or a list."""
    answer: Any = None
    """Type of the JSON answer, if there is one."""
    form: type | None = None
    """Fields of a `multipart/form-data` body, which the handler itself reads as it arrives."""
    query: type | None = None
    """Fields of the URL's query; the handler reads them with `decode_query`."""
    media_type: str | None = None
    """Content type of an answer that is not JSON."""
    errors: tuple[int, ...] = ()
    """Statuses that the handler returns, in addition to those of every route."""
    error_body: Writer = openai_body
    """Function that writes an error, in a stream too."""
    public: bool = False
    """Whether it is answered without an API key, because probes and scrapers have none."""
    for_operators: bool = False
    """Whether only the keys in `operator_keys` may call it."""
    logged: bool = False
    """Whether each request writes a line to the request log."""

    @property
    def parameter(self) -> str | None:
        """Name of the path's parameter; None if it has none."""
        found = re.search(r"/\{(\w+)\}", self.path)
        return None if found is None else found[1]


async def no_other_metrics() -> list[list[Metric]]:
    """Returns no metrics, for the only replica of the endpoint."""
    return []


async def no_cluster() -> tuple[list[DeploymentState], list[NodeState]]:
    """Returns no deployments and no nodes, for an application that Serve does not run."""
    return [], []


class ServerState:
    """Holds what the models of an address share in one process. `models` is the table of several; None is for an only
    model. `document` is the OpenAPI document of all routes, and `prefix_secret` keys the roots of the prefix cache.
    """

    def __init__(
        self,
        config: ServeConfig,
        prefix_secret: bytes,
        models: Models | None = None,
        other_metrics: OtherMetrics = no_other_metrics,
        cluster: ClusterState = no_cluster,
        document: dict[str, Any] | None = None,
    ) -> None:
        self.started = time.monotonic()
        """Start of this replica on `time.monotonic`'s clock."""
        self.models = OnlyModel() if models is None else models
        """The models of the address."""
        self.other_metrics = LastAnswer[list[list[Metric]]](other_metrics, [])
        """The metrics of the other replicas of the endpoint."""
        self.cluster = LastAnswer[tuple[list[DeploymentState], list[NodeState]]](cluster, ([], []))
        self.knows_engines = False
        """Whether an engine has answered a question about its health here."""
        self.document = document or {}
        self.prefix_scope = PrefixScope(prefix_secret, config.share_prefix_cache)
        self.streams: Streams = NoStreams()
        """The recorded streams. `cluster/http/app.py` sets it."""
        self.routes: dict[str, Route] = {}
        """Routes by path, for answers that are written again. `cluster/http/app.py` sets it."""
        self.drains = False
        """Whether Serve has told this replica to stop. It still answers the requests that reach it."""
        storage = None if config.batch_storage is None else Storage(config.batch_storage)
        self.records = None if storage is None else Records(storage, config.batches)
        """Files and batches; None if the server has no `batch_storage`."""
        self.responses = None if storage is None else KeptResponses(storage, config)
        """Stored responses; None if the server has no `batch_storage`."""
        self.storing: set[asyncio.Task[None]] = set()
        """Tasks that store responses whose streams have ended."""
        self.parsing = asyncio.Lock()
        """Lock for parsing a piece of an upload, which allows one piece per turn of the event loop."""
        self.apart = Apart("apart")
        """Runs what costs time with the size of a body."""
        self.rendering = Apart("rendering")
        """Renders conversations."""


class AppState:
    """Holds what answers the requests of one model of an address, or those that name none of several models.
    `admission` has the checks of the address; None makes them.
    """

    def __init__(
        self,
        config: ServeConfig,
        tokenizer: Tokenizer | None,
        engines: Engines,
        metrics: Metrics,
        server: ServerState,
        admission: Admission | None = None,
    ) -> None:
        self.server = server
        self.admission = Admission(config) if admission is None else admission
        self.created = int(time.time())
        """Time in seconds since 1970 at which this replica has started, or the model was added."""
        self.config = config
        self.model_name = config.model_name
        """Name of the model in the API."""
        self._tokenizer = tokenizer
        self.engines = engines
        self.engine_stats = LastAnswer[list[EngineStats]](engines.stats, [])
        self.metrics = metrics
        self.loaded_adapters: LoadedAdapters | None = None
        """The adapters that operators load; None if the configuration lets nobody load any. `use_adapters` sets it."""
        self._condition: Condition | None = None
        self.is_on_demand = False
        """Whether requests load the model. `cluster/serve/fleet/` sets it."""
        self._model: ModelInfo | None = None
        self._asking: asyncio.Future[ModelInfo] | None = None
        """Query to the engines that all waiting requests share; None if none is under way."""
        if not server.models.are_several:
            server.models.put(self)

    def of_model(
        self, config: ServeConfig, tokenizer: Tokenizer | None, engines: Engines, metrics: Metrics
    ) -> AppState:
        """Returns the state of one of several models of this server."""
        return AppState(config, tokenizer, engines, metrics, self.server, self.admission.of_model(config))

    @property
    def models(self) -> Models:
        """The models of the address."""
        return self.server.models

    @property
    def condition(self) -> Condition | None:
        """How one of several models fares. None for the only model of an address."""
        return self._condition

    @condition.setter
    def condition(self, condition: Condition) -> None:
        if condition != self._condition:
            self._condition = condition
            self.models.tell_news()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Routes that name none of several models have none."""
        assert self._tokenizer is not None, "a request names its model"
        return self._tokenizer

    @property
    def loader(self) -> OnDemand | None:
        """Loads the model when requests need it; None if they do not load it, or if it was removed and is leaving."""
        return self.models.on_demand if self.is_on_demand and self.models.serves(self.model_name) else None

    @property
    def may_chat(self) -> bool:
        """Whether the model has a chat template, as far as that is known while it is not loaded."""
        return self._tokenizer is None or self._tokenizer.has_chat_template

    @property
    def model_names(self) -> tuple[str, ...]:
        """The model's name, its aliases and its adapters."""
        return self.admission.names.listed

    def use_adapters(self, loaded: LoadedAdapters | None) -> None:
        """Serves the adapters that operators load, from now on."""
        self.loaded_adapters = loaded
        if loaded is not None:
            loaded.tell = self.serve_adapters
            self.serve_adapters(loaded.paths)

    def serve_adapters(self, names: Collection[str]) -> None:
        """Serves the loaded adapters with these names, and no others."""
        self.admission.names.serve(names)
        self.models.note_names()

    async def refresh_adapters(self) -> None:
        """Learns which adapters are loaded."""
        if self.loaded_adapters is not None:
            await self.loaded_adapters.refresh()

    @contextlib.asynccontextmanager
    async def for_body(self, body: Any, exchange: GenerationExchange) -> AsyncIterator[AppState]:
        """Yields the state of the model that a body names, whose engines then answer the exchange. A model on demand is
        loaded first, and stays loaded until the end of the `async with`. A body without the field is for the server
        itself. Refuses a model that is not served, has failed, or is not loaded in time.
        """
        if not hasattr(body, "model"):
            yield self
            return
        found = self.models.find(asked_model(body), exchange.caller)
        if not needs_model(body):
            yield found
            return
        async with found.in_use(exchange) as state:
            if state is not self:
                exchange.engines = state.engines
            if state.condition is not None:
                state.condition.check(state.model_name)
            yield state

    @contextlib.asynccontextmanager
    async def in_use(self, exchange: GenerationExchange) -> AsyncIterator[AppState]:
        """Yields the state of this model once it is loaded. The model stays until the end of the `async with`."""
        if self.loader is not None:
            async with self.loader.use(self.model_name, exchange.caller.sharer, exchange.remaining_s):
                yield self.models.named(self.model_name)
            return
        models = self.models.on_demand
        with contextlib.nullcontext() if models is None else models.using(self.model_name):
            yield self

    def all_metrics(self) -> list[Metrics]:
        """Returns the metrics of the server, and those of each of several models."""
        return [self.metrics, *(state.metrics for state in self.models if state is not self)]

    async def apart(self, exchange: GenerationExchange, function: Callable[..., Result], *arguments: object) -> Result:
        """Returns the result of a call that costs time with the size of the exchange's body: of a small one at once, of
        another one from a thread, in turns with the calls of other clients.
        """
        if exchange.is_small:
            return function(*arguments)
        return await self.server.apart.run(exchange.caller.sharer, function, *arguments)

    async def rendered(
        self, exchange: GenerationExchange, function: Callable[..., Result], *arguments: object
    ) -> Result:
        """Returns the result of a call that renders a conversation, from a thread, in turns with those of other
        clients. A template may take seconds, however short the conversation is.
        """
        return await self.server.rendering.run(exchange.caller.sharer, function, *arguments)

    async def model_info(self) -> ModelInfo:
        """Returns the model's properties as an engine reported them. Raises `Unavailable` if no engine will come."""
        if self._model is None:
            if self._asking is None:
                self._asking = asyncio.ensure_future(self.engines.model())
                self._asking.add_done_callback(self._note_model)
            return await asyncio.shield(self._asking)  # it goes on for others when one client leaves
        return self._model

    @property
    def known_model(self) -> ModelInfo | None:
        """The model's properties; None as long as no request has needed them."""
        return self._model

    async def generating_model(self) -> ModelInfo:
        """Returns the model's properties. Refuses if the model pools, and so has no text to answer with."""
        info = await self.model_info()
        if info.pooling is not None:
            self.refuse_model(f"it answers with {NOUNS[info.pooling.task]} and generates no text")
        return info

    async def pooling_model(self, *tasks: PoolingTask) -> tuple[ModelInfo, PoolingInfo]:
        """Returns the model's properties, and how it pools. Refuses if it does nothing of `tasks`."""
        info = await self.model_info()
        if info.pooling is None or info.pooling.task not in tasks:
            actual = "text" if info.pooling is None else NOUNS[info.pooling.task]
            self.refuse_model(f"it answers with {actual}, and not with {' or '.join(NOUNS[task] for task in tasks)}")
        return info, info.pooling

    def refuse_model(self, cause: str) -> NoReturn:
        """Refuses a request that the served model cannot answer, whoever asks."""
        refuse("unsupported", "model", self.model_name, remedy="ask a server with another model", cause=cause)

    def forget_model(self) -> None:
        """Asks an engine for the model's properties again before the next request, because they have changed."""
        self._model = None

    async def adapter_digest(self, name: str) -> str:
        """Returns the digest of an adapter's values."""
        digest = None if self.loaded_adapters is None else self.loaded_adapters.digest_of(name)
        if digest is not None:
            return digest
        adapters = (await self.model_info()).adapters
        if name not in adapters:
            self.forget_model()
            refuse("adapter_gone", "model", name, remedy="send the request again")
        return adapters[name].digest

    def _note_model(self, answer: asyncio.Future[ModelInfo]) -> None:
        self._asking = None
        if not answer.cancelled() and answer.exception() is None:
            self._model = answer.result()


class Models:
    """The models of an address. `default_model` answers requests that name none."""

    def __init__(self, default_model: str | None = None) -> None:
        self._default = default_model
        self.on_demand: OnDemand | None = None
        """Loads models on demand and changes the list of models. `cluster/serve/` sets it for an address of several."""
        self._states: dict[str, AppState] = {}
        self._leaving: frozenset[str] = frozenset()
        """Models that take no new requests, and stay until those that they have end."""
        self._owners: dict[str, str] = {}
        """Name of the model of each name and alias."""
        self.news = asyncio.Event()
        """Set when a model comes, goes or fares otherwise. From then on there is another event."""

    def __iter__(self) -> Iterator[AppState]:
        return iter([state for name, state in self._states.items() if name not in self._leaving])

    def __len__(self) -> int:
        return sum(name not in self._leaving for name in self._states)

    are_several: ClassVar[bool] = True
    """Whether the address may have several models, even if it has one or none now."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names and aliases."""
        return tuple(self._owners)

    def put(self, state: AppState) -> None:
        """Adds a model, or replaces the one of its name at its place."""
        self._states[state.model_name] = state
        self.note_names()

    def let_leave(self, names: Collection[str]) -> None:
        """Makes the models of these names, and no others, take no new requests. Work that began with one finds it by
        `named`, until it is removed.
        """
        leaving = frozenset(names)
        if leaving != self._leaving:
            self._leaving = leaving
            self.note_names()
            self.tell_news()

    def serves(self, name: str) -> bool:
        """Returns whether a model, by its own name, takes new requests."""
        return name in self._states and name not in self._leaving

    def tell_news(self) -> None:
        """Wakes up whoever follows the models."""
        self.news.set()
        self.news = asyncio.Event()

    async def settle(self) -> None:
        """Lets models whose adapters other processes may have changed unnoticed learn which ones are loaded."""
        for state in self:
            if state.loaded_adapters is not None and state.loaded_adapters.is_settling:
                await state.loaded_adapters.refresh()

    def remove(self, name: str) -> None:
        """Removes a model by its name, if there is one. Requests under way keep its state."""
        self._states.pop(name, None)
        self.note_names()
        self.tell_news()

    def note_names(self) -> None:
        """Finds out whose each name is, after the names of a model have changed. Of two models that have one, it is the
        model's whose configuration has it, then the one's that has it as a whole name, and last the one's whose name
        stands before a colon.
        """
        names = [(state.model_name, state.admission.names) for state in self]
        owners: dict[str, str] = {}
        for name, own in (
            *((name, own) for own, having in names for name in having.configured),
            *((name, own) for own, having in names for name in having.listed),
            *((name, own) for own, having in names for name in having.every),
        ):
            owners.setdefault(name, own)
        self._owners = owners

    def named(self, name: str) -> AppState:
        """Returns a model by its own name, for work that began with it. Refuses with 404 if it is gone."""
        state = self._states.get(name)
        return self._unknown(name, self.names) if state is None else state

    def owner_of(self, name: str) -> AppState | None:
        """Returns the model that has a name, or whose adapter has it; None if the name is free."""
        return self._states.get(self._owners.get(name, ""))

    def metrics_of(self, name: str | None, of_server: Metrics) -> Metrics:
        """Returns the metrics of a model, or those of the server for a request without one."""
        state = self._states.get(name or "")
        return of_server if state is None else state.metrics

    def find(self, name: str | None, caller: Caller) -> AppState:
        """Returns the model that answers a request, by any of its names. Refuses with 404 a name that is none of those
        which the caller may use, and with 400 a request that names none, unless there is a default model.
        """
        asked = name or self._default
        found = self.owner_of(asked) if asked else None
        if asked and found is not None and caller.may_use(found.admission.names, asked):
            return found
        named = [(each, self._states[owner].admission.names) for each, owner in self._owners.items()]
        allowed = tuple(each for each, names in named if caller.may_use(names, each))
        if not asked:
            names = ", ".join(allowed[:MAX_LISTED])
            refuse("required", "model", bound=allowed or "none", remedy=f"name one of {names}" if names else "")
        return self._unknown(asked, allowed)

    def _unknown(self, name: str, known: tuple[str, ...]) -> NoReturn:
        refuse("unknown_model", "model", name, known or "nothing")


class OnlyModel(Models):
    """The table of an address of one model, which checks names itself (`Admission.check_model`)."""

    are_several = False

    @property
    def _only(self) -> AppState:
        (only,) = self._states.values()
        return only

    def named(self, name: str) -> AppState:
        return self._only

    def find(self, name: str | None, caller: Caller) -> AppState:
        if not caller.may_use(self._only.admission.names, name or self._only.model_name):
            self._unknown(name or self._only.model_name, ())
        return self._only


def needs_model(body: Any) -> bool:
    """Returns whether the model that a body names must be loaded for the answer. Bodies that may do without it have
    `needs_model`.
    """
    return bool(getattr(body, "needs_model", True))


def asked_model(body: Any) -> str | None:
    """Returns the model that a body names; None if it names none. Bodies of an API that writes names in a way of its
    own have `served_model`.
    """
    name: str | None = getattr(body, "served_model", None) or body.model
    return name
