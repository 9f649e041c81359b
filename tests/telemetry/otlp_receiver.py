"""A receiver of spans in this process, as a collector would be: OTLP over HTTP in protobuf."""

from __future__ import annotations

import http.server
import threading
import time
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.patience import PATIENCE_S


class Receiver:
    """Listens on a free port until it is closed."""

    def __init__(self) -> None:
        self._spans: list[tuple[dict[str, Any], Span]] = []
        received = self._spans

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["content-length"]))
                for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    resource = attributes(of_resource.resource)
                    received.extend((resource, span) for scope in of_resource.scope_spans for span in scope.spans)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def resources(self) -> list[dict[str, Any]]:
        """Of each span."""
        return [resource for resource, _ in self._spans]

    def wait_for(self, trace_id: str, *names: str) -> dict[str, Span]:
        """The spans of a trace by name, once there are as many as `names`."""
        deadline = time.monotonic() + PATIENCE_S
        while len(found := self.of_trace(trace_id)) < len(names):
            assert time.monotonic() < deadline, f"of {names} there came {sorted(span.name for span in found)}"
            time.sleep(0.02)
        assert sorted(span.name for span in found) == sorted(names)
        return {span.name: span for span in found}

    def of_trace(self, trace_id: str) -> list[Span]:
        return [span for _, span in list(self._spans) if span.trace_id.hex() == trace_id]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def attributes(of: Any) -> dict[str, Any]:
    """Of a span, a resource or an event; lists as lists."""
    return {each.key: _value(each.value) for each in of.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
