"""The OpenAPI document of the endpoint, derived from the structs that decode and encode its bodies."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from cluster import protocol

_OPERATIONS: list[tuple[str, str, str, Any, Any]] = [
    ("/v1/chat/completions", "post", "Chat completion", protocol.ChatCompletionRequest, protocol.ChatCompletion),
    ("/v1/completions", "post", "Completion", protocol.CompletionRequest, protocol.Completion),
    ("/v1/models", "get", "The models served", None, protocol.ModelList),
    ("/v1/models/{model}", "get", "One model", None, protocol.ModelCard),
    ("/tokenize", "post", "Text or messages to token ids", protocol.TokenizeRequest, protocol.TokenizeResponse),
    ("/detokenize", "post", "Token ids to text", protocol.DetokenizeRequest, protocol.DetokenizeResponse),
    ("/health", "get", "200 while the engine is idle or stepping", None, None),
    ("/metrics", "get", "Prometheus metrics", None, None),
]


def openapi_document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    types = [kind for operation in _OPERATIONS for kind in operation[3:] if kind is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, Any] = {}
    for path, method, summary, body, answer in _OPERATIONS:
        operation: dict[str, Any] = {"summary": summary, "responses": {"200": {"description": "OK"}}}
        if body is not None:
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema_of[body]}}}
        if answer is not None:
            operation["responses"]["200"]["content"] = {"application/json": {"schema": schema_of[answer]}}
        if "{model}" in path:
            operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
        paths[path] = {method: operation}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Manta", "version": _version()},
        "paths": paths,
        "components": {"schemas": components},
    }


def _version() -> str:
    try:
        return version("manta")
    except PackageNotFoundError:
        return "0"
