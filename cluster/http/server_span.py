"""The span of an HTTP request, named by OpenTelemetry's conventions for HTTP servers and for generative AI.

Its parent is the client's span, if the request brings W3C's `traceparent`. The engines' spans are its children.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from manta.cluster.http.exchange.exchange import Exchange
from manta.cluster.telemetry.exporting import open_tracer

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer


class ServerSpans:
    """Makes the spans of one ingress."""

    def __init__(self, tracer: Tracer) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = tracer
        self._kind = trace.SpanKind.SERVER
        self._error = trace.StatusCode.ERROR
        self._extract = TraceContextTextMapPropagator().extract

    @contextlib.contextmanager
    def span(self, exchange: Exchange) -> Iterator[None]:
        """Gives the exchange a span while it is answered."""
        begun = {
            "http.request.method": exchange.incoming.method,
            "url.path": exchange.incoming.url_path,
            "url.scheme": "http",
            "client.address": exchange.caller.address,
            "manta.request_id": exchange.request_id,
        }
        span = self._tracer.start_span(exchange.incoming.method, self._extract(exchange.headers), self._kind, begun)
        exchange.span = span
        try:
            yield
        except asyncio.CancelledError:
            span.set_attribute("error.type", "client_gone")
            raise
        finally:
            self._end(span, exchange)

    def _end(self, span: Span, exchange: Exchange) -> None:
        if exchange.route:
            span.update_name(f"{exchange.incoming.method} {exchange.route}")
            span.set_attribute("http.route", exchange.route)
        span.set_attribute("http.response.status_code", exchange.reply.status)
        if exchange.reply.status >= 500:
            span.set_attribute("error.type", str(exchange.reply.status))
            span.set_status(self._error)
        counts = {"prompt_tokens": "gen_ai.usage.input_tokens", "output_tokens": "gen_ai.usage.output_tokens"}
        for name, attribute in counts.items():
            if name in exchange.notes:
                span.set_attribute(attribute, exchange.notes[name])
        span.end()


def open_server_spans() -> ServerSpans | None:
    """Returns None if the environment asks for no traces."""
    tracer = open_tracer()
    return None if tracer is None else ServerSpans(tracer)
