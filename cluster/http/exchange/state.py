"""All endpoints share the form of a route, and the state with configuration, tokenizer, engines and metrics.

`cluster/http/routes.py` holds the routes. `cluster/http/app.py` makes the state, and finds the route of a request.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import msgspec
from prometheus_client.metrics_core import Metric

from manta.cluster.config import ServeConfig
from manta.cluster.engine.stats import EngineStats
from manta.cluster.errors import refuse
from manta.cluster.http.access.prefix_scope import PrefixScope
from manta.cluster.http.access.request_admission import Admission, Body
from manta.cluster.http.exchange.apart import Apart
from manta.cluster.http.exchange.engines import Engines
from manta.cluster.http.exchange.exchange import Exchange, GenerationExchange
from manta.cluster.http.exchange.last_answer import LastAnswer
from manta.cluster.http.exchange.metrics import Metrics
from manta.cluster.http.exchange.recordings import NoStreams, Streams
from manta.cluster.protocol.error_bodies import Writer, openai_body
from manta.cluster.storage.kept_responses import KeptResponses
from manta.cluster.storage.records import Records
from manta.cluster.storage.storage import Storage
from manta.cluster.text.tokenizer import Tokenizer
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
    body: type[Body] | None = None
    """Type to which the body is decoded and checked before the handler is called."""
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


class AppState:
    """Holds one application's shared state. `document` is the OpenAPI document of all routes; `prefix_secret` keys the
    roots of the prefix cache.
    """

    def __init__(
        self,
        config: ServeConfig,
        tokenizer: Tokenizer,
        engines: Engines,
        metrics: Metrics,
        prefix_secret: bytes,
        other_metrics: OtherMetrics = no_other_metrics,
        cluster: ClusterState = no_cluster,
        document: dict[str, Any] | None = None,
    ) -> None:
        self.config = config
        self.model_name = config.model_name
        """Name of the model in the API."""
        self.tokenizer = tokenizer
        self.engines = engines
        self.metrics = metrics
        self.admission = Admission(config)
        self.other_metrics = LastAnswer[list[list[Metric]]](other_metrics, [])
        """The metrics of the other replicas of the endpoint."""
        self.engine_stats = LastAnswer[list[EngineStats]](engines.stats, [])
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
        self.created = int(time.time())
        """Start of this replica, in seconds since 1970."""
        self._apart = Apart("apart")
        self._rendering = Apart("rendering")
        self._model: ModelInfo | None = None
        self._asking: asyncio.Future[ModelInfo] | None = None
        """Query to the engines that all waiting requests share; None if none is under way."""

    async def apart(self, exchange: GenerationExchange, function: Callable[..., Result], *arguments: object) -> Result:
        """Returns the result of a call that costs time with the size of the exchange's body: of a small one at once, of
        another one from a thread, in turns with the calls of other clients.
        """
        if exchange.is_small:
            return function(*arguments)
        return await self._apart.run(exchange.caller.sharer, function, *arguments)

    async def rendered(
        self, exchange: GenerationExchange, function: Callable[..., Result], *arguments: object
    ) -> Result:
        """Returns the result of a call that renders a conversation, from a thread, in turns with those of other
        clients. A template may take seconds, however short the conversation is.
        """
        return await self._rendering.run(exchange.caller.sharer, function, *arguments)

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
        """Returns the digest of an adapter's values; empty for the model alone."""
        if not name:
            return ""
        adapters = (await self.model_info()).adapters
        if name not in adapters:
            self.forget_model()
            refuse("adapter_gone", "model", name, remedy="send the request again")
        return adapters[name].digest

    def _note_model(self, answer: asyncio.Future[ModelInfo]) -> None:
        self._asking = None
        if not answer.cancelled() and answer.exception() is None:
            self._model = answer.result()
