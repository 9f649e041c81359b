"""The HTTP endpoint as a plain ASGI application with OpenAI's API; it imports neither torch nor Ray.

It checks where a request comes from, finds its route, checks the key, decodes the body, calls the handler and sends the
result. Every failed request gets an answer in OpenAI's format. When a client leaves, the work for it ends.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from prometheus_client.metrics_core import Metric

from manta.cluster.config import ServeConfig
from manta.cluster.errors import ServingError, refuse
from manta.cluster.http.access.prefix_scope import new_secret
from manta.cluster.http.access.request_admission import decode
from manta.cluster.http.endpoints import streams as stream_endpoints
from manta.cluster.http.endpoints.stored_responses import keep_ended
from manta.cluster.http.exchange.apart import is_small
from manta.cluster.http.exchange.codec import encode
from manta.cluster.http.exchange.engines import UNMETERED, Engines, Meter
from manta.cluster.http.exchange.exchange import Exchange
from manta.cluster.http.exchange.incoming import ClientGone, Receive, Scope
from manta.cluster.http.exchange.loaded_adapters import LoadedAdapters
from manta.cluster.http.exchange.metrics import Metrics
from manta.cluster.http.exchange.recorded_engines import RESUMABLE, make_resumable
from manta.cluster.http.exchange.recordings import Opening, Streams, last_event
from manta.cluster.http.exchange.reply import Send
from manta.cluster.http.exchange.state import (
    AppState,
    ClusterState,
    Models,
    OtherMetrics,
    Route,
    ServerState,
    no_cluster,
    no_other_metrics,
)
from manta.cluster.http.openapi import openapi_document
from manta.cluster.http.routes import MESSAGE, ROUTES
from manta.cluster.http.websockets import WebSockets
from manta.cluster.protocol.error_bodies import Writer, openai_body, refusal_of
from manta.cluster.protocol.foreign_fields import collect_ignored
from manta.cluster.telemetry.request_log import Examples, open_request_log
from manta.cluster.text.tokenizer import Tokenizer
from manta.structured.client_shares import ClientShares
from manta.structured.visible_logs import logger_of

if TYPE_CHECKING:
    from manta.cluster.http.server_span import ServerSpans


UNKNOWN_FIELDS = "x-manta-unknown-fields"
"""Header that asks for a refusal of a body's unknown fields."""


MAX_COMPARED = 100
"""Most characters of an unknown path that are compared with those served."""


class Router:
    """Finds the route of a request by its path and method."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._exact: dict[str, dict[str, Route]] = {}
        self._with_parameter: dict[tuple[str, str], dict[str, Route]] = {}
        """Routes by the text before and after the parameter, longest text after it first."""
        routes = tuple(routes)
        self._served = [(route.method, route.path) for route in routes]
        for route in routes:
            if route.parameter is None:
                for path in filter(None, (route.path, route.alias)):
                    self._exact.setdefault(path, {})[route.method] = route
            else:
                prefix, _, rest = route.path.partition("{")
                self._with_parameter.setdefault((prefix, rest.partition("}")[2]), {})[route.method] = route
        self._with_parameter = dict(sorted(self._with_parameter.items(), key=lambda each: -len(each[0][1])))

    def find(self, method: str, path: str, root_path: str = "") -> tuple[Route, str]:
        """Returns the route of `path` and the value of its parameter. HEAD is GET without a body in the answer.

        Refuses with 404 or 405 if there is none. The refusal has paths as clients know them, below `root_path`.
        """
        methods, value = self._methods(path, root_path)
        wanted = "GET" if method == "HEAD" else method
        if wanted not in methods:
            allowed = ", ".join(self.methods(path, root_path))
            refuse("wrong_method", "", method, allowed, place=f"{root_path}{path}")
        return methods[wanted], value

    def methods(self, path: str, root_path: str = "") -> list[str]:
        """Returns the methods that a path takes. Raises `ServingError` 404 if there is no such path."""
        methods, _ = self._methods(path, root_path)
        return [*methods, *(["HEAD"] if "GET" in methods else []), "OPTIONS"]

    def error_body(self, path: str) -> Writer:
        """Returns what writes the refusals of a path, in the shape of its API."""
        methods = self._exact.get(path) or self._find_with_parameter(path)[0]
        return next((route.error_body for route in methods.values()), openai_body)

    def _methods(self, path: str, root_path: str) -> tuple[dict[str, Route], str]:
        methods, value = self._exact.get(path), ""
        if methods is None:
            methods, value = self._find_with_parameter(path)
        if not methods:
            served = tuple(f"{method} {root_path}{each}" for method, each in self._served)
            near = difflib.get_close_matches(path[:MAX_COMPARED], [each for _, each in self._served], n=1)
            remedy = f"did you mean {root_path}{near[0]}?" if near else ""
            refuse("unknown_url", bound=served, remedy=remedy, place=f"{root_path}{path}")
        return methods, value

    def _find_with_parameter(self, path: str) -> tuple[dict[str, Route], str]:
        for (prefix, suffix), methods in self._with_parameter.items():
            value = path.removeprefix(prefix).removesuffix(suffix)
            if value and path == f"{prefix}{value}{suffix}":
                return methods, value
        return {}, ""


class HttpApp:
    """The ASGI application.

    - `models` is the table of an address of several models, to which `add_model` adds them. `tokenizer` is then None,
      and `engines` are those of all models. None is for the only model of an address.
    - `returns_request_id` says whether answers have an x-request-id; otherwise a proxy in front sets one.
    - `spans` makes a span for each POST request; None for no spans.
    - `streams` records streams that can be resumed; None records none.
    - `prefix_secret` must be the same for all applications with the same engines, or they share no cached prefixes.
      None draws one.
    """

    def __init__(
        self,
        config: ServeConfig,
        tokenizer: Tokenizer | None,
        engines: Engines,
        metrics: Metrics,
        *,
        models: Models | None = None,
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
        server = ServerState(config, secret, models, other_metrics, cluster, document)
        self._state = AppState(config, tokenizer, engines, metrics, server)
        if streams is not None:
            server.streams = streams
            streams.meter_of = self._meter_of
            streams.on_end = functools.partial(keep_ended, self._state)
            streams.is_deleted = self._is_deleted
        server.routes = {route.path: route for route in routes if route.body is not None}
        self._router = Router(routes)
        self._room = ClientShares(config.max_bodies_bytes)
        self.admission = self._state.admission
        self._returns_request_id = returns_request_id
        self._spans = spans
        self._websockets = WebSockets(config, self._room, self._exchange, self._answer, self._answer_message)
        self._logs_requests = config.log_requests
        self._unrouted = Examples()
        if config.log_requests:
            open_request_log()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request. Raises `asyncio.CancelledError` if the client left before its answer was complete."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "websocket":
            await self._websockets.serve(scope, receive, send, self._returns_request_id)
        elif scope["type"] == "http":
            await self._answer_traced(self._exchange(scope, receive, send, self._returns_request_id))

    def _exchange(self, scope: Scope, receive: Receive, send: Send, returns_id: bool) -> Exchange:
        return Exchange(scope, receive, send, self._config, self._room, self._state.engines, returns_id)

    async def _answer_traced(self, exchange: Exchange, route: Route | None = None) -> None:
        if self._spans is None or exchange.incoming.method != "POST":
            await self._answer(exchange, route)
        else:
            with self._spans.span(exchange):
                await self._answer(exchange, route)

    async def _answer_message(self, exchange: Exchange) -> None:
        await self._answer_traced(exchange, MESSAGE)

    def _meter_of(self, opening: Opening) -> Meter:
        """Returns what counts the output of a stream that another ingress admitted, against the key that asked."""
        use = self.admission.use_of(opening.generation.engine.client)
        return UNMETERED if use is None else use.resume()

    async def _is_deleted(self, opening: Opening) -> bool:
        """Returns whether the response that a stream makes was deleted. If the storage does not tell, it goes on."""
        try:
            return await stream_endpoints.is_deleted(self._state, opening)
        except Exception:
            logger_of(__name__).exception("stream %s goes on", opening.stream_id)
            return False

    def add_model(
        self, config: ServeConfig, tokenizer: Tokenizer | None, engines: Engines, metrics: Metrics
    ) -> AppState:
        """Adds one of several models, or replaces the one of its name. `config` is as if it was the only one. A model
        without a tokenizer must have failed.
        """
        state = self._state.of_model(config, tokenizer, engines, metrics)
        self._state.models.put(state)
        self._bound_preparation()
        return state

    def remove_model(self, name: str) -> None:
        """Removes one of several models. Requests under way go on."""
        self._state.models.remove(name)
        self._bound_preparation()

    def let_leave(self, names: Collection[str]) -> None:
        """Makes the models of these names, and no others, take no new requests. What they have begun goes on."""
        self._state.models.let_leave(names)
        self._bound_preparation()

    def _bound_preparation(self) -> None:
        self.admission.serve_models([each.config for each in self._state.models])

    def use_adapters(self, loaded: LoadedAdapters | None) -> None:
        """Serves the adapters of the only model that operators load."""
        self._state.use_adapters(loaded)

    def own_metrics(self) -> list[Metric]:
        """Returns the metrics of this process, for the one that answers `/metrics`."""
        return [metric for each in self._state.all_metrics() for metric in each.own()]

    def begin_drain(self) -> None:
        """Makes readiness probes fail from now on, and closes each connection after its answer."""
        self._state.server.drains = True
        self._state.models.tell_news()

    async def _answer(self, exchange: Exchange, route: Route | None = None) -> None:
        """Answers one request, by `route` or by the one that its path and method name."""
        asked = exchange.incoming
        if self._state.server.drains:
            exchange.reply.headers_always.append((b"connection", b"close"))
        try:
            exchange.reply.error_body = self._router.error_body(asked.path) if route is None else route.error_body
            exchange.reply.headers_always += self.admission.origins.headers(exchange.headers)
            self.admission.origins.check(exchange.headers)
            if asked.method == "OPTIONS":
                methods = self._router.methods(asked.path, asked.root_path)
                await exchange.reply.send_empty(self.admission.origins.preflight(exchange.headers, methods))
                return
            if route is None:
                route, asked.path_parameter = self._router.find(asked.method, asked.path, asked.root_path)
            exchange.route = route.path
            await self._handle(route, exchange)
        except ServingError as error:
            await exchange.reply.fail(error.refusal)
        except (asyncio.CancelledError, ClientGone):
            exchange.reply.status = 499
            raise asyncio.CancelledError from None
        except Exception as error:
            logger_of(__name__).exception("request %s failed", exchange.request_id)
            await exchange.reply.fail(refusal_of(error))
        finally:
            self._state.metrics.ignored_fields.inc(len(exchange.reply.ignored))
            self._log_end(exchange, route)

    def _log_end(self, exchange: Exchange, route: Route | None) -> None:
        """Counts a request that has ended, and writes its line. Of requests that no route took, one a minute gets a
        line, because anybody can send any number of them.
        """
        if route is not None:
            if route.logged:
                metrics = self._state.models.metrics_of(exchange.notes.get("model"), self._state.metrics)
                metrics.answered(exchange.reply.status)
            if self._logs_requests and route.logged:
                exchange.log()
        elif exchange.reply.status >= 400:
            self._state.metrics.unrouted_request(exchange.reply.status)
            num_others = self._unrouted.take() if self._logs_requests else None
            if num_others is not None:
                exchange.log(num_others)

    async def _handle(self, route: Route, exchange: Exchange) -> None:
        exchange.reply.ignored = collect_ignored(self._refuses_unknown(exchange))
        if not route.public:
            self._check_key(exchange, route)
        if route.form is not None:  # its handler reads the body, with a bound and a deadline of its own
            answer = await route.handler(self._state, exchange, None)
        else:
            client = exchange.caller.sharer
            content = b"" if route.body is None else await exchange.incoming.body(client)
            async with self.admission.prepare(client, is_counted=not route.public) as exchange.preparation:
                answer = await exchange.incoming.unless_gone(self._result(route, exchange, content))
        if answer is not None:
            await exchange.reply.send_json(encode(answer))

    async def _body(self, route: Route, exchange: Exchange, content: bytes) -> Any:
        """Returns the decoded body. A long one waits for its turn and counts as before while it does."""
        assert route.body is not None
        exchange.is_small = is_small(content)
        if exchange.is_small:
            return decode(route.body, content, self._config.body)
        async with exchange.incoming.room(exchange.caller.sharer, len(content)):
            return await self._state.apart(exchange, decode, route.body, content, self._config.body)

    def _note_model(self, exchange: Exchange, state: AppState) -> None:
        """Counts a request of one of several models, and notes the model for the log."""
        if self._state.models.are_several:
            _count(state, exchange)
            if state is not self._state:
                exchange.notes["model"] = state.model_name

    def _refuses_unknown(self, exchange: Exchange) -> bool:
        """Returns whether fields that Manta does not know are refused, by the configuration or for this request."""
        asked = exchange.headers.get(UNKNOWN_FIELDS)
        if asked not in (None, "ignore", "refuse"):
            refuse("unknown_value", UNKNOWN_FIELDS, asked[:40], ("ignore", "refuse"))
        return "refuse" in (asked, self._config.unknown_fields)

    async def _result(self, route: Route, exchange: Exchange, content: bytes) -> Any:
        """Returns what is to be sent as JSON; None if the answer was sent."""
        if route.body is None:
            return await route.handler(self._state, exchange, None)
        body = await self._body(route, exchange, content)
        await self._state.models.settle()
        async with self._state.for_body(body, exchange) as state:
            self._note_model(exchange, state)
            if RESUMABLE in exchange.headers:
                make_resumable(state, exchange, route, content, body)
            if "last-event-id" in exchange.headers:
                resumed = last_event(exchange.headers)
                if resumed is not None:
                    return await stream_endpoints.read_on(self._state, exchange, *resumed)
            return await route.handler(state, exchange, body)

    def _check_key(self, exchange: Exchange, route: Route) -> None:
        exchange.caller = self.admission.caller(exchange.headers, exchange.caller.address)
        if route.for_operators:
            self.admission.check_operator(exchange.caller)
        if route.body is None or not self._state.models.are_several:  # else it counts once its model is known
            _count(self._state, exchange)


def _count(state: AppState, exchange: Exchange) -> None:
    """Counts a request under the name of its API key, if it has one."""
    if exchange.caller.key:
        state.metrics.request_of(exchange.caller.key)


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
