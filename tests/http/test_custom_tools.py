"""Custom tools over HTTP: calls whole and streamed, as OpenAI's types have them, choices of tools, and history."""

from __future__ import annotations

import asyncio
import json
import pathlib
from typing import Any

import pytest
from openai.types.chat import ChatCompletion
from openai.types.responses import (
    ResponseCustomToolCall,
    ResponseCustomToolCallInputDeltaEvent,
    ResponseCustomToolCallInputDoneEvent,
)

from manta.cluster.chat.tool_formats import GLM, GPT_OSS, HERMES, PYTHONIC, ToolFormat
from tests.conftest import PROVE
from tests.http.test_foreign_fields import Asked, ignored, refused_field
from tests.http.test_round_trips import USER, World, events_of
from tests.protocol.test_custom_tools import PATCH, PATCH_GRAMMAR
from tests.tool_formats import WRITERS

FORMAT = {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR}
APPLY_PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": FORMAT}
"""The tool as Codex CLI sends it."""
ADD = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}
CHAT_FORMAT = {"type": "grammar", "grammar": {"syntax": "lark", "definition": PATCH_GRAMMAR}}
CHAT_PATCH = {"type": "custom", "custom": {"name": "apply_patch", "format": CHAT_FORMAT}}
CHAT_ADD = {"type": "function", "function": {"name": "add"}}


def said(form: ToolFormat, folder: pathlib.Path) -> World:
    """A world whose model calls the tool."""
    world = World(form, folder, has_marks=True)
    text = WRITERS[form]([("apply_patch", {"input": PATCH})])
    before = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant" if form.is_channel else ""
    world.engines.token_ids = world.tokenizer.encode(before + text, add_special_tokens=False)
    world.engines.is_cut = False
    return world


async def chat_trip(world: World, streams: bool) -> tuple[str, str, str]:
    """Returns the finish reason, the name and the input of the call, after it has come back as history."""
    body: dict[str, Any] = {"messages": [USER], "tools": [CHAT_PATCH, CHAT_ADD]}
    text = await world.ask("/v1/chat/completions", {**body, "stream": streams})
    if streams:
        choices = [event["choices"][0] for event in events_of(text)]
        written = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
        call = {"id": written[0]["id"], "type": written[0]["type"], "custom": {"name": written[0]["custom"]["name"]}}
        call["custom"]["input"] = "".join(each["custom"].get("input", "") for each in written)
        assert not any("function" in each for each in written)
        finish = choices[-1]["finish_reason"]
    else:
        choice = ChatCompletion.model_validate_json(text).choices[0]
        (found,) = choice.message.tool_calls or []
        call, finish = found.model_dump(exclude_unset=True), choice.finish_reason
    assert (call["type"], set(call)) == ("custom", {"id", "type", "custom"})
    result = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    await world.ask("/v1/chat/completions", {**body, "messages": [USER, message, result]})
    return finish or "", call["custom"]["name"], call["custom"]["input"]


async def responses_trip(world: World, streams: bool) -> tuple[str, str, str]:
    body: dict[str, Any] = {"input": [USER], "tools": [APPLY_PATCH, ADD], "store": False}
    text = await world.ask("/v1/responses", {**body, "stream": streams})
    answer = events_of(text)[-1]["response"] if streams else json.loads(text)
    item = next(item for item in answer["output"] if item["type"] == "custom_tool_call")
    ResponseCustomToolCall.model_validate(item)
    if streams:
        deltas = [each for each in events_of(text) if each["type"] == "response.custom_tool_call_input.delta"]
        (done,) = (each for each in events_of(text) if each["type"] == "response.custom_tool_call_input.done")
        assert "".join(each["delta"] for each in deltas) == done["input"] == item["input"]
        assert {each["item_id"] for each in [*deltas, done]} == {item["id"]}
        ResponseCustomToolCallInputDeltaEvent.model_validate(deltas[0])
        ResponseCustomToolCallInputDoneEvent.model_validate(done)
    assert answer["tools"][0] == APPLY_PATCH
    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"}
    await world.ask("/v1/responses", {**body, "input": [USER, *answer["output"], result]})
    return answer["status"], item["name"], item["input"]


@pytest.mark.parametrize("form", WRITERS if PROVE else [HERMES, GLM, PYTHONIC, GPT_OSS], ids=lambda form: form.name)
def test_a_call_arrives_whole_and_streamed_and_comes_back(form: ToolFormat, tmp_path: pathlib.Path) -> None:
    world = said(form, tmp_path)
    for streams in (False, True):
        assert asyncio.run(chat_trip(world, streams)) == ("tool_calls", "apply_patch", PATCH)
        assert asyncio.run(responses_trip(world, streams)) == ("completed", "apply_patch", PATCH)


def test_the_prompt_shows_a_call_as_the_model_wrote_it(tmp_path: pathlib.Path) -> None:
    world = said(HERMES, tmp_path)
    asyncio.run(responses_trip(world, False))
    (prompt,) = world.engines.request.prompts
    assert json.dumps({"input": PATCH}, ensure_ascii=False) in world.tokenizer.decode(prompt)


def test_a_call_cut_anywhere_is_what_there_is_of_it_and_comes_back(tmp_path: pathlib.Path) -> None:
    world = said(HERMES, tmp_path)
    tokens = world.engines.token_ids
    world.engines.is_cut = True
    for length in range(1, len(tokens), 1 if PROVE else 7):
        world.engines.token_ids = tokens[:length]
        text = asyncio.run(world.ask("/v1/responses", {"input": [USER], "tools": [APPLY_PATCH], "store": False}))
        output = json.loads(text)["output"]
        assert all(PATCH.startswith(item["input"]) for item in output), output
        body = {"input": [USER, *output, USER], "tools": [APPLY_PATCH], "store": False}
        asyncio.run(world.ask("/v1/responses", body))


@pytest.fixture(scope="module")
def asked() -> Asked:
    return Asked()


NAMED = {"type": "custom", "name": "apply_patch"}
CHOICES: list[tuple[Any, Any]] = [
    (NAMED, {"type": "custom", "custom": {"name": "apply_patch"}}),
    ({"type": "function", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
    (
        {"type": "allowed_tools", "mode": "required", "tools": [NAMED]},
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "custom", "custom": {"name": "apply_patch"}}]},
        },
    ),
    ("required", "required"),
]


@pytest.mark.parametrize(("of_responses", "of_chat"), CHOICES)
def test_a_choice_may_name_a_custom_tool(asked: Asked, of_responses: Any, of_chat: Any) -> None:
    function = {name: value for name, value in ADD.items() if name != "type"}
    chat_tools = [CHAT_PATCH, {"type": "function", "function": function}]
    grammars = []
    for path, body in (
        ("/v1/responses", {"input": "a", "tools": [APPLY_PATCH, ADD], "tool_choice": of_responses}),
        ("/v1/chat/completions", {"messages": [USER], "tools": chat_tools, "tool_choice": of_chat}),
    ):
        answer = asked.post(path, body)
        assert answer.status_code == 200, answer.text
        assert not ignored(answer)
        constraint = asked.engines.request.engine.params.constraint
        assert constraint is not None
        grammars.append(constraint.text)
        is_named = isinstance(of_responses, dict)
        assert ("apply_patch" in constraint.text) == (not is_named or "add" not in json.dumps(of_responses))
    assert grammars[0] == grammars[1]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/responses", {"tools": [APPLY_PATCH], "tool_choice": {"type": "custom", "name": "other"}}, "tool_choice"),
        (
            "/v1/responses",
            {"tools": [APPLY_PATCH], "tool_choice": {"type": "function", "name": "apply_patch"}},
            "tool_choice",
        ),
        ("/v1/responses", {"tools": [APPLY_PATCH, {**ADD, "name": "apply_patch"}]}, "tools[1].name"),
        (
            "/v1/responses",
            {"tools": [{**APPLY_PATCH, "format": {**FORMAT, "definition": "start: <|im_end|>"}}]},
            "tools[0].format.definition",
        ),
        (
            "/v1/responses",
            {"tools": [{**APPLY_PATCH, "format": {**FORMAT, "syntax": "gbnf"}}]},
            "tools[0].format.syntax",
        ),
        (
            "/v1/responses",
            {"input": [USER, {"type": "custom_tool_call_output", "call_id": "c", "output": "a"}]},
            "input[1].call_id",
        ),
        (
            "/v1/responses",
            {
                "input": [
                    USER,
                    {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
                    {"type": "custom_tool_call_output", "call_id": "c", "output": "a"},
                ]
            },
            "input[2].call_id",
        ),
        (
            "/v1/responses",
            {"input": [USER, {"type": "custom_tool_call", "call_id": "c", "name": "a"}]},
            "input[1].input",
        ),
        (
            "/v1/chat/completions",
            {"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "c", "type": "custom"}]}]},
            "messages[1].tool_calls[0].custom",
        ),
    ],
)
def test_what_fits_no_tool_is_refused_by_name(asked: Asked, path: str, body: dict[str, Any], field: str) -> None:
    given: dict[str, Any] = {"messages": [USER]} if path == "/v1/chat/completions" else {"input": "a"}
    answer = asked.post(path, given | body)
    assert (answer.status_code, refused_field(answer)) == (400, field), answer.text
