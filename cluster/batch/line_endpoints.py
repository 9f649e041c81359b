"""The endpoints as batches call them: the handlers of HTTP requests, without HTTP.

A line means the same as its body does at its URL, because the same functions decode it, turn it into prompts and write
its answer. They run without an HTTP exchange, which costs more than they do because it provides for slow and leaving
clients.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import UNSET

from manta.cluster.batch.batch_client import BatchEngineClient
from manta.cluster.batch.line_places import LinePlaces
from manta.cluster.batch.lines import BatchRequest, BatchResponse
from manta.cluster.config import ServeConfig
from manta.cluster.errors import ServingError
from manta.cluster.http.access.keys import ApiKeys
from manta.cluster.http.access.prefix_scope import new_secret
from manta.cluster.http.access.rate_limits import KeyUse, RateLimits, Reservation
from manta.cluster.http.access.request_admission import Caller, decode
from manta.cluster.http.endpoints import embeddings, generation
from manta.cluster.http.exchange.all_engines import AllEngines
from manta.cluster.http.exchange.engines import Engines
from manta.cluster.http.exchange.exchange import GenerationExchange
from manta.cluster.http.exchange.metrics import Metrics
from manta.cluster.http.exchange.reply import WholeReply
from manta.cluster.http.exchange.state import AppState, Models, ServerState
from manta.cluster.protocol.error_bodies import RETRIED_STATUSES, answer_of, openai_body, refusal_of
from manta.cluster.protocol.foreign_fields import collect_ignored
from manta.cluster.protocol.pooling_api import EmbeddingRequest
from manta.cluster.protocol.requests import ChatCompletionRequest, CompletionRequest
from manta.cluster.text.tokenizer import Tokenizer
from manta.structured.refusals import Refusal
from manta.structured.visible_logs import logger_of
from manta.workers.checkpoints.model_folder import resolve_model_folder

MAX_PAUSE_S = 1.0
"""Most seconds between two looks at the rate limits, which other processes charge too."""
CHARGE_TIMEOUT_S = 5.0
"""Seconds for which a line waits until the one before it is charged, which may have been cancelled before that."""


class RateLimited(Exception):
    """The rate limits of a line's key leave no room for it until `wait_s` seconds have passed."""

    def __init__(self, wait_s: float) -> None:
        super().__init__(wait_s)
        self.wait_s = wait_s


def sharer_of(owner: str) -> str:
    """Returns the name under which the batches of an owner take turns with other clients."""
    return f"batches of {owner}"


class LineCaller(Caller):
    """The owner of a batch, as the client of one line. `use` is charged as by any request."""

    def __init__(
        self, owner: str, use: KeyUse | None, is_charged: asyncio.Event, models: tuple[str, ...] | None = None
    ) -> None:
        """Sets `is_charged` when the line is charged."""
        super().__init__(sharer_of(owner) if owner else "", owner=owner, use=use, models=models)
        self._is_charged = is_charged
        self.num_admitted_tokens: int | None = None
        """Tokens of the line's prompt that were charged; None before that."""

    def admit(
        self, num_prompt_tokens: int, max_output_tokens: int, headers: list[tuple[bytes, bytes]]
    ) -> Reservation | None:
        reservation = super().admit(num_prompt_tokens, max_output_tokens, headers)
        self.num_admitted_tokens = num_prompt_tokens
        self._is_charged.set()
        return reservation

    def give_back(self) -> None:
        """Undoes what was charged for a line that is tried again."""
        if self.use is not None and self.num_admitted_tokens is not None:
            self.use.give_back(self.num_admitted_tokens)


class Endpoints:
    """The endpoints that `manta.cluster.protocol.batches_api.URLS` names."""

    def __init__(
        self,
        config: ServeConfig,
        tokenizer: Tokenizer | None,
        engines: Engines,
        metrics: Metrics,
        prefix_secret: bytes | None = None,
        key_names: Mapping[str, str] = MappingProxyType({}),
        limits: RateLimits | None = None,
        models: Models | None = None,
    ) -> None:
        """Takes the name of the API key of each owner, by which `limits` bounds their lines. `models` is the table of a
        server of several models, to which `add_model` adds them; `tokenizer` is then None.
        """
        server = ServerState(config, prefix_secret or new_secret(), models)
        self.state = AppState(config, tokenizer, engines, metrics, server)
        self.limits = limits or RateLimits(config.key_limits)
        """Rate limits of the keys, which the ingresses share."""
        self._key_names = key_names
        self._begun: dict[str, asyncio.Event] = {}
        """Whether the latest line of an owner with limits is charged."""
        self._places: dict[str, LinePlaces] = {}
        """Places of the lines of each of several models, by its name."""

    @property
    def num_places(self) -> int:
        """Lines that may be answered at a time: half of what the engines of all models run, and at least 1."""
        return sum(num_places_of(each.config) for each in self.state.models) or 1

    def add_model(
        self, config: ServeConfig, tokenizer: Tokenizer | None, engines: Engines, metrics: Metrics
    ) -> AppState:
        """Adds one of several models, or replaces the one of its name."""
        state, name = self.state.of_model(config, tokenizer, engines, metrics), config.model_name
        self.state.models.put(state)
        self._places.setdefault(name, LinePlaces(lambda: self._num_places_of(name)))
        return state

    def remove_model(self, name: str) -> None:
        """Removes one of several models. Lines under way go on."""
        self.state.models.remove(name)
        self._places.pop(name, None)

    def let_leave(self, names: Collection[str]) -> None:
        """Makes the models of these names, and no others, take no new lines. Lines under way go on."""
        self.state.models.let_leave(names)

    def _num_places_of(self, name: str) -> int:
        """Returns the places of a model's lines; 1 for a model that is gone, whose last lines find that out."""
        return next((num_places_of(each.config) for each in self.state.models if each.model_name == name), 1)

    async def pace(self, owner: str) -> None:
        """Waits until the owner's line before this one is charged, and then until the rate limits of the owner's key
        leave room for another line.
        """
        use = self._use_of(owner)
        if use is None:
            return
        if owner in self._begun:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHARGE_TIMEOUT_S):
                    await self._begun[owner].wait()
        while (wait_s := use.seconds_until_room()) > 0:
            await asyncio.sleep(min(wait_s, MAX_PAUSE_S))
        self._begun[owner] = asyncio.Event()

    def _use_of(self, owner: str) -> KeyUse | None:
        name = self._key_names.get(owner)
        return None if name is None else self.limits.of(name)

    async def answer(self, request: BatchRequest, request_id: str, owner: str = "") -> BatchResponse:
        """Returns the whole answer, which may be an error. `owner` is the batch's; it is empty for a command's batch. A
        line for which its key's rate limits leave no room waits.

        If the call is cancelled, the engines abort the line.
        """
        while True:
            try:
                return await self._answered(request, request_id, owner)
            except RateLimited as error:
                await asyncio.sleep(min(error.wait_s, MAX_PAUSE_S))

    async def _answered(self, request: BatchRequest, request_id: str, owner: str) -> BatchResponse:
        timeout_s, reply = self.state.config.request_timeout_s, WholeReply()
        is_charged = self._begun.get(owner) or asyncio.Event()
        name = self._key_names.get(owner)
        models = None if name is None else self.limits.models_of(name)
        caller = LineCaller(owner, self._use_of(owner), is_charged, models)
        exchange = GenerationExchange(request_id, {}, caller, self.state.engines, reply, timeout_s)
        ignored = collect_ignored(self.state.config.unknown_fields == "refuse")
        try:
            await self._handle(request, exchange)
        except ServingError as error:
            if error.refusal.kind == "rate_limit":
                raise RateLimited(error.refusal.retry_after_s or 0.0) from error
            response = _failed(request_id, error.refusal)
            if response.status_code in RETRIED_STATUSES:
                caller.give_back()
            return response
        except Exception as error:
            logger_of(__name__).exception("line %s failed", request_id)
            return _failed(request_id, refusal_of(error))
        finally:
            is_charged.set()
        not_enforced = list(reply.not_enforced) or UNSET
        return BatchResponse(200, request_id, msgspec.Raw(reply.answer), ignored or UNSET, not_enforced)

    async def _handle(self, request: BatchRequest, exchange: GenerationExchange) -> None:
        body, limits = bytes(request.body), self.state.config.body
        if request.url == "/v1/completions":
            completion = decode(CompletionRequest, body, limits)
            async with self._model_for(completion, exchange) as state:
                await generation.completions(state, exchange, completion)
        elif request.url == "/v1/embeddings":
            texts = decode(EmbeddingRequest, body, limits)
            async with self._model_for(texts, exchange) as state:
                await embeddings.create(state, exchange, texts)
        else:
            chat = decode(ChatCompletionRequest, body, limits)
            async with self._model_for(chat, exchange) as state:
                await generation.chat(state, exchange, chat)

    @contextlib.asynccontextmanager
    async def _model_for(self, body: Any, exchange: GenerationExchange) -> AsyncIterator[AppState]:
        """Yields the state of the model that a line names, once it is loaded and has a place for the line."""
        async with self.state.for_body(body, exchange) as state:
            places = self._places.get(state.model_name)
            if places is None:
                yield state
                return
            await places.acquire()
            try:
                yield state
            finally:
                places.release()


def num_places_of(config: ServeConfig) -> int:
    """Returns the lines that may be answered by a model at a time: half of what its engines run, and at least 1."""
    return max(1, config.max_engines * config.engine.max_num_sequences // 2)


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
    inside, key_names = _inside(config, priority_clients)
    return Endpoints(inside, tokenizer, client, metrics, prefix_secret, key_names), client


def endpoints_of_models(config: ServeConfig, prefix_secret: bytes) -> Endpoints:
    """Returns the endpoints of a server of several models, without any model."""
    models = Models(config.default_model)
    inside, key_names = _inside(config)
    return Endpoints(inside, None, AllEngines(models), Metrics(""), prefix_secret, key_names, models=models)


def _inside(config: ServeConfig, priority_clients: tuple[str, ...] = ()) -> tuple[ServeConfig, dict[str, str]]:
    """Returns the configuration under which lines are answered, and the name of the API key of each owner."""
    keys, weights = ApiKeys(config.api_keys or ()), config.client_weights
    inside = msgspec.structs.replace(
        config,
        api_keys=None,  # the ingress checked the key when the batch was created
        client_weights={sharer_of(keys.owner_of(name)): weights[name] for name in keys.by_name.keys() & weights},
        priority_clients=priority_clients,
        batch_storage=None,
        request_timeout_s=max(config.request_timeout_s, config.batches.keep_s),  # a line may take as long as its batch
    )
    return inside, {keys.owner_of(name): name for name in keys.by_name}
