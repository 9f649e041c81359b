"""The OpenAPI document of the endpoint, derived from the structs that decode and encode its bodies.

Which errors an endpoint answers follows from what it does, by one table: an endpoint that reads a body may find it
wrong or too long, one that generates may have no place in its queue.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import msgspec

from cluster.http import protocol
from cluster.http.errors import ErrorBody


class _Operation(NamedTuple):
    path: str
    method: str
    summary: str
    body: Any = None
    answer: Any = None
    """Its struct; None is for JSON without one, or text."""
    other_type: str | None = None
    """A content type of the answer that is not JSON."""
    generates: bool = False
    asks_engines: bool = False
    """How they are, whether or not one answers."""


class _Failure(NamedTuple):
    status: int
    description: str
    applies: Callable[[_Operation, Collection[str]], bool]
    """Of an operation and the paths that need no API key."""


_EVENTS = "text/event-stream"

_OPERATIONS = [
    _Operation(
        "/v1/chat/completions",
        "post",
        "Chat completion",
        protocol.ChatCompletionRequest,
        protocol.ChatCompletion,
        _EVENTS,
        generates=True,
    ),
    _Operation(
        "/v1/completions",
        "post",
        "Completion",
        protocol.CompletionRequest,
        protocol.Completion,
        _EVENTS,
        generates=True,
    ),
    _Operation("/v1/models", "get", "The models served", answer=protocol.ModelList),
    _Operation("/v1/models/{model}", "get", "One model", answer=protocol.ModelCard),
    _Operation(
        "/tokenize", "post", "Text or messages to token ids", protocol.TokenizeRequest, protocol.TokenizeResponse
    ),
    _Operation("/detokenize", "post", "Token ids to text", protocol.DetokenizeRequest, protocol.DetokenizeResponse),
    _Operation(
        "/health",
        "get",
        "200 while the engine is idle or stepping; status is ok, or degraded with a reason",
        asks_engines=True,
    ),
    _Operation("/metrics", "get", "Prometheus metrics", other_type="text/plain", asks_engines=True),
    _Operation("/openapi.json", "get", "This document"),
]

_FAILURES = [
    _Failure(400, "The body is wrong or cannot be served; `param` names the field", lambda it, _: it.body is not None),
    _Failure(401, "An API key is required", lambda it, open_paths: it.path not in open_paths),
    _Failure(404, "No such model is served here", lambda it, _: it.body is not None or "{model}" in it.path),
    _Failure(405, "The path takes another method", lambda it, _: True),
    _Failure(408, "The time limit of a request has passed", lambda it, _: it.generates),
    _Failure(413, "The body is too long", lambda it, _: it.body is not None),
    _Failure(429, "Too many requests are waiting; retry later", lambda it, _: it.generates),
    _Failure(500, "An internal error, which the server has logged", lambda it, _: True),
    _Failure(503, "No engine answers, or none makes progress", lambda it, _: it.asks_engines),
]
"""Every status above 399 that `cluster/serve/ingress.py` answers, and which operations do."""

_RETRY_AFTER = {"retry-after": {"description": "Seconds", "schema": {"type": "integer"}}}


def openapi_document(open_paths: Collection[str]) -> dict[str, Any]:
    """OpenAPI 3.1. `open_paths` are answered without an API key."""
    types = [ErrorBody]
    types += [kind for operation in _OPERATIONS for kind in (operation.body, operation.answer) if kind is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, Any] = {}
    for operation in _OPERATIONS:
        entry: dict[str, Any] = {"summary": operation.summary, "responses": {"200": _success(operation, schema_of)}}
        if operation.body is not None:
            entry["requestBody"] = {"required": True, "content": _json(schema_of[operation.body])}
        if "{model}" in operation.path:
            entry["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
        for failure in _FAILURES:
            if failure.applies(operation, open_paths):
                answer = {"description": failure.description, "content": _json(schema_of[ErrorBody])}
                if failure.status == 429:
                    answer["headers"] = _RETRY_AFTER
                entry["responses"][str(failure.status)] = answer
        paths[operation.path] = {operation.method: entry}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Manta", "version": _version()},
        "paths": paths,
        "components": {"schemas": components},
    }


def _success(operation: _Operation, schema_of: dict[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.answer is not None:
        content = _json(schema_of[operation.answer])
    elif operation.other_type is None:
        content = _json({"type": "object"})
    if operation.other_type is not None:
        content[operation.other_type] = {"schema": {"type": "string"}}
    return {"description": "OK", "content": content}


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _version() -> str:
    try:
        return version("manta")
    except PackageNotFoundError:
        return "0"
