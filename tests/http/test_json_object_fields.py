"""`additional_properties` and `property_order` at every door: where the fields stand, and what reaches the engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from manta.cluster.batch.line_endpoints import Endpoints
from manta.cluster.batch.lines import parse
from manta.cluster.config import EngineConfig, ServeConfig
from manta.cluster.http.exchange.metrics import Metrics
from manta.structured.constraint import ConstraintSpec
from tests.http.client_types import HELLO
from tests.http.test_foreign_fields import Asked, ignored, refused_field

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}
FUNCTION = {"name": "f", "parameters": SCHEMA}
TOOLS = {"tools": [{"type": "function", "function": FUNCTION}]}
CLAUDE = {"messages": HELLO, "max_tokens": 2}
OLLAMA = {"stream": False, "options": {}}
DOORS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": HELLO, **FORMAT}),
    "chat, tools": ("/v1/chat/completions", {"messages": HELLO, **TOOLS}),
    "completions": ("/v1/completions", {"prompt": "Hello", **FORMAT}),
    "responses": (
        "/v1/responses",
        {"input": "Hello", "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
    ),
    "responses, tools": ("/v1/responses", {"input": "Hello", "tools": [{"type": "function", **FUNCTION}]}),
    "messages": ("/v1/messages", {**CLAUDE, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    "messages, tools": ("/v1/messages", {**CLAUDE, "tools": [{"name": "f", "input_schema": SCHEMA}]}),
    "ollama, chat": ("/api/chat", {"messages": HELLO, "format": SCHEMA, **OLLAMA}),
    "ollama, tools": ("/api/chat", {"messages": HELLO, **TOOLS, **OLLAMA}),
    "ollama, generate": ("/api/generate", {"prompt": "Hello", "format": SCHEMA, **OLLAMA}),
    "ollama, raw": ("/api/generate", {"prompt": "Hello", "format": SCHEMA, "raw": True, **OLLAMA}),
    "batch line, chat": ("/v1/chat/completions", {"messages": HELLO, **FORMAT}),
    "batch line, tools": ("/v1/chat/completions", {"messages": HELLO, **TOOLS}),
    "batch line, completions": ("/v1/completions", {"prompt": "Hello", **FORMAT}),
}
"""A path and a body with a schema for each door. The fields of an Ollama body stand in its options."""

ASKED: list[dict[str, Any]] = [
    {},
    {"property_order": "any"},
    {"additional_properties": "as_schema"},
    {"additional_properties": "closed"},
    {"additional_properties": "as_schema", "property_order": "schema"},
]

Answer = tuple[int, str, list[str], ConstraintSpec | None]
"""Status, field of a refusal, what was ignored, and the constraint that an engine was sent."""


@pytest.fixture(scope="module")
def ask() -> Callable[[str, dict[str, Any]], Answer]:
    asked = Asked()
    config = ServeConfig(engine=EngineConfig(model="demo"), log_requests=False)
    lines = Endpoints(config, asked.tokenizer, asked.engines, Metrics("demo"))

    def over_http(path: str, body: dict[str, Any]) -> tuple[int, str, list[str]]:
        answer = asked.post(path, body)
        return answer.status_code, "" if answer.status_code == 200 else refused_field(answer), ignored(answer)

    def as_line(path: str, body: dict[str, Any]) -> tuple[int, str, list[str]]:
        line = {"custom_id": "a", "method": "POST", "url": path, "body": {"model": "demo", **body}}
        answer = asyncio.run(lines.answer(parse(json.dumps(line).encode()), "r"))
        said = json.loads(bytes(answer.body))
        return answer.status_code, said.get("error", {}).get("param", ""), list(answer.ignored or [])

    def ask(door: str, fields: dict[str, Any]) -> Answer:
        path, given = DOORS[door]
        body = {**given, "options": fields} if path.startswith("/api/") else {**given, **fields}
        status, field, names = as_line(path, body) if door.startswith("batch") else over_http(path, body)
        return status, field, names, asked.engines.request.engine.params.constraint if status == 200 else None

    return ask


@pytest.mark.parametrize("door", DOORS)
def test_the_fields_reach_the_constraint_at_every_door(door: str, ask: Callable[[str, dict[str, Any]], Answer]) -> None:
    for fields in ASKED:
        status, refused, names, spec = ask(door, fields)
        assert (status, refused, names) == (200, "", []), (door, fields)
        assert spec is not None
        found = {"additional_properties": spec.additional_properties, "property_order": spec.property_order}
        assert found == {"additional_properties": None, "property_order": None, **fields}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", ["additional_properties", "property_order"])
def test_a_wrong_value_is_refused_under_the_doors_name(
    door: str, name: str, ask: Callable[[str, dict[str, Any]], Answer]
) -> None:
    status, refused, _, _ = ask(door, {name: "perhaps"})
    assert status == 400
    assert (f"options.{name}" if DOORS[door][0].startswith("/api/") else name) in refused


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_an_ollama_body_is_told_that_they_are_options(path: str) -> None:
    answer = Asked().post(path, {"messages" if path == "/api/chat" else "prompt": "x", "property_order": "any"})
    assert answer.status_code == 400
    assert "options.property_order" in refused_field(answer)
