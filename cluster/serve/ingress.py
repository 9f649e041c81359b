"""The HTTP application as a Serve deployment: each replica has a tokenizer, metrics and a channel from the engines.

What it answers is `cluster/http/`'s; here it is made, told apart from its peers and watched by Serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
from typing import Any

import ray
from prometheus_client.metrics_core import Metric
from ray import serve

from cluster.config import ServeConfig
from cluster.http.access.keys import openness
from cluster.http.app import HttpApp
from cluster.http.exchange import Receive, Scope, Send
from cluster.http.metrics import Metrics
from cluster.serve.engine_client import ANSWER_TIMEOUT_S, EngineClient
from cluster.serve.listener import Listener
from cluster.serve.start_failure import told_in_words
from cluster.text.tokenizer import Tokenizer
from workers.checkpoints.model_config import resolve_model_folder


class Ingress:
    """One replica of the endpoint, behind Serve's proxy. `engine` is the handle of the engines, `standby` that of their
    standby. `batches` is that of the runner of batches: Serve starts what is handed over, and nobody calls it.
    """

    returns_request_id = False
    """Serve's proxy gives every request an x-request-id if the client sent none, and returns it."""

    def __init__(self, config: ServeConfig, engine: Any, standby: Any = None, batches: Any = None) -> None:
        with told_in_words():
            self._start(config, engine, standby)

    def _start(self, config: ServeConfig, engine: Any, standby: Any) -> None:
        tokenizer = Tokenizer(config.engine.tokenizer or str(resolve_model_folder(config.engine.model)))
        if (warning := openness(config)) is not None:
            logging.getLogger(__name__).warning(warning)
        self._metrics = Metrics(config.model_name, _replica_id() if config.num_ingress_replicas > 1 else None)
        self._metrics.show_options(config)
        self._client = EngineClient(engine, tokenizer, ray.util.get_node_ip_address(), self._metrics, standby)
        self._app = HttpApp(
            config,
            tokenizer,
            self._client,
            self._metrics,
            other_metrics=self._other_metrics,
            returns_request_id=self.returns_request_id,
        )
        gc.freeze()  # what stays for life need not be looked through again, while streams wait

    async def check_health(self) -> None:
        """Called by Serve, the first time before the replica counts as ready; Serve replaces one that raises here."""
        with told_in_words():
            await self._client.check_reachable()

    def __serve_build_asgi_app__(self) -> Any:
        return self._app

    async def own_metrics(self) -> tuple[str | None, list[Metric]]:
        """What this ingress counted, and its name; called by the ingress that answers `/metrics`."""
        return self._metrics.replica, self._metrics.own()

    async def _other_metrics(self) -> list[list[Metric]]:
        """What the other ingresses counted, of those that answer."""
        if self._metrics.replica is None:
            return []
        try:
            answers = self._peers.broadcast("own_metrics")
            found = await answers.results_async(timeout_s=ANSWER_TIMEOUT_S, return_exceptions=True)
        except Exception as error:
            logging.getLogger(__name__).warning("metrics of this ingress only: %s", type(error).__name__)
            return []
        return [each[1] for each in found if isinstance(each, tuple) and each[0] != self._metrics.replica]

    @functools.cached_property
    def _peers(self) -> Any:
        context = serve.get_replica_context()
        return serve.get_deployment_handle(context.deployment, context.app_name)


class ListeningIngress(Ingress):
    """Takes the connections itself: Serve calls it ready when it listens, and replaces it when it no longer does."""

    returns_request_id = True

    def __init__(self, config: ServeConfig, engine: Any, standby: Any = None, batches: Any = None) -> None:
        super().__init__(config, engine, standby)
        self._listener = Listener(self._answer, config)

    async def check_health(self) -> None:
        await super().check_health()
        with told_in_words():
            await self._listener.ensure_listening()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # that a client left is news for Serve's counts only
            await self._app(scope, receive, send)


def _replica_id() -> str:
    return serve.get_replica_context().replica_id.unique_id


def ingress_deployment(config: ServeConfig, listens: bool) -> Any:
    """The Serve deployment; bind it with the configuration and the engine. With `listens` it needs no proxy."""
    return serve.deployment(
        ListeningIngress if listens else serve.ingress()(Ingress),
        name="ingress",
        num_replicas=config.num_ingress_replicas,
        health_check_period_s=5,
        max_ongoing_requests=100_000,  # the engine's queue limit refuses, and says so in OpenAI's shape
        ray_actor_options={"num_cpus": 0},
    )
