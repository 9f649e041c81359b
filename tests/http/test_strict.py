"""`strict` at every door that has a JSON schema: what is enforced whole or refused, and what may be enforced in part.

The engines of this file enforce everything but one keyword.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from manta.cluster.batch.line_endpoints import Endpoints
from manta.cluster.batch.lines import parse
from manta.cluster.config import EngineConfig, ServeConfig
from manta.cluster.http.exchange.metrics import Metrics
from manta.structured.constraint import ConstraintSpec
from manta.structured.visible_logs import JSON_LOG
from tests.http.client_types import HELLO
from tests.http.test_foreign_fields import Asked

SCHEMA = {"type": "object", "properties": {"a": {"$dynamicRef": "#nowhere"}}}
LEFT_OUT = "#/properties/a/$dynamicRef"
MESSAGE = {"messages": HELLO}
CLAUDE = {"messages": HELLO, "max_tokens": 2}


def wrapped(strict: bool | None) -> dict[str, Any]:
    return {"name": "n", "schema": SCHEMA, **({} if strict is None else {"strict": strict})}


def openai_format(strict: bool | None, key: str = "json_schema") -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", key: wrapped(strict)}}


def text_format(strict: bool | None) -> dict[str, Any]:
    return {"input": "Hello", "text": {"format": {"type": "json_schema", **wrapped(strict)}}}


def function(strict: bool | None) -> dict[str, Any]:
    return {"name": "f", "parameters": SCHEMA, **({} if strict is None else {"strict": strict})}


STRICTNESS = (None, False, True)
CASES: list[tuple[str, dict[str, Any], bool]] = [
    *(("/v1/chat/completions", MESSAGE | openai_format(each), not each) for each in STRICTNESS),
    *(("/v1/chat/completions", MESSAGE | openai_format(each, "value"), not each) for each in STRICTNESS),
    *(("/v1/completions", {"prompt": "Hello"} | openai_format(each), not each) for each in STRICTNESS),
    *(("/v1/responses", text_format(each), not each) for each in STRICTNESS),
    *(
        ("/v1/chat/completions", MESSAGE | {"tools": [{"type": "function", "function": function(each)}]}, not each)
        for each in STRICTNESS
    ),
    *(
        ("/v1/responses", {"input": "Hello", "tools": [{"type": "function", **function(each)}]}, not each)
        for each in STRICTNESS
    ),
    ("/v1/messages", {**CLAUDE, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, False),
    ("/v1/messages", {**CLAUDE, "tools": [{"name": "f", "input_schema": SCHEMA}]}, True),
    ("/v1/messages", {**CLAUDE, "tools": [{"name": "f", "input_schema": SCHEMA, "strict": True}]}, False),
    ("/api/chat", {**MESSAGE, "stream": False, "format": SCHEMA}, True),
    ("/api/generate", {"prompt": "Hello", "stream": False, "format": SCHEMA}, True),
    ("/v1/chat/completions", {**MESSAGE, "structured_outputs": {"json": SCHEMA}}, False),
    ("/v1/chat/completions", {**MESSAGE, "structured_outputs": {"json": SCHEMA, "loose": True}}, True),
    ("/v1/chat/completions", {**MESSAGE, "guided_json": SCHEMA}, False),
    ("/v1/chat/completions", {**MESSAGE, "json_schema": SCHEMA}, False),
    ("/v1/chat/completions", {**MESSAGE, "response_format": {"type": "json_object", "schema": SCHEMA}}, False),
    ("/v1/chat/completions", {**MESSAGE, "response_format": {"type": "json", "value": SCHEMA}}, False),
]
"""Paths and bodies, and whether their schema may be enforced in part."""


async def all_but_one(spec: ConstraintSpec, client: str = "") -> tuple[ConstraintSpec, list[str]]:
    """Resolves a constraint as an engine that does not enforce one keyword."""
    return spec, [LEFT_OUT]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    found = Asked()
    monkeypatch.setattr(found.engines, "resolve", all_but_one)
    return found


@pytest.mark.few(10)
@pytest.mark.parametrize(("path", "body", "may_be_loose"), CASES)
def test_only_what_asks_for_all_of_its_schema_is_refused(
    asked: Asked, path: str, body: dict[str, Any], may_be_loose: bool
) -> None:
    answer = asked.post(path, body)
    assert answer.status_code == 200, answer.text
    spec = asked.engines.request.engine.params.constraint
    assert spec is not None
    assert spec.loose is may_be_loose
    assert answer.headers.get("x-manta-not-enforced") == (LEFT_OUT if may_be_loose else None)


def test_the_request_log_says_what_was_not_enforced(asked: Asked, caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger(JSON_LOG)
    log.addHandler(caplog.handler)
    try:
        asked.post("/v1/chat/completions", MESSAGE | openai_format(None))
        asked.post("/v1/chat/completions", MESSAGE)
    finally:
        log.removeHandler(caplog.handler)
    lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == JSON_LOG]
    assert [line.get("not_enforced") for line in lines] == [[LEFT_OUT], None]


def test_a_line_of_a_batch_says_it_too(asked: Asked) -> None:
    config = ServeConfig(engine=EngineConfig(model="demo"), log_requests=False)
    lines = Endpoints(config, asked.tokenizer, asked.engines, Metrics("demo"))
    for strict in STRICTNESS:
        body = {"model": "demo", **MESSAGE, **openai_format(strict)}
        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
        answer = asyncio.run(lines.answer(parse(json.dumps(line).encode()), "r"))
        assert answer.status_code == 200
        assert list(answer.not_enforced or []) == ([] if strict else [LEFT_OUT])
