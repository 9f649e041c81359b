"""Requests that are large and good: every limit on bodies lets them through."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from manta.cluster.protocol.body_size import body_size
from manta.cluster.serve_limits import BodyLimits
from tests.http.test_foreign_fields import Asked
from tests.http.test_routes import MODEL

NUM_MESSAGES = 4000
VOCABULARY = 262_144
"""Tokens of the largest vocabularies of published models."""
ID = "call_1"
FUNCTION = {"name": "f", "arguments": json.dumps({"path": "a.py", "line": 1})}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def asked() -> Asked:
    asked = Asked()
    asked.engines.loaded = msgspec.structs.replace(MODEL, vocab_size=VOCABULARY, max_model_len=2**20)
    return asked


def chat(content: Any) -> list[dict[str, Any]]:
    """A conversation of `NUM_MESSAGES` messages, half of them calls and their results."""
    call = {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": ID, "type": "function", "function": FUNCTION}],
    }
    turn = [
        {"role": "user", "content": content},
        call,
        {"role": "tool", "tool_call_id": ID, "content": content},
        {"role": "assistant", "content": content},
    ]
    return turn * (NUM_MESSAGES // len(turn))


def items() -> list[dict[str, Any]]:
    parts = [{"type": "input_text", "text": "a"}]
    call = {"type": "function_call", "call_id": ID, "name": "f", "arguments": FUNCTION["arguments"]}
    turn = [
        {"role": "user", "content": parts},
        call,
        {"type": "function_call_output", "call_id": ID, "output": parts},
        {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
    ]
    return turn * (NUM_MESSAGES // len(turn))


def blocks() -> list[dict[str, Any]]:
    text = {"type": "text", "text": "a"}
    turn = [
        {"role": "user", "content": [text]},
        {"role": "assistant", "content": [text, {"type": "tool_use", "id": ID, "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": ID, "content": "a"}, text]},
        {"role": "assistant", "content": [text]},
    ]
    return [*turn * (NUM_MESSAGES // len(turn)), {"role": "user", "content": "a"}]


def ollama() -> list[dict[str, Any]]:
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    turn = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "a", "tool_calls": [call]},
        {"role": "tool", "content": "a", "tool_name": "f"},
        {"role": "assistant", "content": "a"},
    ]
    return turn * (NUM_MESSAGES // len(turn))


PARTS = [{"type": "text", "text": "a"}]
EVERY_TOKEN = dict.fromkeys(range(VOCABULARY), -1)
GOOD: dict[str, tuple[str, dict[str, Any]]] = {
    "4,000 messages": ("/v1/chat/completions", {"messages": chat("a"), "tools": [TOOL]}),
    "4,000 messages of parts": ("/v1/chat/completions", {"messages": chat(PARTS), "tools": [TOOL]}),
    "4,000 items": ("/v1/responses", {"input": items(), "tools": [{"type": "function", "name": "f"}]}),
    "4,000 messages of blocks": ("/v1/messages", {"messages": blocks(), "max_tokens": 5}),
    "4,000 messages for Ollama": ("/api/chat", {"messages": ollama(), "stream": False}),
    "128k token ids": ("/v1/completions", {"prompt": [5] * 2**17}),
    "a million token ids": ("/v1/completions", {"prompt": [5] * 1_010_000}),
    "2,048 inputs": ("/v1/completions", {"prompt": ["Hello there."] * 2048}),
    "2,048 inputs of ids": ("/v1/completions", {"prompt": [[5] * 200] * 2048}),
    "a bias for every token": ("/v1/chat/completions", {"messages": chat("a"), "logit_bias": EVERY_TOKEN}),
    "every token is allowed": ("/v1/completions", {"prompt": "a", "allowed_token_ids": [*EVERY_TOKEN], "n": 8}),
    "half of the tokens are allowed": (
        "/v1/completions",
        {"prompt": "a", "allowed_token_ids": [*EVERY_TOKEN][: VOCABULARY // 2], "n": 16},
    ),
    "128 tools": (
        "/v1/chat/completions",
        {
            "messages": chat("a"),
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": f"f{tool}",
                        "parameters": {
                            "type": "object",
                            "properties": {
                                f"p{number}": {"type": "string", "description": "a"} for number in range(100)
                            },
                        },
                    },
                }
                for tool in range(128)
            ],
        },
    ),
    "100 values for the template": (
        "/v1/chat/completions",
        {"messages": chat("a"), "chat_template_kwargs": {f"key{number}": number for number in range(100)}},
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_large_request_is_admitted(asked: Asked, name: str) -> None:
    path, body = GOOD[name]
    answer = asked.post(path, body)
    assert answer.status_code == 200, answer.text[:500]


def test_the_largest_conversation_has_two_thirds_of_the_members() -> None:
    parts = {"messages": chat(PARTS), "logit_bias": EVERY_TOKEN}
    found = body_size(json.dumps(parts).encode()).num_members
    assert found < BodyLimits().max_members * 2 / 3
