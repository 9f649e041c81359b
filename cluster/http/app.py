"""The HTTP endpoint as a plain ASGI application with OpenAI's API; it imports neither torch nor Ray.

It checks where a request comes from, finds its route, checks the key, decodes the body, calls the handler and sends the
result. Every failed request gets an answer in OpenAI's format. When a client leaves, the work for it ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from prometheus_client.metrics_core import Metric

from manta.cluster.config import ServeConfig
from manta.cluster.errors import ServingError
from manta.cluster.http.access.keys import ApiKeys
from manta.cluster.http.access.origins import Origins
from manta.cluster.http.access.prefix_scope import new_secret
from manta.cluster.http.access.rate_limits import RateLimits
from manta.cluster.http.endpoints import streams as stream_endpoints
from manta.cluster.http.endpoints.stored_responses import keep_ended
from manta.cluster.http.exchange.codec import Body, decode, encode
from manta.cluster.http.exchange.engines import Engines
from manta.cluster.http.exchange.exchange import BodyRoom, ClientGone, Exchange, Receive, Scope, Send
from manta.cluster.http.exchange.metrics import Metrics
from manta.cluster.http.exchange.preparation import Preparing
from manta.cluster.http.exchange.recording import make_resumable
from manta.cluster.http.exchange.recordings import Recording, Streams, last_event
from manta.cluster.http.exchange.routing import Route, Router
from manta.cluster.http.exchange.state import AppState, ClusterState, DeploymentState, NodeState, OtherMetrics
from manta.cluster.http.openapi import openapi_document
from manta.cluster.http.routes import MESSAGE, ROUTES
from manta.cluster.http.websockets import WebSockets
from manta.cluster.protocol.api_errors import ApiError, api_error
from manta.cluster.telemetry.request_log import open_request_log
from manta.cluster.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from manta.cluster.http.server_span import ServerSpans


async def no_other_metrics() -> list[list[Metric]]:
    """Returns no metrics, for the only replica of the endpoint."""
    return []


async def no_cluster() -> tuple[list[DeploymentState], list[NodeState]]:
    """Returns no deployments and no nodes, for an application that Serve does not run."""
    return [], []


class HttpApp:
    """The ASGI application.

    - `returns_request_id` says whether answers have an x-request-id; otherwise a proxy in front sets one.
    - `spans` makes a span for each POST request; None for no spans.
    - `streams` records streams that can be resumed; None records none.
    - `prefix_secret` must be the same for all applications with the same engines, or they share no cached prefixes.
      None draws one.
    """

    def __init__(
        self,
        config: ServeConfig,
        tokenizer: Tokenizer,
        engines: Engines,
        metrics: Metrics,
        *,
        other_metrics: OtherMetrics = no_other_metrics,
        cluster: ClusterState = no_cluster,
        routes: Iterable[Route] = ROUTES,
        returns_request_id: bool = True,
        spans: ServerSpans | None = None,
        prefix_secret: bytes | None = None,
        streams: Streams | None = None,
    ) -> None:
        routes = tuple(routes)
        self._config = config
        document = openapi_document(routes)
        secret = prefix_secret or new_secret()
        self._state = AppState(config, tokenizer, engines, metrics, other_metrics, cluster, document, secret)
        if streams is not None:
            self._state.streams = streams
            streams.on_end = self._on_stream_end
        self._state.routes = {route.path: route for route in routes if route.body is not None}
        self._router = Router(routes)
        self._room = BodyRoom(config.max_bodies_bytes)
        self._preparing = Preparing(config)
        self._origins = Origins(config)
        self._keys = ApiKeys(config.api_keys or ())
        self.rate_limits = RateLimits(config.key_limits)
        self._returns_request_id = returns_request_id
        self._spans = spans
        self._websockets = WebSockets(config, self._room, self._answer, self._answer_message)
        self._log = open_request_log() if config.log_requests else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request. Raises `asyncio.CancelledError` if the client left before its answer was complete."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "websocket":
            await self._websockets.serve(scope, receive, send, self._returns_request_id)
        elif scope["type"] == "http":
            exchange = Exchange(scope, receive, send, self._config, self._room, self._returns_request_id)
            await self._answer_traced(exchange)

    async def _answer_traced(self, exchange: Exchange, route: Route | None = None) -> None:
        if self._spans is None or exchange.method != "POST":
            await self._answer(exchange, route)
        else:
            with self._spans.span(exchange):
                await self._answer(exchange, route)

    async def _answer_message(self, exchange: Exchange) -> None:
        await self._answer_traced(exchange, MESSAGE)

    def _on_stream_end(self, recording: Recording) -> None:
        """Charges the output of a recorded stream to the key that asked for it, and stores a response that is kept."""
        client = recording.opening.generation.client
        use = self.rate_limits.of(client) if self._config.api_keys else None
        if use is not None:
            use.charge_output(recording.num_tokens)
        keep_ended(self._state, recording)

    def begin_drain(self) -> None:
        """Makes readiness probes fail from now on, and closes each connection after its answer."""
        self._state.drains = True

    async def _answer(self, exchange: Exchange, route: Route | None = None) -> None:
        """Answers one request, by `route` or by the one that its path and method name."""
        if self._state.drains:
            exchange.headers_always.append((b"connection", b"close"))
        try:
            exchange.headers_always += self._origins.headers(exchange.headers)
            self._origins.check(exchange.headers)
            if exchange.method == "OPTIONS":
                await exchange.send_empty(
                    self._origins.preflight(exchange.headers, self._router.methods(exchange.path, exchange.root_path))
                )
                return
            if route is None:
                route, exchange.path_parameter = self._router.find(exchange.method, exchange.path, exchange.root_path)
            exchange.route, exchange.error_body = route.path, route.error_body
            await self._handle(route, exchange)
        except (ApiError, ServingError) as error:
            await exchange.fail(api_error(error))
        except (asyncio.CancelledError, ClientGone):
            exchange.status = 499
            raise asyncio.CancelledError from None
        except Exception as error:
            logging.getLogger(__name__).exception("request %s failed", exchange.request_id)
            await exchange.fail(api_error(error))
        finally:
            logged = route.logged if route is not None else exchange.method == "POST"
            if self._log is not None and logged:
                self._log.info(exchange.log_line())

    async def _handle(self, route: Route, exchange: Exchange) -> None:
        if not route.public:
            self._check_key(exchange)
        if route.form is not None:  # its handler reads the body, with a bound and a deadline of its own
            answer = await route.handler(self._state, exchange, None)
        else:
            body = None if route.body is None else await self._body(route.body, exchange)
            resumed = last_event(exchange.headers) if route.body is not None else None
            async with self._preparing.one(is_counted=not route.public) as exchange.preparation:
                if resumed is not None:
                    await exchange.unless_gone(stream_endpoints.read_on(self._state, exchange, *resumed))
                    return
                answer = await exchange.unless_gone(route.handler(self._state, exchange, body))
        if answer is not None:
            await exchange.send_json(encode(answer))

    async def _body(self, kind: type[Body], exchange: Exchange) -> Any:
        """Returns the decoded body of type `kind`."""
        content = await exchange.body()
        make_resumable(exchange, content, self._config.streams.max_unread_s)
        return decode(kind, content, self._config.body)

    def _check_key(self, exchange: Exchange) -> None:
        if not self._config.api_keys:
            return
        scheme, _, given = exchange.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = exchange.headers.get("x-api-key", "")  # where Anthropic's clients put it
        name = self._keys.name_of(given) if given else None
        if name is None:
            raise ApiError(401, "a valid API key is required: Authorization: Bearer KEY", code="invalid_api_key")
        exchange.client, exchange.owner = name, self._keys.owner_of(name)
        exchange.use = self.rate_limits.of(name)
        self._state.metrics.request_of(name)


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
