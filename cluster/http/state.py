"""What every endpoint may use: configuration, tokenizer, engines and metrics. `cluster/http/app.py` makes one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from prometheus_client.metrics_core import Metric

from cluster.batch.records import Records
from cluster.batch.storage import Storage
from cluster.config import ServeConfig
from cluster.http.engines import Engines
from cluster.http.errors import ApiError
from cluster.http.metrics import Metrics
from cluster.text.tokenizer import Tokenizer
from workers.model_info import ModelInfo

OtherMetrics = Callable[[], Awaitable[list[list[Metric]]]]
"""What the other replicas of the endpoint counted, of those that answer."""


class DeploymentState(msgspec.Struct, kw_only=True):
    """What Serve says of the engines, the ingress or the standbys."""

    name: str
    status: str
    """Serve's word, such as HEALTHY or UPSCALING."""
    replicas: dict[str, int]
    """How many are in which state, such as RUNNING or STARTING."""
    note: str | None = None
    """What it waits for, or why something does not start."""


class NodeState(msgspec.Struct, kw_only=True):
    """A machine of the cluster."""

    address: str
    alive: bool
    resources: dict[str, float]
    """What Ray may place there: CPUs, GPUs, bytes of memory."""


ClusterState = Callable[[], Awaitable[tuple[list[DeploymentState], list[NodeState]]]]
"""What there is beside the engines that answer."""


class AppState:
    """`document` is the OpenAPI document of all routes."""

    def __init__(
        self,
        config: ServeConfig,
        tokenizer: Tokenizer,
        engines: Engines,
        metrics: Metrics,
        other_metrics: OtherMetrics,
        cluster: ClusterState,
        document: dict[str, Any],
    ) -> None:
        self.config = config
        self.model_name = config.model_name
        """The model's name in the API."""
        self.tokenizer = tokenizer
        self.engines = engines
        self.metrics = metrics
        self.other_metrics = other_metrics
        self.cluster = cluster
        self.document = document
        self.drains = False
        """Serve told this replica to go; it takes what still comes."""
        self.records = None if config.batch_storage is None else Records(Storage(config.batch_storage), config.batches)
        """Files and batches; None if this server keeps none."""
        self.created = int(time.time())
        """Seconds since 1970: when the model began to be served."""
        self._model: ModelInfo | None = None
        self._asking: asyncio.Future[ModelInfo] | None = None
        """The one question to the engines for it, for all requests that wait."""

    def check_model(self, name: str) -> None:
        """Raises `ApiError` 404 if another model is asked for."""
        served = self.model_name
        if name != served:
            message = f"model {name!r} is not served here; {served!r} is"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def model_info(self) -> ModelInfo:
        """What an engine loaded. Raises `ApiError` 503 if there will be no engine."""
        if self._model is None:
            if self._asking is None:
                self._asking = asyncio.ensure_future(self.engines.model())
                self._asking.add_done_callback(self._note_model)
            return await asyncio.shield(self._asking)  # it goes on for others when one client leaves
        return self._model

    def _note_model(self, answer: asyncio.Future[ModelInfo]) -> None:
        self._asking = None
        if not answer.cancelled() and answer.exception() is None:
            self._model = answer.result()
