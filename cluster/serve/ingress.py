"""The HTTP application as a Serve deployment: each replica has a tokenizer, metrics and a channel from the engines.

`cluster/http/` answers the requests. This module builds that application, names the replica and drains it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from typing import Any

import ray
from prometheus_client.metrics_core import Metric
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError

from manta.cluster.config import ServeConfig, ServedModel
from manta.cluster.http.access.keys import openness
from manta.cluster.http.app import HttpApp
from manta.cluster.http.exchange.all_engines import AllEngines
from manta.cluster.http.exchange.engines import Engines
from manta.cluster.http.exchange.incoming import Receive, Scope
from manta.cluster.http.exchange.metrics import Metrics
from manta.cluster.http.exchange.reply import Send
from manta.cluster.http.exchange.state import Models
from manta.cluster.http.server_span import open_server_spans
from manta.cluster.serve.adapters.adapter_directory import ask_every, open_directory
from manta.cluster.serve.fleet.fleet import Fleet, tokenizer_of
from manta.cluster.serve.fleet.holds import Holds
from manta.cluster.serve.fleet.model_changes import GcsChanges
from manta.cluster.serve.fleet.streams_of_models import StreamsOfModels
from manta.cluster.serve.listening.listener import Listener
from manta.cluster.serve.recorded.streams import RecordedStreams
from manta.cluster.serve.requests.engine_client import ANSWER_TIMEOUT_S, EngineClient
from manta.cluster.serve.routing.replicas import own_node
from manta.cluster.serve.scaling.autoscaling import ingress_autoscaling_config
from manta.cluster.serve.scaling.cluster_state import ClusterWatch, is_removed
from manta.cluster.serve.starting.replica_process import REPLICA_ENVIRONMENT, ReplicaProcess
from manta.cluster.serve.starting.start_failure import told_in_words
from manta.structured.visible_logs import logger_of

DRAIN_POLL_S = 0.5
"""Seconds between two checks of a draining replica whether another one has taken its place."""
RATES_S = 1.0
"""Seconds between two queries to the other ingresses for their clients' use of rate limits."""
REMOVED_S = 25.0
"""Seconds that running streams get to end after their application was deleted, because whoever stops the application
waits for them. Serve gives the engines 20 s; streams that still run then end with an error.
"""


class Ingress:
    """One replica of the endpoint, behind Serve's proxy.

    - `engine` and `standby` are the handles of the engines and of the standby engines. Without `engine` the ingress
      serves the models whose engines name its application as their address.
    - `prefix_secret` is the same for all ingresses of an application.
    - `shares_port` applies only to ingresses that listen themselves.
    - `batches` is the handle of the batch runner. Nothing calls it, but Serve starts a deployment whose handle is
      passed on.
    - `on_demand` are models that requests load, and `loader` is the handle of what loads and changes models, if there
      are several.
    """

    returns_request_id = False
    """Whether the application returns the x-request-id. Behind Serve's proxy it does not: the proxy adds an id if the
    client sent none, and returns it.
    """

    def __init__(
        self,
        config: ServeConfig,
        engine: Any,
        prefix_secret: bytes,
        standby: Any = None,
        shares_port: bool = False,
        batches: Any = None,
        on_demand: tuple[ServedModel, ...] = (),
        loader: Any = None,
    ) -> None:
        with told_in_words():
            self._batches = batches
            self._on_demand = on_demand
            self._loader = loader
            self._start(config, engine, prefix_secret, standby, shares_port)

    def _start(self, config: ServeConfig, engine: Any, prefix_secret: bytes, standby: Any, shares_port: bool) -> None:
        if (warning := openness(config)) is not None:
            logger_of(__name__).warning("%s", warning)
        has_peers = _follow_engines(config) or (config.num_ingress_replicas or 1) > 1
        replica = _replica_id() if has_peers else None
        more = {
            "other_metrics": self._other_metrics,
            "returns_request_id": self.returns_request_id,
            "spans": open_server_spans(),
            "prefix_secret": prefix_secret,
        }
        self._fleet: Fleet | None = None
        self._holds: Holds | None = None
        if engine is None:
            self._start_fleet(config, replica, more)
        else:
            self._start_only_model(config, engine, standby, replica, more)
        self._sharing_limits: asyncio.Task[None] | None = None

    def _start_only_model(
        self, config: ServeConfig, engine: Any, standby: Any, replica: str | None, more: dict[str, Any]
    ) -> None:
        tokenizer = tokenizer_of(config)
        self._metrics = Metrics(config.model_name, replica)
        self._metrics.show_options(config)
        self._client = EngineClient(
            engine,
            tokenizer,
            ray.util.get_node_ip_address(),
            self._metrics,
            standby,
            max_held=config.engine.max_num_waiting,
            is_removed=is_removed,
        )
        self._client.loaded_adapters = open_directory(config, self._client, self._tell_others)
        self._engines: Engines = self._client
        self.streams = RecordedStreams(self._client, config.streams, own_node())
        """The recorded streams of this ingress."""
        self._app = HttpApp(
            config, tokenizer, self._client, self._metrics, cluster=ClusterWatch(), streams=self.streams, **more
        )
        self._app.use_adapters(self._client.loaded_adapters)

    def _start_fleet(self, config: ServeConfig, replica: str | None, more: dict[str, Any]) -> None:
        """Makes an application without models; the first check of its health finds them."""
        models, streams = Models(config.default_model), StreamsOfModels()
        self._metrics = Metrics("", replica)
        self._engines = AllEngines(models)
        cluster = ClusterWatch(lambda: self._fleet.applications if self._fleet is not None else {})
        self._app = HttpApp(
            config, None, self._engines, self._metrics, cluster=cluster, streams=streams, models=models, **more
        )
        self._fleet = Fleet(
            _app_name(),
            config,
            self._app,
            streams,
            replica,
            self._on_demand,
            changes=GcsChanges(_app_name()).read,
            tell_others=self._tell_others,
        )
        if self._loader is not None:
            tell = functools.partial(self._tell_others, "refresh_models")
            models.on_demand = self._holds = Holds(self._fleet, self._loader, _replica_id(), tell_others=tell)

    async def check_health(self) -> None:
        """Raises if the ingress cannot serve. Serve calls it for the first time before the replica counts as
        ready, and replaces a replica that raises.
        """
        with told_in_words():
            if self._fleet is not None:
                await self._fleet.start()
            await self._engines.check_reachable()
        has_others = self._metrics.replica is not None or self._batches is not None
        if self._sharing_limits is None and self._app.admission.rate_limits and has_others:
            self._sharing_limits = asyncio.ensure_future(self._share_rate_limits())

    def __serve_build_asgi_app__(self) -> Any:
        return self._app

    async def own_rates(self) -> tuple[str, dict[str, tuple[float, float]]]:
        """Returns this replica's name, and by API key the requests and tokens that it has counted since it started. The
        other ingresses call it, to count them against the key's rate limits too.
        """
        return _replica_id(), {
            name: (taken.requests, taken.tokens) for name, taken in self._app.admission.rate_limits.taken().items()
        }

    async def _share_rate_limits(self) -> None:
        """Asks the other ingresses and the runner of batches every `RATES_S` what they have counted against rate
        limits.
        """
        while True:
            await asyncio.sleep(RATES_S)
            found = await self._of_peers("own_rates") if self._metrics.replica is not None else []
            for peer, taken in [*found, *await self._of_batches()]:
                if peer != _replica_id():
                    self._app.admission.rate_limits.note_peer(peer, taken)

    async def _of_batches(self) -> list[tuple[str, Any]]:
        """Tells the runner of batches what was counted here, and returns its name with what it has counted, if there is
        one that answers.
        """
        if self._batches is None:
            return []
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return [("batches", await self._batches.exchange_rates.remote(*await self.own_rates()))]
        except Exception as error:
            logger_of(__name__).warning("the runner of batches does not answer: %s", type(error).__name__)
            return []

    async def refresh_adapters(self) -> None:
        """Learns which adapters are loaded. The ingress that has loaded or unloaded one calls it."""
        if self._fleet is not None:
            await self._fleet.refresh_adapters()
        elif self._client.loaded_adapters is not None:
            await self._client.loaded_adapters.refresh()

    async def refresh_models(self) -> None:
        """Learns which models are served. The ingress that has changed them calls it."""
        if self._fleet is not None:
            await self._fleet.look()

    async def _tell_others(self, method: str = "refresh_adapters") -> None:
        """Makes every other ingress and the runner of batches learn which adapters are loaded, or which models are
        served, by a call of a method. Raises `Unavailable` if one does not answer.
        """
        if self._metrics.replica is not None:
            await ask_every(lambda: self._peers.broadcast(method))
        if self._batches is not None:
            await ask_every(lambda: self._batches.broadcast(method))

    async def idle_seconds(self) -> dict[str, float]:
        """Returns the seconds since the last request of each model on demand; 0 for one that is in use. The loader
        calls it.
        """
        return {} if self._holds is None else self._holds.idle_seconds()

    async def let_go(self, model: str, num_waiting: dict[str, int]) -> bool:
        """Makes requests ask the loader for a model on demand again. Returns whether nothing here uses it. The loader
        calls it, with the number of requests of each ingress that wait there.
        """
        return self._holds is None or self._holds.let_go(model, num_waiting)

    async def own_metrics(self) -> tuple[str | None, list[Metric]]:
        """Returns this ingress's name and metrics. The ingress that answers `/metrics` calls it."""
        return self._metrics.replica, self._app.own_metrics()

    async def _other_metrics(self) -> list[list[Metric]]:
        """Returns the metrics of the other ingresses that answer."""
        if self._metrics.replica is None:
            return []
        found = await self._of_peers("own_metrics")
        return [counted for replica, counted in found if replica != self._metrics.replica]

    async def _of_peers(self, method: str) -> list[tuple[Any, Any]]:
        """Calls a method of every replica that is not draining, and returns the results of those that answer."""
        try:
            answers = self._peers.broadcast(method)
            found = await answers.results_async(timeout_s=ANSWER_TIMEOUT_S, return_exceptions=True)
        except DeploymentUnavailableError:
            return []
        except Exception as error:
            logger_of(__name__).warning("no other ingress answers %s: %s", method, type(error).__name__)
            return []
        return [each for each in found if isinstance(each, tuple)]

    @functools.cached_property
    def _peers(self) -> Any:
        context = serve.get_replica_context()
        return serve.get_deployment_handle(context.deployment, context.app_name)


class ListeningIngress(Ingress):
    """An ingress that accepts connections itself. Serve counts it as ready when it listens, and replaces it when it no
    longer does. With `shares_port` the application's other replicas may listen on the same node.
    """

    returns_request_id = True

    def _start(self, config: ServeConfig, engine: Any, prefix_secret: bytes, standby: Any, shares_port: bool) -> None:
        super()._start(config, engine, prefix_secret, standby, shares_port)
        self._port = config.port
        self._notice_s = config.drain_notice_s
        peers = f"{ray.get_runtime_context().get_session_name()}/{_app_name()}" if shares_port else None
        self._listener = Listener(self._answer, config, peers)

    async def check_health(self) -> None:
        await super().check_health()
        with told_in_words():
            await self._listener.ensure_listening()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the number of nodes with engines, which `cluster/serve/scaling/decision.py` reads. Serve calls it.
        The ingresses of several models follow no engines.
        """
        return {} if self._fleet is not None else {"engine_nodes": self._client.num_engine_nodes}

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # a client that left matters to Serve's counts only
            await self._app(scope, receive, send)

    # ---- going -------------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Returns when this replica may end. For `drain_notice_s` it fails its readiness check but still accepts
        requests, so that load balancers notice. It ends the notice early if another replica has taken its place or the
        application was deleted. Then it only finishes running requests.
        """
        deadline = time.monotonic() + self._notice_s
        while time.monotonic() < deadline and not (await self._is_replaced() or await is_removed()):
            self._app.begin_drain()
            await asyncio.sleep(DRAIN_POLL_S)
        self._app.begin_drain()
        patience_s = REMOVED_S if await is_removed() else None
        await asyncio.wait([asyncio.ensure_future(self._listener.close())], timeout=patience_s)

    async def own_place(self) -> tuple[str, tuple[str, int]]:
        """Returns the replica's name, and its node and port. A draining replica calls it."""
        return _replica_id(), (ray.get_runtime_context().get_node_id(), self._port)

    async def _is_replaced(self) -> bool:
        """Returns whether a replica that is not draining listens at the same node and port."""
        own_name, own_place = await self.own_place()
        return any(name != own_name and place == own_place for name, place in await self._of_peers("own_place"))


class DeployedIngress(ReplicaProcess, ListeningIngress):
    """The class that Serve deploys. Serve calls `__del__` of a replica that has to go, and then ends the process."""

    async def __del__(self) -> None:
        await self.drain()


class ProxiedIngress(ReplicaProcess, Ingress):
    """The class that Serve deploys when its proxies accept the connections."""


def _replica_id() -> str:
    return serve.get_replica_context().replica_id.unique_id


def _app_name() -> str:
    return serve.get_replica_context().app_name


def _follow_engines(config: ServeConfig) -> bool:
    """Returns whether the number of ingresses follows the nodes that have engines: with autoscaling and no fixed
    number.
    """
    return config.autoscaling is not None and config.num_ingress_replicas is None


def ingress_deployment(config: ServeConfig, num_nodes: int) -> Any:
    """Returns the Serve deployment of the ingresses; bind it with the configuration and the engines. Replicas that
    listen need no proxy.
    """
    listens, num_replicas = config.http_server == "listener", config.num_ingress_replicas or 1
    places: dict[str, Any] = {}
    if _follow_engines(config):
        assert config.autoscaling is not None
        scaling = ingress_autoscaling_config(config.autoscaling, num_nodes)
        places = {"autoscaling_config": scaling, "max_replicas_per_node": 1}
    elif listens and num_nodes > 1:
        places = {"max_replicas_per_node": -(-num_replicas // num_nodes)}
    elif listens:
        places = {"max_surge_percent": 100}  # there is no other node, so a new version listens before the old one ends
    return serve.deployment(
        DeployedIngress if listens else serve.ingress()(ProxiedIngress),
        name="ingress",
        num_replicas=None if "autoscaling_config" in places else num_replicas,
        health_check_period_s=1,  # a lost port answers nobody until the next check; a check takes 10 us
        max_ongoing_requests=100_000,  # the engine's queue limit refuses requests, with an error in OpenAI's format
        graceful_shutdown_timeout_s=config.drain_notice_s + config.drain_timeout_s,
        graceful_shutdown_wait_loop_s=DRAIN_POLL_S,
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": REPLICA_ENVIRONMENT}},
        **places,
    )
