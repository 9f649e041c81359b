"""OpenAI's Python client against `/v1/responses`: items, functions, formats, conversations and errors."""

from __future__ import annotations

import json
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from manta.cluster.config import ServeConfig
from manta.cluster.http.app import HttpApp
from manta.cluster.http.exchange.metrics import Metrics
from manta.cluster.text.tokenizer import Tokenizer
from tests.async_tests import async_test
from tests.http.test_ollama import CALL, Once
from tests.http.test_routes import Repeating, RepeatingEngines
from tests.server import shared_server

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "name": "weather", "description": "Of a city.", "parameters": SCHEMA, "strict": True}


def client() -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{shared_server().url}/v1", api_key="none", max_retries=0)


def create(**body: Any) -> Any:
    given = {"model": shared_server().model, "input": "Count.", "max_output_tokens": 12, "temperature": 0, **body}
    return client().responses.create(**given)


def by_chat(*messages: dict[str, Any], max_tokens: int = 12) -> dict[str, Any]:
    """Returns the chat endpoint's answer to the same."""
    server = shared_server()
    body = {"model": server.model, "messages": list(messages), "temperature": 0, "max_tokens": max_tokens}
    status, _, answer = server.post("/v1/chat/completions", body)
    assert status == 200, answer
    return answer


def test_an_answer_equals_the_chats_as_items() -> None:
    expected = by_chat({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count."})
    answer = create(instructions="Be brief.", metadata={"a": "b"})
    (choice,) = expected["choices"]
    assert answer.output_text == choice["message"]["content"]
    assert [item.type for item in answer.output] == ["message"]
    assert (answer.status == "incomplete") == (choice["finish_reason"] == "length")
    if answer.status == "incomplete":
        assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.input_tokens == expected["usage"]["prompt_tokens"]
    assert answer.usage.output_tokens == expected["usage"]["completion_tokens"]
    assert (answer.object, answer.store, answer.metadata) == ("response", False, {"a": "b"})
    assert (answer.text.format.type, answer.text.verbosity) == ("text", "medium")


def test_a_stream_carries_the_whole_answer() -> None:
    whole = create(max_output_tokens=20)
    given: Any = {"model": shared_server().model, "input": "Count.", "max_output_tokens": 20, "temperature": 0}
    with client().responses.stream(**given) as stream:
        events = list(stream)
        final = stream.get_final_response() if whole.status == "completed" else events[-1].response  # type: ignore[union-attr]
    assert final.output_text == whole.output_text
    assert (final.usage.output_tokens, final.usage.total_tokens) == (
        whole.usage.output_tokens,
        whole.usage.total_tokens,
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type for event in events]
    assert names[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert names[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{whole.status}",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
    ],
    ids=["required", "named", "allowed"],
)
def test_a_call_that_must_come_fits_its_schema(stream: bool, choice: Any) -> None:
    other = {"type": "function", "name": "other", "parameters": SCHEMA}
    tools = [TOOL] if choice == "required" else [other, TOOL]
    given: Any = {"tools": tools, "tool_choice": choice, "max_output_tokens": 400, "temperature": 1}
    given |= {"parallel_tool_calls": False}
    if stream:
        *_, last = create(stream=True, **given)
        answer = last.response
    else:
        answer = create(**given)
    assert [(tool.name, tool.strict) for tool in answer.tools] == [(tool["name"], True) for tool in tools]
    if not isinstance(choice, str):
        assert answer.tool_choice.to_dict() == choice
    (call,) = answer.output
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    assert call.call_id.startswith("call_")
    jsonschema.validate(json.loads(call.arguments), SCHEMA)


def test_a_conversation_of_items_becomes_the_same_chat() -> None:
    arguments = json.dumps({"city": "Rome", "days": 2})
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": []},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": arguments},
        {"type": "function_call_output", "call_id": "call_1", "output": "sun"},
        {"role": "user", "content": "And tomorrow?"},
    ]
    call = {"id": "call_1", "function": {"name": "weather", "arguments": arguments}}
    expected = by_chat(
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
        {"role": "user", "content": "And tomorrow?"},
    )
    answer = create(input=items)
    assert answer.output_text == expected["choices"][0]["message"]["content"]
    assert answer.usage.input_tokens == expected["usage"]["prompt_tokens"]


def test_one_answers_output_is_the_next_ones_input() -> None:
    first = create()
    followed = [{"role": "user", "content": "Count."}, *first.output, {"role": "user", "content": "On."}]
    expected = by_chat(
        {"role": "user", "content": "Count."},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "On."},
    )
    assert create(input=followed).output_text == expected["choices"][0]["message"]["content"]


def test_a_format_of_the_clients_types_holds() -> None:
    class Trip(pydantic.BaseModel):
        city: Literal["Rome", "Oslo"]
        days: Literal[1, 2, 3]

    answer = client().responses.parse(
        model=shared_server().model, input="Count.", text_format=Trip, max_output_tokens=300
    )
    assert isinstance(answer.output_parsed, Trip)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"temperature": 9}, "temperature", "2"),
        ({"max_output_tokens": 100_000}, "max_output_tokens", "max_output_tokens 100000 exceeds"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "batch_storage"),
        ({"store": True}, "store", "send false"),
        ({"background": True}, "background", "batch_storage"),
        ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"truncation": "some"}, "truncation", "auto"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "tools"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].id", "'a' is none of"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", "send text"),
        ({"input": [{"role": "king", "content": "a"}]}, "input", "'king'"),
        ({"input": []}, "input", "empty"),
        ({"tools": [{**TOOL, "parameters": {"$ref": "#/nowhere"}}]}, "tools[0].parameters", "nowhere"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": 1}}}}, "text.format", "type"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_name_this_apis_fields(body: dict[str, Any], param: str, words: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(stream=stream, extra_body=body)
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)
    assert words in caught.value.message


def test_what_the_answer_repeats_fits_openais_schema() -> None:
    allowed: Any = {"type": "allowed_tools", "tools": [{"type": "function", "name": "weather", "more": 1}]}
    answer = create(tools=[TOOL], tool_choice=allowed, extra_body={"presence_penalty": 0.5, "frequency_penalty": None})
    known = [{"type": "function", "name": "weather"}]
    assert answer.tool_choice.to_dict() == {"type": "allowed_tools", "mode": "auto", "tools": known}
    assert (answer.presence_penalty, answer.frequency_penalty) == (0.5, 0.0)


def test_fields_of_the_chat_body_are_pointed_to() -> None:
    with pytest.raises(openai.BadRequestError, match="here it is max_output_tokens"):
        create(extra_body={"max_tokens": 3})


# ---- without an engine ---------------------------------------------------------------------------------------------


class CallingEngines(RepeatingEngines):
    async def submit(self, request: Any, meter: Any = None) -> Repeating:
        return Once(request.prompts, f"Let me see. {CALL}")


@pytest.mark.parametrize("stream", [False, True])
@async_test
async def test_text_and_calls_are_separate_items(stream: bool) -> None:
    import httpx2

    app: Any = HttpApp(ServeConfig(), Tokenizer("demo"), CallingEngines(), Metrics("demo"))
    add: Any = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}}
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost") as transport:
        asked = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=transport)
        if stream:
            async for event in await asked.responses.create(model="demo", input="Add.", tools=[add], stream=True):
                last = event
            answer = last.response  # type: ignore[union-attr]
        else:
            answer = await asked.responses.create(model="demo", input="Add.", tools=[add])
    message, call = answer.output
    assert (message.type, call.type) == ("message", "function_call")
    assert message.content[0].text.strip() == "Let me see."
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1, "b": 2})
