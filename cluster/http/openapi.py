"""The OpenAPI document of the endpoint, derived from its routes and from the structs of their bodies."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import msgspec

from manta.cluster.http.exchange.state import Route
from manta.cluster.protocol.error_bodies import (
    RETRIED_STATUSES,
    ErrorBody,
    MessagesError,
    OllamaError,
    Writer,
    anthropic_body,
    ollama_body,
    openai_body,
)
from manta.cluster.version import version

_ERRORS = {
    400: "The body is wrong or cannot be served; `param` names the field",
    401: "An API key is required",
    403: "The Host, the page that asks, or the key is not allowed here",
    404: "There is no such model, file, batch, stream or response here",
    405: "The path takes another method",
    408: "A time limit has passed: of the request, or of a client that sends or reads too slowly",
    409: "The batch has ended",
    413: "The body is too long",
    415: "The body is compressed",
    426: "The path is for WebSocket connections",
    429: "Too many requests are waiting; retry later",
    500: "An internal error, which the server has logged",
    503: "No engine answers, none makes progress, or too many bodies are being received",
}
"""Every error status that the application returns, with its description."""

_ERROR_TYPES: dict[Writer, type[msgspec.Struct]] = {
    openai_body: ErrorBody,
    anthropic_body: MessagesError,
    ollama_body: OllamaError,
}
"""The type of the bodies that each writer of refusals writes."""

_RETRY_AFTER = {"retry-after": {"description": "Seconds", "schema": {"type": "integer"}}}


@functools.lru_cache(maxsize=2)
def openapi_document(routes: tuple[Route, ...]) -> dict[str, Any]:
    """Returns the OpenAPI 3.1 document of the routes. Applications of one process share it. The caller
    may not change the result.
    """
    types: list[Any] = [*_ERROR_TYPES.values()]
    types += [kind for route in routes for kind in (route.body, route.form, route.answer) if kind is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    for component in components.values():
        component.pop("additionalProperties", None)  # unknown fields are ignored by name
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Manta", "version": version()},
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(route: Route, schema_of: dict[Any, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": route.summary, "responses": {"200": _success(route, schema_of)}}
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": _json(schema_of[route.body])}
    if route.form is not None:
        content = {"multipart/form-data": {"schema": schema_of[route.form]}}
        operation["requestBody"] = {"required": True, "content": content}
    if parameters := list(_parameters(route)):
        operation["parameters"] = parameters
    for status in _error_statuses(route):
        answer = {"description": _ERRORS[status], "content": _json(schema_of[_ERROR_TYPES[route.error_body]])}
        if status in RETRIED_STATUSES:
            answer["headers"] = _RETRY_AFTER
        operation["responses"][str(status)] = answer
    return operation


def _parameters(route: Route) -> Iterator[dict[str, Any]]:
    if route.parameter is not None:
        yield {"name": route.parameter, "in": "path", "required": True, "schema": {"type": "string"}}
    if route.query is not None:
        (reference,), components = msgspec.json.schema_components([route.query])
        for name, schema in components[reference["$ref"].rpartition("/")[2]]["properties"].items():
            yield {"name": name, "in": "query", "required": False, "schema": schema}


def _error_statuses(route: Route) -> list[int]:
    """Returns the error statuses of the handler, and those that the application returns before it calls the handler."""
    found = {403, 405, 408, 500, *route.errors}
    if not route.public:
        found |= {401, 429, 503}
    if route.query is not None:
        found.add(400)
    if route.body is not None or route.form is not None:
        found |= {400, 413, 415}
    return sorted(found)


def _success(route: Route, schema_of: dict[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {} if route.answer is None else _json(schema_of[route.answer])
    if route.media_type is not None:
        content[route.media_type] = {"schema": {"type": "string"}}
    return {"description": "OK", "content": content}


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
