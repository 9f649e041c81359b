"""Calls that a stop string cuts, as each API tells them: no error, no half a mark, and the arguments up to there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from manta.cluster.config import ServeConfig
from manta.cluster.engine.request import FinishStatus
from manta.cluster.http.app import HttpApp
from manta.cluster.http.exchange.engines import Event
from manta.cluster.http.exchange.metrics import Metrics
from manta.cluster.text.tokenizer import Tokenizer
from tests.http.test_routes import Repeating, RepeatingEngines

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
BEFORE_NAME, WITHIN, BEHIND = CALL[: CALL.index("add")], CALL[: CALL.index(', "b"')], CALL[: CALL.index("</")]
DEEP = CALL[: CALL.index("1, ")] + "[" * 20_000
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
FUNCTION = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
COMMON = {"model": "demo", "messages": [{"role": "user", "content": "1 + 2?"}]}


class Stopped(Repeating):
    async def __aiter__(self) -> AsyncIterator[Event]:
        finish = FinishStatus.FINISHED_STOPPED
        yield Event(index=0, text=self._text, token_ids=[1], finish=finish, stop_reason="x")


class StoppedEngines(RepeatingEngines):
    def __init__(self, text: str) -> None:
        self._text = text

    async def submit(self, request: Any, meter: Any = None) -> Stopped:
        return Stopped(request.prompts, self._text)


def ask(text: str, path: str, **body: Any) -> str:
    app: Any = HttpApp(ServeConfig(), Tokenizer("demo"), StoppedEngines(text), Metrics("demo"))

    async def post() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.post(path, json={**COMMON, **body})

    answer = asyncio.run(post())
    assert answer.status_code == 200, answer.text
    return answer.text


@pytest.mark.parametrize(
    ("text", "choice", "arguments", "finish"),
    [
        ("<tool", "required", None, "stop"),
        (BEFORE_NAME, "auto", None, "stop"),
        (BEFORE_NAME, "required", None, "stop"),
        (WITHIN, "auto", '{"a": 1', "stop"),
        (WITHIN, "required", '{"a": 1', "stop"),
        (BEHIND, "auto", '{"a": 1, "b": 2}', "tool_calls"),
        (CALL + BEFORE_NAME, "auto", '{"a": 1, "b": 2}', "stop"),
    ],
)
def test_a_chat_ends_as_stopped_with_what_there_is(text: str, choice: str, arguments: str | None, finish: str) -> None:
    body: dict[str, Any] = {"tools": [FUNCTION], "tool_choice": choice}
    (whole,) = json.loads(ask(text, "/v1/chat/completions", **body))["choices"]
    assert whole["finish_reason"] == finish
    assert not whole["message"]["content"]
    calls = whole["message"].get("tool_calls", [])
    assert [call["function"]["arguments"] for call in calls] == ([] if arguments is None else [arguments])
    events = ask(text, "/v1/chat/completions", **body, stream=True).split("\n\n")
    chunks = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events if event.startswith("data: {")]
    assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == [finish]
    assert not "".join(chunk["delta"].get("content") or "" for chunk in chunks)
    pieces = [
        call["function"].get("arguments", "") for chunk in chunks for call in chunk["delta"].get("tool_calls", [])
    ]
    assert "".join(pieces) == (arguments or "")


@pytest.mark.parametrize("text", [BEFORE_NAME, WITHIN, DEEP], ids=["before the name", "within", "deep within"])
def test_apis_whose_calls_hold_an_object_leave_a_cut_call_out(text: str) -> None:
    whole = json.loads(ask(text, "/api/chat", tools=[FUNCTION], stream=False))
    assert (whole["message"]["content"], whole["message"].get("tool_calls"), whole["done_reason"]) == ("", None, "stop")
    lines = [json.loads(line) for line in ask(text, "/api/chat", tools=[FUNCTION]).splitlines()]
    assert [line for line in lines if line["message"]["content"] or line["message"].get("tool_calls")] == []
    tool = {"name": "add", "input_schema": PARAMETERS}
    message = json.loads(ask(text, "/v1/messages", tools=[tool], max_tokens=9, stop_sequences=["x"]))
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], "stop_sequence", "x")
