"""The endpoints as batches call them: the handlers of HTTP requests, without HTTP.

A line means the same as its body does at its URL, because the same functions decode it, turn it into prompts and write
its answer. They run without an HTTP exchange, which costs more than they do because it provides for slow and leaving
clients.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET

from manta.cluster.batch.batch_client import BatchEngineClient
from manta.cluster.batch.lines import BatchRequest, BatchResponse
from manta.cluster.config import ServeConfig
from manta.cluster.errors import ServingError
from manta.cluster.http.access.keys import ApiKeys
from manta.cluster.http.access.prefix_scope import new_secret
from manta.cluster.http.access.request_admission import Caller, decode
from manta.cluster.http.endpoints import generation
from manta.cluster.http.exchange.engines import Engines
from manta.cluster.http.exchange.exchange import GenerationExchange
from manta.cluster.http.exchange.metrics import Metrics
from manta.cluster.http.exchange.reply import WholeReply
from manta.cluster.http.exchange.state import AppState
from manta.cluster.protocol.error_bodies import answer_of, openai_body, refusal_of
from manta.cluster.protocol.foreign_fields import collect_ignored
from manta.cluster.protocol.requests import ChatCompletionRequest, CompletionRequest
from manta.cluster.text.tokenizer import Tokenizer
from manta.structured.refusals import Refusal
from manta.structured.visible_logs import logger_of
from manta.workers.checkpoints.model_folder import resolve_model_folder


def sharer_of(owner: str) -> str:
    """Returns the name under which the batches of an owner take turns with other clients."""
    return f"batches of {owner}"


class Endpoints:
    """The endpoints that `manta.cluster.protocol.batches_api.URLS` names."""

    def __init__(
        self,
        config: ServeConfig,
        tokenizer: Tokenizer,
        engines: Engines,
        metrics: Metrics,
        prefix_secret: bytes | None = None,
    ) -> None:
        self.state = AppState(config, tokenizer, engines, metrics, prefix_secret or new_secret())

    async def answer(self, request: BatchRequest, request_id: str, owner: str = "") -> BatchResponse:
        """Returns the whole answer, which may be an error. `owner` is the batch's; it is empty for a command's batch.

        If the call is cancelled, the engines abort the line.
        """
        sharer = sharer_of(owner) if owner else ""
        timeout_s, reply = self.state.config.request_timeout_s, WholeReply()
        caller = Caller(sharer, owner=owner)
        exchange = GenerationExchange(request_id, {}, caller, self.state.engines, reply, timeout_s)
        ignored = collect_ignored(self.state.config.unknown_fields == "refuse")
        try:
            await self._handle(request, exchange)
        except ServingError as error:
            return _failed(request_id, error.refusal)
        except Exception as error:
            logger_of(__name__).exception("line %s failed", request_id)
            return _failed(request_id, refusal_of(error))
        return BatchResponse(200, request_id, msgspec.Raw(reply.answer), ignored or UNSET)

    async def _handle(self, request: BatchRequest, exchange: GenerationExchange) -> None:
        body, limits = bytes(request.body), self.state.config.body
        if request.url == "/v1/completions":
            await generation.completions(self.state, exchange, decode(CompletionRequest, body, limits))
        else:
            await generation.chat(self.state, exchange, decode(ChatCompletionRequest, body, limits))


def _failed(request_id: str, refusal: Refusal) -> BatchResponse:
    return BatchResponse(answer_of(refusal).status, request_id, msgspec.Raw(openai_body(refusal)))


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
