"""Counts of a prompt's tokens are those of the usage of the same request, whatever the request asks for."""

from __future__ import annotations

import itertools
from typing import Any

import openai
import pytest

from tests.server import shared_server

HELLO = {"role": "user", "content": "How long are nights on São Vicente?"}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
FUNCTION = {"name": "nights", "description": "Their length.", "parameters": SCHEMA}
CALL = {"id": "c1", "type": "function", "function": {"name": "nights", "arguments": '{"a": 1}'}}

CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, HELLO]},
    "tools": {"tools": [{"type": "function", "function": FUNCTION}]},
    "no tool": {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "none"},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    "choices": {"n": 3},
    "continued": {"messages": [HELLO, {"role": "assistant", "content": "As long"}], "continue_final_message": True},
    "no beginning of an answer": {"add_generation_prompt": False},
    "cut": {"truncate_prompt_tokens": 5},
    "after a call": {
        "tools": [{"type": "function", "function": FUNCTION}],
        "messages": [
            HELLO,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "11 h"},
        ],
    },
    "bounded thinking": {"thinking_token_budget": 4},
}
RESPONSES: dict[str, dict[str, Any]] = {
    "text": {},
    "instructions": {"instructions": "Be brief."},
    "items": {"input": [{"role": "system", "content": "Be brief."}, HELLO]},
    "tools": {"tools": [{"type": "function", **FUNCTION}]},
    "schema": {"text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}},
}


def asked(path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, _, answer = shared_server().post(path, body)
    assert status == 200, answer
    return answer


@pytest.mark.parametrize("kind", CHATS)
def test_a_count_is_the_usage_of_the_chat(kind: str) -> None:
    body = {"model": shared_server().model, "messages": [HELLO], "max_tokens": 1, **CHATS[kind]}
    usage = asked("/v1/chat/completions", body)["usage"]
    count = asked("/v1/chat/completions/input_tokens", body)
    assert count == {"input_tokens": usage["prompt_tokens"], "object": "response.input_tokens"}


@pytest.mark.parametrize("kind", RESPONSES)
def test_a_count_is_the_usage_of_the_response(kind: str) -> None:
    body = {"input": HELLO["content"], "max_output_tokens": 16, **RESPONSES[kind]}
    usage = asked("/v1/responses", {"model": shared_server().model, **body})["usage"]
    client = openai.OpenAI(base_url=shared_server().url + "/v1", api_key="none", max_retries=0)
    counted = client.responses.input_tokens.count(
        model=shared_server().model, **{name: value for name, value in body.items() if name != "max_output_tokens"}
    )
    assert (counted.input_tokens, counted.object) == (usage["input_tokens"], "response.input_tokens")


def test_what_is_refused_is_refused_in_the_bodys_own_names() -> None:
    model = shared_server().model
    for path, body, field in (
        ("/v1/chat/completions/input_tokens", {"messages": []}, "messages"),
        ("/v1/chat/completions/input_tokens", {"messages": [HELLO], "temperature": 9}, "temperature"),
        ("/v1/responses/input_tokens", {"input": ""}, "input"),
        ("/v1/responses/input_tokens", {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
    ):
        status, _, answer = shared_server().post(path, {"model": model, **body})
        assert (status, answer["error"]["param"]) == (400, field)


def test_counts_of_different_requests_differ() -> None:
    counts = {
        kind: asked(
            "/v1/chat/completions/input_tokens", {"model": shared_server().model, "messages": [HELLO], **CHATS[kind]}
        )["input_tokens"]
        for kind in ("plain", "system", "tools", "cut", "choices")
    }
    assert counts.pop("choices") == counts["plain"]
    assert all(counts[one] != counts[other] for one, other in itertools.combinations(counts, 2))
