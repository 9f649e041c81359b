"""Anthropic's Python client against Manta's endpoints: messages whole and streamed, tools, stop reasons, errors."""

from __future__ import annotations

import json
from typing import Any, Literal

import anthropic
import httpx2
import jsonschema
import pytest

from manta.cluster.config import ServeConfig
from manta.cluster.http.app import HttpApp
from manta.cluster.http.exchange.metrics import Metrics
from manta.cluster.text.tokenizer import Tokenizer
from tests.async_tests import async_test
from tests.http.test_ollama import CALL, Once
from tests.http.test_routes import Repeating, RepeatingEngines
from tests.server import shared_server

MESSAGES: Any = [{"role": "user", "content": "Count."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
PICTURE = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "image", "source": {}}]}
TOOL: Any = {"name": "weather", "description": "The weather of a city.", "input_schema": SCHEMA}


def client() -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=shared_server().url, api_key="none", max_retries=0)


def by_openai(**body: Any) -> dict[str, Any]:
    """Returns the chat endpoint's answer to the same."""
    server = shared_server()
    body = {"model": server.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 12, **body}
    status, _, answer = server.post("/v1/chat/completions", body)
    assert status == 200, answer
    return answer


def create(temperature: float = 0, extra_body: Any = None, **body: Any) -> Any:
    """The client itself knows no `temperature` any more; older ones send it."""
    given = {"model": shared_server().model, "messages": MESSAGES, "max_tokens": 12, **body}
    return client().messages.create(**given, extra_body={"temperature": temperature, **(extra_body or {})})


def test_a_message_is_answered_as_openais() -> None:
    system = {"role": "system", "content": "Be brief."}
    expected = by_openai(messages=[system, *MESSAGES])
    answer = create(system="Be brief.")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", shared_server().model)
    assert [block.type for block in answer.content] == ["text"]
    assert answer.content[0].text == expected["choices"][0]["message"]["content"]
    assert answer.stop_reason == {"length": "max_tokens", "stop": "end_turn"}[expected["choices"][0]["finish_reason"]]
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == expected["usage"]["prompt_tokens"]
    assert usage.output_tokens == expected["usage"]["completion_tokens"]


def test_a_stream_carries_the_whole_answer() -> None:
    whole = create(max_tokens=20)
    given: Any = {"model": shared_server().model, "messages": MESSAGES, "max_tokens": 20}
    given["extra_body"] = {"temperature": 0}
    with client().messages.stream(**given) as stream:
        names = [event.type for event in stream]
        final = stream.get_final_message()
    assert final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert names[0] == "message_start"
    assert names[-1] == "message_stop"
    assert names.count("content_block_start") == names.count("content_block_stop") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_has_a_list_of_citations(stream: bool) -> None:
    """Vercel's provider takes a list, or a block without any, and no null; Anthropic's schema requires the field."""
    given: Any = {"model": shared_server().model, "messages": MESSAGES, "max_tokens": 2}
    if stream:
        events = client().messages.create(**given, stream=True)
        (block,) = [event.content_block for event in events if event.type == "content_block_start"]
    else:
        (block,) = client().messages.create(**given).content
    assert block.to_dict()["citations"] == []
    conversation = [*MESSAGES, {"role": "assistant", "content": [block.to_dict()]}, *MESSAGES]
    assert client().messages.create(**{**given, "messages": conversation}).content


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_must_come_fits_its_schema(stream: bool) -> None:
    given: Any = {
        "model": shared_server().model,
        "messages": MESSAGES,
        "max_tokens": 400,
        "tools": [TOOL],
        "tool_choice": {"type": "tool", "name": "weather"},
    }
    if stream:
        with client().messages.stream(**given) as events:
            answer = events.get_final_message()
    else:
        answer = client().messages.create(**given)
    (call,) = answer.content
    assert call.type == answer.stop_reason == "tool_use"
    assert call.name == "weather"
    assert call.id.startswith("toolu_")
    jsonschema.validate(call.input, SCHEMA)


def test_a_conversation_with_calls_becomes_the_same_prompt() -> None:
    """The number of its tokens tells, and the answer."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome", "days": 2}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sun"}]}
    conversation: Any = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "And tomorrow?"}]},
    ]
    function = {"name": "weather", "arguments": json.dumps(call["input"])}
    same = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [{"id": "toolu_1", "function": function}]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "sun"},
        {"role": "user", "content": "And tomorrow?"},
    ]
    expected = by_openai(messages=same)
    answer = create(messages=conversation)
    assert answer.content[0].text == expected["choices"][0]["message"]["content"]
    counted = client().messages.count_tokens(model=shared_server().model, messages=conversation)
    assert counted.input_tokens == expected["usage"]["prompt_tokens"]


def test_an_agents_changing_note_does_not_reach_prompts() -> None:
    """It would keep the conversation out of the prefix cache."""
    stable = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    counts = {
        client()
        .messages.count_tokens(model=shared_server().model, messages=MESSAGES, system=[*note, *stable])  # type: ignore[list-item]
        .input_tokens
        for note in ([], [{"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=ab;"}])
    }
    assert len(counts) == 1


def test_the_last_message_of_the_assistant_is_continued() -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "One, two"}]
    continued = by_openai(messages=begun, continue_final_message=True)
    assert create(messages=begun).content[0].text == continued["choices"][0]["message"]["content"]


def test_stop_sequences_are_named_and_schemas_hold() -> None:
    text = create(max_tokens=30).content[0].text
    stop = text[len(text) // 2 :][:3]
    answer = create(max_tokens=30, stop_sequences=[stop])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == text[: text.index(stop)]
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = create(max_tokens=300, temperature=1, extra_body={"output_config": form})
    jsonschema.validate(json.loads(answer.content[0].text), SCHEMA)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"temperature": 9}, "temperature"),
        ({"max_tokens": 100_000}, "max_tokens 100000 exceeds"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["x" * 4000] * 20}, "stop_sequences has 80000 characters"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [PICTURE]}]}, "messages[0].content[0].content[0].type 'image'"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}], "tool_choice": {"type": "any"}}, "tool_choice"),
        (
            {"tools": [{**TOOL, "strict": True, "input_schema": {"type": "object", "$ref": "#/nowhere"}}]},
            "tools[0].input_schema",
        ),
        ({"mcp_servers": [{"url": "http://localhost"}]}, "mcp_servers is not supported"),
        ({"messages": [{**MESSAGES[0], "clear_at": "next_user_message"}]}, "messages[0].clear_at 'next_user_message'"),
        ({"messages": [{**MESSAGES[0], "output_config": {"effort": "low"}}]}, "messages[0].output_config is not"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_have_anthropics_shape_and_its_fields(body: dict[str, Any], words: str, stream: bool) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        create(stream=stream, extra_body=body)
    error: Any = caught.value.body
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert words in error["error"]["message"]


def test_the_tool_runner_goes_on_without_a_thread() -> None:
    """It asks for a thread first. After the refusal it sends the same request without one."""

    @anthropic.beta_tool
    def look(name: Literal["Rome", "Oslo"]) -> str:
        """Looks at a thing."""
        return f"seen {name}"

    fields: Any = {
        "model": shared_server().model,
        "max_tokens": 200,
        "messages": MESSAGES,
        "extra_body": {"temperature": 0},
    }
    runner = client().beta.messages.tool_runner(tools=[look], tool_choice={"type": "tool", "name": "look"}, **fields)
    assert next(iter(runner)).stop_reason == "tool_use"


def test_unknown_models_and_wrong_keys_are_refused() -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        create(model="claude-9")
    assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


# ---- without an engine ---------------------------------------------------------------------------------------------


class CallingEngines(RepeatingEngines):
    async def submit(self, request: Any, meter: Any = None) -> Repeating:
        self.request = request
        return Once(request.prompts, f"Let me see. {CALL}")


def application(engines: Any, **options: Any) -> httpx2.AsyncClient:
    app: Any = HttpApp(ServeConfig(**options), Tokenizer("demo"), engines, Metrics("demo"))
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost")


@pytest.mark.parametrize("stream", [False, True])
@async_test
async def test_text_and_calls_are_separate_blocks(stream: bool) -> None:
    add: Any = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {}, "b": {}}}}
    given: Any = {"model": "demo", "messages": MESSAGES, "max_tokens": 50, "tools": [add]}
    async with application(CallingEngines()) as transport:
        asked = anthropic.AsyncAnthropic(base_url="http://localhost", api_key="none", http_client=transport)
        if stream:
            async with asked.messages.stream(**given) as events:
                answer = await events.get_final_message()
        else:
            answer = await asked.messages.create(**given)
    text, call = answer.content
    assert (text.type, call.type) == ("text", "tool_use")
    assert text.text.strip() == "Let me see."  # type: ignore[union-attr]
    assert (call.name, call.input) == ("add", {"a": 1, "b": 2})  # type: ignore[union-attr]


@async_test
async def test_the_key_comes_in_anthropics_header() -> None:
    key = "a-key-of-some-length"
    given: Any = {"model": "demo", "messages": MESSAGES, "max_tokens": 5}
    for sent, status in ((key, 200), ("another-key-of-length", 401), ("", 401)):
        async with application(RepeatingEngines(), api_keys=(key,)) as transport:
            answer = await transport.post("/v1/messages", json=given, headers={"x-api-key": sent})
        assert answer.status_code == status
    assert answer.json()["error"]["type"] == "authentication_error"
