"""A tracer configured by OpenTelemetry's environment variables. Without them nothing is imported.

Ingress and engines have one each, with the same service name. Exporters are found as OpenTelemetry's own tools find
them, by the entry points of installed packages. A thread of the SDK exports the spans.
"""

from __future__ import annotations

import os
from importlib import metadata
from typing import TYPE_CHECKING

from manta.cluster.version import version
from manta.structured.visible_logs import logger_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

SDK_DISABLED, EXPORTER = "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_GROUP = "opentelemetry_traces_exporter"


def wanted() -> list[str]:
    """Returns the entry points of the exporters that the environment asks for: those in `OTEL_TRACES_EXPORTER`, or
    OTLP's if only an endpoint is set. Without either, or with `OTEL_SDK_DISABLED`, returns none; OpenTelemetry itself
    would send to localhost.
    """
    if os.environ.get(SDK_DISABLED, "").strip().lower() == "true":
        return []
    names = [name.strip() for name in os.environ.get(EXPORTER, "").split(",") if name.strip()]
    if not names and _first(ENDPOINTS):
        names = ["otlp"]
    return [_otlp() if name == "otlp" else name for name in names if name != "none"]


def _first(variables: tuple[str, ...]) -> str:
    return next((value for name in variables if (value := os.environ.get(name))), "")


def _otlp() -> str:
    """Returns the entry point of OTLP's exporter for its protocol: `grpc`, or `http/protobuf`, which is OpenTelemetry's
    default.
    """
    return f"otlp_proto_{(_first(PROTOCOLS) or 'http/protobuf').partition('/')[0]}"


def missing() -> str | None:
    """Returns why there are no traces although the environment asks for them, and the remedy; None if nothing is
    missing.
    """
    installed = {entry.name for entry in metadata.entry_points(group=_GROUP)}
    names = [name for name in wanted() if name not in installed]
    if not names:
        return None
    package = f"opentelemetry-exporter-{names[0].replace('_', '-')}"
    return (
        f"no traces: the environment ({EXPORTER}, {ENDPOINTS[1]}) asks for the exporter {names[0]}, which is not "
        f"installed on this machine; pip install {package}, or set {SDK_DISABLED}=true"
    )


def open_provider() -> TracerProvider | None:
    """Returns None if no traces are wanted, or if an exporter is missing, which is logged. The SDK reads sampling,
    batches, limits and resource attributes from their variables.
    """
    names = wanted()
    if not names:
        return None
    if (warning := missing()) is not None:
        logger_of(__name__).warning("%s", warning)
        return None
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create()  # from OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
    if str(resource.attributes["service.name"]).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "manta"}))
    provider = TracerProvider(resource=resource)
    for name in names:
        (entry, *_) = metadata.entry_points(group=_GROUP, name=name)
        provider.add_span_processor(BatchSpanProcessor(entry.load()()))
    return provider


def open_tracer() -> Tracer | None:
    """Returns a tracer of a provider of our own, because the process may have another one for its own calls; None
    without traces.
    """
    provider = open_provider()
    return None if provider is None else provider.get_tracer("manta", version())


def traceparent_of(span: Span) -> str:
    """Returns the header that continues the trace elsewhere (W3C Trace Context, level 1); empty if the span is not
    recorded.
    """
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-01" if context.trace_flags.sampled else ""
