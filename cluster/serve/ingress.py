"""The HTTP endpoint: an ASGI application in a Serve deployment that speaks OpenAI's API and imports no torch.

It decodes and validates, applies the chat template, tokenises, and writes what `cluster/serve/submission.py` brings
back, whole or as server-sent events. Whatever a client sends, it gets an answer in OpenAI's shape, and leaving early
aborts what it asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import hmac
import json
import logging
import pathlib
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import ray
from prometheus_client.metrics_core import Metric
from ray import serve

from cluster.config import ServeConfig
from cluster.engine.stats import EngineStats
from cluster.http import answers, protocol
from cluster.http.body_limits import check_counts
from cluster.http.chat_output import plan_chat
from cluster.http.errors import ApiError
from cluster.http.exchange import ClientGone, Exchange, Receive, Scope, Send
from cluster.http.metrics import Metrics
from cluster.http.openapi import openapi_document
from cluster.http.tools import template_tools
from cluster.serve.listener import Listener
from cluster.serve.start_failure import told_in_words
from cluster.serve.submission import EngineClient, Submission
from cluster.text.tokenizer import LONG_TEXT, TemplateError, TextError, Tokenizer
from workers.model_config import resolve_model_folder
from workers.model_info import ModelInfo
from workers.sampling_params import SamplingParams

HEALTH_TIMEOUT_S = 10.0
OPEN_PATHS = ("/health", "/metrics", "/openapi.json")
"""Answered without an API key: probes and scrapers have none."""


class Ingress:
    """One replica of the endpoint. `engine` is the handle of the engine deployment."""

    returns_request_id = False
    """Serve's proxy gives every request an x-request-id where the client sent none, and returns it."""

    def __init__(self, config: ServeConfig, engine: Any) -> None:
        with told_in_words():
            self._start(config, engine)

    def _start(self, config: ServeConfig, engine: Any) -> None:
        self._config = config
        self._engine = engine
        self._model_name = served_model_name(config)
        folder = config.engine.tokenizer or str(resolve_model_folder(config.engine.model))
        self._tokenizer = Tokenizer(folder)
        self._metrics = Metrics(self._model_name, _replica_id() if config.num_ingress_replicas > 1 else None)
        self._metrics.show_options(config)
        self._client = EngineClient(engine, self._tokenizer, ray.util.get_node_ip_address(), self._metrics)
        self._model: ModelInfo | None = None
        self._created = int(time.time())
        self._log = _request_logger() if config.log_requests else None
        self._routes: dict[str, dict[str, Callable[..., Awaitable[None]]]] = {
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/completions": {"POST": self._completions},
            "/v1/models": {"GET": self._models},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/health": {"GET": self._health},
            "/metrics": {"GET": self._render_metrics},
            "/openapi.json": {"GET": self._openapi},
        }
        gc.freeze()  # what stays for life need not be looked through again, while streams wait

    async def check_health(self) -> None:
        """Called by Serve, the first time before the replica counts as ready; Serve replaces one that raises here."""
        with told_in_words():
            await self._client.listen()

    def __serve_build_asgi_app__(self) -> Any:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:  # uvicorn takes a bound method for ASGI 2
            await self._asgi(scope, receive, send)

        return app

    # ---- ASGI ----------------------------------------------------------------------------------------------------

    async def _asgi(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            await self._answer(Exchange(scope, receive, send, self._config, self.returns_request_id))

    async def _answer(self, exchange: Exchange) -> None:
        try:
            await self._route(exchange)
        except ApiError as error:
            await exchange.fail(error)
        except (asyncio.CancelledError, ClientGone):
            exchange.status = 499
            raise asyncio.CancelledError from None
        except Exception as error:
            logging.getLogger(__name__).exception("request %s failed", exchange.request_id)
            await exchange.fail(ApiError(500, f"internal error: {type(error).__name__}"))
        finally:
            if self._log is not None and exchange.path.startswith("/v1/") and exchange.method == "POST":
                self._log.info(exchange.log_line())

    async def _route(self, exchange: Exchange) -> None:
        methods = self._routes.get(exchange.path)
        if methods is None and exchange.path.startswith("/v1/models/"):
            methods = {"GET": self._one_model}
        if methods is None:
            raise ApiError(404, f"there is nothing at {exchange.path}; see /openapi.json", code="unknown_url")
        handler = methods.get(exchange.method)
        if handler is None:
            allowed = ", ".join(methods)
            raise ApiError(405, f"{exchange.path} takes {allowed}, not {exchange.method}", code="method_not_allowed")
        if exchange.path not in OPEN_PATHS:
            self._check_key(exchange)
        await handler(exchange)

    def _check_key(self, exchange: Exchange) -> None:
        if not self._config.api_keys:
            return
        scheme, _, given = exchange.headers.get("authorization", "").partition(" ")
        known = [hmac.compare_digest(given.encode(), key.encode()) for key in self._config.api_keys]
        if scheme.lower() != "bearer" or not any(known):
            raise ApiError(401, "a valid API key is required: Authorization: Bearer KEY", code="invalid_api_key")

    # ---- generation ----------------------------------------------------------------------------------------------

    async def _chat(self, exchange: Exchange) -> None:
        request = protocol.decode_chat(await exchange.body())
        self._check_model(request.model)
        check_counts(self._config, 1, request.num_choices)
        params = self._resolved(request)
        plan = plan_chat(
            request, params, self._tokenizer, self._render(request, template_tools(request.callable_tools()))
        )
        prompt = await self._encode(plan.prompt, add_special_tokens=False)
        answer = answers.ChatAnswer(request, self._new_id("chatcmpl"), self._model_name, self._tokenizer, plan)
        await self._generate(exchange, [prompt], plan.params, request, answer, plan.shown_ids)

    async def _completions(self, exchange: Exchange) -> None:
        request = protocol.decode_completion(await exchange.body())
        self._check_model(request.model)
        given = request.prompts()
        check_counts(self._config, len(given), request.num_choices)
        params = self._resolved(request)
        prompts = await self._encode_all(given, request.add_special_tokens)
        answer = answers.CompletionAnswer(
            request, self._new_id("cmpl"), self._model_name, self._tokenizer, given, prompts
        )
        await self._generate(exchange, prompts, params, request, answer)

    async def _generate(
        self,
        exchange: Exchange,
        prompts: list[list[int]],
        params: SamplingParams,
        request: Any,
        answer: answers.Answer,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        try:
            params = await self._enforceable(exchange, params)
            chat = isinstance(answer, answers.ChatAnswer)
            submission = Submission(self._client, prompts, params, chat, shown_ids)
            name = f"{exchange.request_id}-{secrets.token_hex(4)}"
            submission.start(name, request.priority, self._config.request_timeout_s)
            try:
                if request.stream:
                    await exchange.stream(answer.stream(submission), submission)
                else:
                    await exchange.send_json(await exchange.unless_gone(answer.whole(submission)))
            finally:
                submission.close()
                exchange.note(submission)
        except ApiError as error:
            if error.param is None:
                raise
            field, error = await self._field_at_fault(request, error)
            if field == error.param:
                raise
            message = error.message.removeprefix(error.param or "")
            message = f"{field}{message}" if message != error.message else f"{field}: {message}"
            raise ApiError(error.status, message, param=field, code=error.code) from error

    async def _field_at_fault(self, request: Any, error: ApiError) -> tuple[str, ApiError]:
        """The body's field that a refusal is about; of several tools the one whose schema alone is refused too."""
        assert error.param is not None
        for field, spec in request.tool_constraints() if error.param == "constraint" else []:
            try:
                await self._client.resolve(spec)
            except ApiError as of_tool:
                return field, of_tool
        return request.field_of(error.param), error

    async def _enforceable(self, exchange: Exchange, params: SamplingParams) -> SamplingParams:
        """`params` with a loose constraint resolved; the answer's header says what is not enforced."""
        if params.constraint is None or not params.constraint.loose:
            return params
        spec, not_enforced = await self._client.resolve(params.constraint)
        if not_enforced:
            exchange.headers_out.append((b"x-manta-not-enforced", _header_value(not_enforced)))
        return msgspec.structs.replace(params, constraint=spec)

    def _render(
        self,
        request: protocol.ChatCompletionRequest | protocol.TokenizeRequest,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """The body's conversation as the model reads it."""
        try:
            return self._tokenizer.render_chat_template(
                request.template_messages(), request.add_generation_prompt, tools or None, **request.template_kwargs()
            )
        except TemplateError as error:
            raise ApiError(400, f"messages: {error}", param="messages") from error

    async def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        (token_ids,) = await self._encode_all([text], add_special_tokens)
        return token_ids

    async def _encode_all(self, prompts: Sequence[str | list[int]], add_special_tokens: bool) -> list[list[int]]:
        def encode() -> list[list[int]]:
            return [
                self._tokenizer.encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
                for prompt in prompts
            ]

        try:
            if sum(len(prompt) for prompt in prompts if isinstance(prompt, str)) < LONG_TEXT:
                return encode()
            return await asyncio.to_thread(encode)
        except TextError as error:  # JSON is Unicode, but the JSON inside a call's arguments may escape what is not
            raise ApiError(400, f"messages: {error}", param="messages") from error

    def _resolved(self, request: protocol.ChatCompletionRequest | protocol.CompletionRequest) -> SamplingParams:
        params = request.sampling_params()
        registered = self._config.engine.logits_processors
        for index, spec in enumerate(params.logits_processors):
            if spec.name not in registered:
                field = f"logits_processors[{index}].name"
                known = f"use one of: {', '.join(registered)}" if registered else "this server has none"
                raise ApiError(400, f"{field}: {spec.name!r} is not registered here; {known}", param=field)
        return self._tokenizer.resolve_bad_words(params)

    def _check_model(self, name: str) -> None:
        if name != self._model_name:
            raise ApiError(
                404,
                f"model {name!r} is not served here; {self._model_name!r} is",
                param="model",
                code="model_not_found",
            )

    def _new_id(self, prefix: str) -> str:
        return f"{prefix}-{secrets.token_hex(12)}"

    # ---- everything else -----------------------------------------------------------------------------------------

    async def _model_info(self) -> ModelInfo:
        if self._model is None:
            self._model = await self._engine.model.remote()
        return self._model

    async def _card(self) -> protocol.ModelCard:
        info = await self._model_info()
        return protocol.ModelCard(id=self._model_name, created=self._created, max_model_len=info.max_model_len)

    async def _models(self, exchange: Exchange) -> None:
        await exchange.send_json(protocol.encode(protocol.ModelList([await self._card()])))

    async def _one_model(self, exchange: Exchange) -> None:
        self._check_model(exchange.path.removeprefix("/v1/models/"))
        await exchange.send_json(protocol.encode(await self._card()))

    async def _tokenize(self, exchange: Exchange) -> None:
        request = protocol.decode_tokenize(await exchange.body())
        self._check_model(request.model or self._model_name)
        if request.messages is not None:
            tokens = await self._encode(self._render(request), add_special_tokens=False)
        else:
            tokens = await self._encode(request.prompt or "", request.add_special_tokens)
        texts = [self._tokenizer.token_text(token) for token in tokens] if request.return_token_strs else None
        info = await self._model_info()
        await exchange.send_json(
            protocol.encode(protocol.TokenizeResponse(len(tokens), info.max_model_len, tokens, texts))
        )

    async def _detokenize(self, exchange: Exchange) -> None:
        request = protocol.decode_detokenize(await exchange.body())
        self._check_model(request.model or self._model_name)
        info = await self._model_info()
        for token in request.tokens:
            if not 0 <= token < info.vocab_size:
                raise ApiError(
                    400, f"tokens: token id {token} is outside the vocabulary [0, {info.vocab_size})", param="tokens"
                )
        text = self._tokenizer.decode(request.tokens, skip_special_tokens=request.skip_special_tokens)
        await exchange.send_json(protocol.encode(protocol.DetokenizeResponse(text)))

    async def _stats(self) -> list[EngineStats]:
        """Of every engine replica that answers. Raises `ApiError` 503 where none does."""
        answers = self._engine.broadcast("stats")
        try:
            found = await answers.results_async(timeout_s=HEALTH_TIMEOUT_S, return_exceptions=True)
        except Exception as error:
            found = [error]
        stats = [each for each in found if isinstance(each, EngineStats)]
        if not stats:
            reasons = sorted({type(error).__name__ for error in found})
            raise ApiError(503, f"no engine answers: {', '.join(reasons) or 'there is none'}")
        return stats

    async def _health(self, exchange: Exchange) -> None:
        """Healthy while one engine is, and can send tokens here: Serve replaces those that say that they are not."""
        await self._client.listen()
        await exchange.send_json(health(await self._stats(), self._config.health_bound_s))

    async def own_metrics(self) -> tuple[str | None, list[Metric]]:
        """What this ingress counted, and its name; called by the one that is asked."""
        return self._metrics.replica, self._metrics.own()

    async def _others(self) -> list[list[Metric]]:
        """What the other ingresses counted, of those that answer."""
        if self._metrics.replica is None:
            return []
        try:
            answers = self._peers.broadcast("own_metrics")
            found = await answers.results_async(timeout_s=HEALTH_TIMEOUT_S, return_exceptions=True)
        except Exception as error:
            logging.getLogger(__name__).warning("metrics of this ingress only: %s", type(error).__name__)
            return []
        return [each[1] for each in found if isinstance(each, tuple) and each[0] != self._metrics.replica]

    @functools.cached_property
    def _peers(self) -> Any:
        context = serve.get_replica_context()
        return serve.get_deployment_handle(context.deployment, context.app_name)

    async def _render_metrics(self, exchange: Exchange) -> None:
        text = self._metrics.render(await self._stats(), await self._others())
        await exchange.send_body(text, "text/plain; version=0.0.4; charset=utf-8")

    async def _openapi(self, exchange: Exchange) -> None:
        await exchange.send_json(json.dumps(openapi_document(OPEN_PATHS)).encode())


def health(engines: list[EngineStats], bound_s: float) -> bytes:
    """The body of a good answer. Raises `ApiError` 503 where no engine is healthy: Serve replaces those that say so.

    An engine that cannot compile constraints serves everything else, and tries again by itself: it stays in service, as
    "degraded".
    """
    alive = [stats for stats in engines if stats.alive]
    if not alive:
        raise ApiError(503, "every engine has failed, and is being replaced")
    seconds = min(stats.seconds_since_progress for stats in alive)
    if seconds > bound_s:
        raise ApiError(503, f"no request went on for {seconds:.0f} s; the bound is {bound_s:.0f} s")
    if all(stats.constraints.can_compile for stats in alive):
        return b'{"status":"ok"}'
    reason = "no grammar compiler starts, so requests with a constraint fail; the log says why"
    return msgspec.json.encode({"status": "degraded", "reason": reason})


class ListeningIngress(Ingress):
    """Takes the connections itself: Serve calls it ready when it listens, and replaces it when it no longer does."""

    returns_request_id = True

    def __init__(self, config: ServeConfig, engine: Any) -> None:
        super().__init__(config, engine)
        self._listener = Listener(self._asgi_quietly, config.host, config.port, config.client_timeout_s)

    async def check_health(self) -> None:
        await super().check_health()
        with told_in_words():
            await self._listener.ensure_listening()

    async def _asgi_quietly(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # a client that left is something for Serve's counts only
            await self._asgi(scope, receive, send)


def served_model_name(config: ServeConfig) -> str:
    """The model's name in the API: the configured one, else the last part of its folder or hub id."""
    return config.served_model_name or pathlib.PurePath(config.engine.model).name


def _replica_id() -> str:
    return serve.get_replica_context().replica_id.unique_id


def _header_value(names: list[str]) -> bytes:
    """A list as a header may carry it: ASCII, without line breaks."""
    return ", ".join(name.encode("ascii", "backslashreplace").decode() for name in names).replace("\n", " ").encode()


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def _request_logger() -> logging.Logger:
    """One JSON object a line on stdout, which Ray keeps with the replica's logs."""
    logger = logging.getLogger("manta.requests")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger


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
