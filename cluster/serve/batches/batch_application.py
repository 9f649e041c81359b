"""The batch endpoints and the engines behind them."""

from __future__ import annotations

from typing import Any

import msgspec

from manta.cluster.batch.running.line_endpoints import Endpoints, sharer_of
from manta.cluster.config import ServeConfig
from manta.cluster.http.access.keys import ApiKeys
from manta.cluster.http.exchange.metrics import Metrics
from manta.cluster.serve.batches.batch_client import BatchEngineClient
from manta.cluster.text.tokenizer import Tokenizer
from manta.workers.checkpoints.model_folder import resolve_model_folder


def batch_endpoints(
    config: ServeConfig,
    engine: Any,
    host: str,
    standby: Any = None,
    priority_clients: tuple[str, ...] = (),
    prefix_secret: bytes | None = None,
) -> tuple[Endpoints, BatchEngineClient]:
    """Returns the endpoints and the client through which they reach the engines. The caller closes the client.

    `engine`, `host` and `standby` are passed to the client. `prefix_secret` is the one of the application whose engines
    these are; None draws a new one.
    """
    tokenizer = Tokenizer(config.engine.tokenizer or str(resolve_model_folder(config.engine.model)))
    metrics = Metrics(config.model_name)
    client = BatchEngineClient(engine, tokenizer, host, metrics, standby)
    keys, weights = ApiKeys(config.api_keys or ()), config.client_weights
    inside = msgspec.structs.replace(
        config,
        api_keys=None,  # the ingress checked the key when the batch was created
        client_weights={sharer_of(keys.owner_of(name)): weights[name] for name in keys.by_name.keys() & weights},
        priority_clients=priority_clients,
        batch_storage=None,
        request_timeout_s=max(config.request_timeout_s, config.batches.keep_s),  # a line may take as long as its batch
    )
    endpoints = Endpoints(inside, tokenizer, client, metrics, prefix_secret)
    return endpoints, client
