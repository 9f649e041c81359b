"""Client libraries against one server of the demo model: each cell of the table in docs/clients.md is a test here.

A cell is a function `CLIENT_KIND`. It raises if the client's answer is not what its kind promises.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal

import anthropic
import instructor
import openai
import pydantic
import pytest
from instructor.core.exceptions import InstructorRetryException

from tests.house.pages import ROOT
from tests.local_server import ThreadedServer

KINDS = ("plain", "stream", "tools", "schema", "errors")
PAGE = "docs/clients.md"
MESSAGES: Any = [{"role": "user", "content": "What is 2 + 3?"}]
TOO_MANY = 20_000
"""Number of tokens that no context holds, and for which the `anthropic` package does not insist on a stream."""


class Trip(pydantic.BaseModel):
    """A trip."""

    model_config = pydantic.ConfigDict(extra="forbid")

    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2, 3]


def book(city: Literal["Rome", "Oslo"], days: Literal[1, 2, 3]) -> str:
    """Books a trip."""
    return f"{days} days in {city}"


TOOL: Any = {"type": "function", "function": {"name": "book", "parameters": Trip.model_json_schema()}}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "Trip", "schema": Trip.model_json_schema()}}


@pytest.fixture(scope="module", autouse=True)
def nothing_is_sent() -> Iterator[None]:
    """Two libraries fetch a file, or send traces, without being asked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        patch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
        yield


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadedServer]:
    running = ThreadedServer(folder=ROOT / "configs" / "demo" / "target")
    yield running
    running.stop()


def expected(server: ThreadedServer) -> str:
    """Returns the answer to `MESSAGES` without any client."""
    body = {"model": server.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
    status, _, answer = server.post("/v1/chat/completions", body)
    assert status == 200, answer
    return answer["choices"][0]["message"]["content"]


def refused(call: Callable[[], Any], kind: type[Exception], words: str = "exceeds") -> None:
    """Asserts that the client raises its own error with the server's sentence."""
    with pytest.raises(kind, match=words):
        call()


def openai_client(server: ThreadedServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


# ---- openai --------------------------------------------------------------------------------------------------------


def chat(server: ThreadedServer, kind: str) -> None:
    asked = openai_client(server).chat.completions
    given: Any = {"model": server.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
    if kind == "plain":
        assert asked.create(**given).choices[0].message.content == expected(server)
    elif kind == "stream":
        deltas = [each.choices[0].delta.content or "" for each in asked.create(**given, stream=True)]
        assert "".join(deltas) == expected(server)
    elif kind == "tools":
        given["max_tokens"] = 200
        (call,) = (
            asked.create(**given, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
            .choices[0]
            .message.tool_calls
        )
        assert Trip.model_validate_json(call.function.arguments)
    elif kind == "schema":
        given["max_tokens"] = 200
        assert isinstance(asked.parse(**given, response_format=Trip).choices[0].message.parsed, Trip)
    else:
        refused(lambda: asked.create(**{**given, "max_tokens": TOO_MANY}), openai.BadRequestError)


def completions(server: ThreadedServer, kind: str) -> None:
    asked = openai_client(server).completions
    given: Any = {"model": server.model, "prompt": "2 + 3", "temperature": 0, "max_tokens": 12}
    if kind == "plain":
        assert asked.create(**given).choices[0].text
    elif kind == "stream":
        streamed = "".join(each.choices[0].text for each in asked.create(**given, stream=True))
        assert streamed == asked.create(**given).choices[0].text
    elif kind == "schema":
        outputs = {"json": Trip.model_json_schema(), "disable_any_whitespace": True}
        given |= {"max_tokens": 200, "extra_body": {"structured_outputs": outputs}}
        assert Trip.model_validate_json(asked.create(**given).choices[0].text)
    else:
        refused(lambda: asked.create(**{**given, "max_tokens": TOO_MANY}), openai.BadRequestError)


def responses(server: ThreadedServer, kind: str) -> None:
    asked = openai_client(server).responses
    given: Any = {"model": server.model, "input": MESSAGES, "temperature": 0, "max_output_tokens": 12, "store": False}
    if kind == "plain":
        assert asked.create(**given).output_text == expected(server)
    elif kind == "stream":
        events = asked.create(**given, stream=True)
        deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
        assert "".join(deltas) == expected(server)
    elif kind == "tools":
        tool: Any = {"type": "function", **TOOL["function"], "strict": True}
        given |= {"max_output_tokens": 200, "tool_choice": "required", "parallel_tool_calls": False}
        (call,) = asked.create(**given, tools=[tool]).output
        assert Trip.model_validate_json(call.arguments)
    elif kind == "schema":
        given["max_output_tokens"] = 200
        assert isinstance(asked.parse(**given, text_format=Trip).output_parsed, Trip)
    else:
        refused(lambda: asked.create(**{**given, "max_output_tokens": TOO_MANY}), openai.BadRequestError)


# ---- anthropic -----------------------------------------------------------------------------------------------------


def messages(server: ThreadedServer, kind: str) -> None:
    asked = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0).messages
    given: Any = {"model": server.model, "messages": MESSAGES, "max_tokens": 12, "extra_body": {"temperature": 0}}
    if kind == "plain":
        assert asked.create(**given).content[0].text == expected(server)
    elif kind == "stream":
        with asked.stream(**given) as stream:
            assert "".join(stream.text_stream) == expected(server)
    elif kind == "tools":
        given |= {"max_tokens": 200, "tool_choice": {"type": "tool", "name": "book"}}
        (call,) = asked.create(**given, tools=[{"name": "book", "input_schema": Trip.model_json_schema()}]).content
        assert Trip.model_validate(call.input)
    elif kind == "schema":
        given["max_tokens"] = 200
        assert isinstance(asked.parse(**given, output_format=Trip).parsed_output, Trip)
    else:
        refused(lambda: asked.create(**{**given, "max_tokens": TOO_MANY}), anthropic.BadRequestError)


# ---- libraries over them -------------------------------------------------------------------------------------------


def litellm_chat(server: ThreadedServer, kind: str) -> None:
    import litellm

    given: Any = {
        "model": f"hosted_vllm/{server.model}",
        "messages": MESSAGES,
        "temperature": 0,
        "max_tokens": 12,
        "api_base": f"{server.url}/v1",
        "api_key": "none",
        "num_retries": 0,
    }
    if kind == "plain":
        assert litellm.completion(**given).choices[0].message.content == expected(server)
    elif kind == "stream":
        deltas = [each.choices[0].delta.content or "" for each in litellm.completion(**given, stream=True)]
        assert "".join(deltas) == expected(server)
    elif kind == "tools":
        given["max_tokens"] = 200
        message = litellm.completion(**given, tools=[TOOL], tool_choice="required").choices[0].message
        assert Trip.model_validate_json(message.tool_calls[0].function.arguments)
    elif kind == "schema":
        given["max_tokens"] = 200
        content = litellm.completion(**given, response_format=FORMAT).choices[0].message.content
        assert Trip.model_validate_json(content)
    else:
        refused(lambda: litellm.completion(**{**given, "max_tokens": TOO_MANY}), litellm.BadRequestError)


def langchain(server: ThreadedServer, kind: str) -> None:
    from langchain_openai import ChatOpenAI

    def model(max_tokens: int) -> Any:
        given: Any = {"model": server.model, "base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0}
        return ChatOpenAI(**given, temperature=0, max_tokens=max_tokens)  # type: ignore[call-arg]

    text = MESSAGES[0]["content"]
    if kind == "plain":
        assert model(12).invoke(text).content == expected(server)
    elif kind == "stream":
        assert "".join(each.content for each in model(12).stream(text)) == expected(server)
    elif kind == "tools":
        bound = model(200).bind_tools([book], tool_choice="required", parallel_tool_calls=False)
        (call,) = bound.invoke(text).tool_calls
        assert Trip.model_validate(call["args"])
    elif kind == "schema":
        assert isinstance(model(200).with_structured_output(Trip).invoke(text), Trip)
    else:
        refused(lambda: model(TOO_MANY).invoke(text), openai.BadRequestError)


def pydantic_ai_agent(server: ThreadedServer, kind: str) -> None:
    import pydantic_ai
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(server.model, provider=OpenAIProvider(base_url=f"{server.url}/v1", api_key="none"))
    text = MESSAGES[0]["content"]

    def agent(max_tokens: int = 12, **options: Any) -> Any:
        settings: Any = {"temperature": 0, "max_tokens": max_tokens}
        return pydantic_ai.Agent(model, model_settings=settings, **options)

    async def streamed() -> str:
        async with agent().run_stream(text) as stream:
            return await stream.get_output()

    if kind == "plain":
        assert agent().run_sync(text).output == expected(server)
    elif kind == "stream":
        assert asyncio.run(streamed()) == expected(server)
    elif kind == "tools":
        output = pydantic_ai.ToolOutput(Trip, name="book")
        assert isinstance(agent(200, output_type=output).run_sync(text).output, Trip)
    elif kind == "schema":
        assert isinstance(agent(200, output_type=pydantic_ai.NativeOutput(Trip)).run_sync(text).output, Trip)
    else:
        refused(lambda: agent(TOO_MANY).run_sync(text), pydantic_ai.exceptions.ModelHTTPError)


def instructor_client(server: ThreadedServer, kind: str) -> None:
    given: Any = {"model": server.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 200, "max_retries": 0}
    mode = instructor.Mode.TOOLS if kind == "tools" else instructor.Mode.JSON_SCHEMA
    asked = instructor.from_openai(openai_client(server), mode=mode).chat.completions
    if kind in ("tools", "schema"):
        assert isinstance(asked.create(**given, response_model=Trip), Trip)
    elif kind == "plain":
        given["max_tokens"] = 12
        assert asked.create(**given, response_model=None).choices[0].message.content == expected(server)
    elif kind == "stream":
        *_, last = asked.create_partial(**given, response_model=Trip)
        assert Trip.model_validate(last.model_dump())
    else:
        given["max_tokens"] = TOO_MANY
        refused(lambda: asked.create(**given, response_model=Trip), InstructorRetryException)


def openai_agents(server: ThreadedServer, kind: str) -> None:
    import agents

    asked = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    model = agents.OpenAIResponsesModel(server.model, asked)
    text = MESSAGES[0]["content"]
    called = []

    def agent(max_tokens: int = 12, choice: str | None = None, **options: Any) -> agents.Agent:
        settings = agents.ModelSettings(temperature=0, max_tokens=max_tokens, store=False, tool_choice=choice)
        return agents.Agent("asker", model=model, model_settings=settings, **options)

    @agents.function_tool
    def book(city: Literal["Rome", "Oslo"], days: Literal[1, 2, 3]) -> str:
        """Books a trip."""
        called.append(Trip(city=city, days=days))
        return "booked"

    async def streamed() -> str:
        result = agents.Runner.run_streamed(agent(), text)
        events = [event.data async for event in result.stream_events() if event.type == "raw_response_event"]
        return "".join(event.delta for event in events if event.type == "response.output_text.delta")

    if kind == "plain":
        assert agents.Runner.run_sync(agent(), text).final_output == expected(server)
    elif kind == "stream":
        assert asyncio.run(streamed()) == expected(server)
    elif kind == "tools":
        agents.Runner.run_sync(agent(200, "required", tools=[book], tool_use_behavior="stop_on_first_tool"), text)
        assert called
    elif kind == "schema":
        assert isinstance(agents.Runner.run_sync(agent(200, output_type=Trip), text).final_output, Trip)
    else:
        refused(lambda: agents.Runner.run_sync(agent(TOO_MANY), text), openai.BadRequestError)


# ---- clients of Ollama's API, and others of OpenAI's -----------------------------------------------------------------


def ollama_client(server: ThreadedServer, kind: str) -> None:
    import ollama

    asked = ollama.Client(host=server.url)
    options = {"temperature": 0, "num_predict": 12}
    given: Any = {"model": server.model, "messages": MESSAGES, "options": options}
    if kind == "plain":
        assert asked.chat(**given).message.content == expected(server)
    elif kind == "stream":
        assert "".join(part.message.content or "" for part in asked.chat(**given, stream=True)) == expected(server)
    elif kind == "tools":
        options["num_predict"] = 200
        asking = [{"role": "user", "content": "Book a trip to Rome for 2 days."}]
        called = asked.chat(**{**given, "messages": asking}, tools=[TOOL]).message
        for call in called.tool_calls or []:
            assert Trip.model_validate(call.function.arguments)
        result = {"role": "tool", "tool_name": "book", "content": "booked"}
        assert asked.chat(**{**given, "messages": [*asking, called, result]}).message.role == "assistant"
    elif kind == "schema":
        options["num_predict"] = 200
        assert Trip.model_validate_json(asked.chat(**given, format=Trip.model_json_schema()).message.content or "")
    else:
        options["num_predict"] = TOO_MANY
        refused(lambda: asked.chat(**given), ollama.ResponseError)


def langchain_ollama(server: ThreadedServer, kind: str) -> None:
    import ollama
    from langchain_ollama import ChatOllama

    def model(num_predict: int) -> Any:
        return ChatOllama(model=server.model, base_url=server.url, temperature=0, num_predict=num_predict)

    text = MESSAGES[0]["content"]
    if kind == "plain":
        assert model(12).invoke(text).content == expected(server)
    elif kind == "stream":
        assert "".join(each.content for each in model(12).stream(text)) == expected(server)
    elif kind == "tools":
        for call in model(200).bind_tools([book]).invoke("Book a trip to Rome for 2 days.").tool_calls:
            assert Trip.model_validate(call["args"])
    elif kind == "schema":
        assert isinstance(model(200).with_structured_output(Trip, method="json_schema").invoke(text), Trip)
    else:
        refused(lambda: model(TOO_MANY).invoke(text), ollama.ResponseError)


def huggingface_client(server: ThreadedServer, kind: str) -> None:
    import huggingface_hub

    asked = huggingface_hub.InferenceClient(base_url=server.url, api_key="none").chat_completion
    given: Any = {"model": server.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
    if kind == "plain":
        assert asked(**given).choices[0].message.content == expected(server)
    elif kind == "stream":
        deltas = [each.choices[0].delta.content or "" for each in asked(**given, stream=True)]
        assert "".join(deltas) == expected(server)
    elif kind == "tools":
        given["max_tokens"] = 200
        calls = asked(**given, tools=[TOOL], tool_choice="required").choices[0].message.tool_calls
        assert Trip.model_validate_json(calls[0].function.arguments)
    elif kind == "schema":
        given["max_tokens"] = 200
        content = asked(**given, response_format=FORMAT).choices[0].message.content
        assert Trip.model_validate_json(content)
    else:
        given["max_tokens"] = TOO_MANY
        refused(lambda: asked(**given), huggingface_hub.errors.BadRequestError)


CLIENTS: dict[str, Callable[[ThreadedServer, str], None]] = {
    "openai: chat": chat,
    "openai: completions": completions,
    "openai: responses": responses,
    "anthropic": messages,
    "litellm": litellm_chat,
    "langchain-openai": langchain,
    "pydantic-ai": pydantic_ai_agent,
    "instructor": instructor_client,
    "openai-agents": openai_agents,
    "ollama": ollama_client,
    "langchain-ollama": langchain_ollama,
    "huggingface_hub": huggingface_client,
}
NO_CELL = {
    ("openai: completions", "tools"): "OpenAI's API has none",
    **{("openai: batches", kind): "\u2013" for kind in ("stream", "tools", "schema")},
}
BATCH_TESTS = "tests/batch/test_batches_api.py"
CELLS_ELSEWHERE = {
    ("openai: batches", "plain"): ("client.files.create(", "client.batches.create(", "client.files.content("),
    ("openai: batches", "errors"): ("pytest.raises(openai.",),
}
"""Texts of `BATCH_TESTS`, by cell. A batch takes a storage and a runner, which the server of this module lacks."""
CELLS = [(client, kind) for client in CLIENTS for kind in KINDS if (client, kind) not in NO_CELL]


@pytest.mark.few(15)
@pytest.mark.parametrize("cell", CELLS, ids=": ".join)
def test_a_client_gets_what_it_asks_for(server: ThreadedServer, cell: tuple[str, str]) -> None:
    client, kind = cell
    CLIENTS[client](server, kind)


@pytest.mark.parametrize("max_tokens", [6, 16, 22, 40])
def test_a_loop_goes_on_behind_calls_that_were_cut(server: ThreadedServer, max_tokens: int) -> None:
    """litellm's message objects come back as they are, whatever `max_tokens` left of their calls."""
    import litellm

    given: Any = {"model": f"hosted_vllm/{server.model}", "api_base": f"{server.url}/v1", "api_key": "none"}
    given |= {"tools": [TOOL], "tool_choice": "required", "num_retries": 0, "temperature": 0}
    messages = list(MESSAGES)
    for _ in range(3):
        message = litellm.completion(messages=messages, max_tokens=max_tokens, **given).choices[0].message
        messages.append(message)
        for call in message.tool_calls or []:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "booked"})
        messages += MESSAGES
    assert len(messages) >= 7


def test_the_page_shows_these_cells() -> None:
    page, _, _ = (ROOT / PAGE).read_text().partition("\n## ")
    rows = [re.split(r" *\| *", line.strip("| ")) for line in page.splitlines() if "|" in line]
    shown = {(row[0], kind): cell for row in rows[2:] for kind, cell in zip(rows[0][1:], row[1:], strict=True)}
    elsewhere = dict.fromkeys(CELLS_ELSEWHERE, f"[yes](../{BATCH_TESTS})")
    assert shown == dict.fromkeys(CELLS, "yes") | NO_CELL | elsewhere


@pytest.mark.parametrize("cell", CELLS_ELSEWHERE)
def test_a_cell_of_another_file_is_tested_there(cell: tuple[str, str]) -> None:
    text = (ROOT / BATCH_TESTS).read_text()
    for call in CELLS_ELSEWHERE[cell]:
        assert call in text
