"""Ollama's Python client against Manta's endpoints: chats and completions, options, tools, errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import ollama
import pytest

from manta.cluster.config import ServeConfig
from manta.cluster.http.app import HttpApp
from manta.cluster.http.exchange.metrics import Metrics
from manta.cluster.protocol.ollama import API_VERSION
from manta.cluster.text.tokenizer import Tokenizer
from tests.http.test_routes import Repeating, RepeatingEngines
from tests.server import shared_server

MESSAGES = [{"role": "user", "content": "Count."}]
GREEDY = {"temperature": 0, "num_predict": 12}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}


def client() -> ollama.Client:
    return ollama.Client(host=shared_server().url)


def by_openai(**body: Any) -> dict[str, Any]:
    """What the chat endpoint answers to the same."""
    server = shared_server()
    body = {"model": server.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 12, **body}
    status, _, answer = server.post("/v1/chat/completions", body)
    assert status == 200, answer
    return answer


def test_a_chat_is_answered_as_openais() -> None:
    model, expected = shared_server().model, by_openai()
    answer = client().chat(model=model, messages=MESSAGES, options=GREEDY)
    assert answer.message.role == "assistant"
    assert answer.message.content == expected["choices"][0]["message"]["content"]
    assert (answer.done, answer.done_reason) == (True, expected["choices"][0]["finish_reason"])
    assert answer.prompt_eval_count == expected["usage"]["prompt_tokens"]
    assert answer.eval_count == expected["usage"]["completion_tokens"]
    assert answer.total_duration is not None
    assert answer.total_duration >= (answer.eval_duration or 0) > 0

    parts = list(client().chat(model=f"{model}:latest", messages=MESSAGES, options=GREEDY, stream=True))
    assert "".join(part.message.content or "" for part in parts) == answer.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == answer.eval_count


def test_a_prompt_is_templated_or_raw() -> None:
    model = shared_server().model
    system = [{"role": "system", "content": "Be brief."}]
    expected = by_openai(messages=system + MESSAGES)["choices"][0]["message"]["content"]
    answer = client().generate(model=model, prompt="Count.", system="Be brief.", options=GREEDY)
    assert answer.response == expected
    parts = client().generate(model=model, prompt="Count.", system="Be brief.", options=GREEDY, stream=True)
    assert "".join(part.response for part in parts) == expected

    body = {"model": model, "prompt": "Count.", "temperature": 0, "max_tokens": 12, "add_special_tokens": False}
    _, _, completion = shared_server().post("/v1/completions", body)
    raw = client().generate(model=model, prompt="Count.", raw=True, options=GREEDY)
    assert raw.response == completion["choices"][0]["text"]
    without_limit = client().generate(model=model, prompt="Count.", raw=True, options={"stop": ["zzz"], "seed": 1})
    assert (without_limit.eval_count or 0) != 16, "OpenAI's default for completions is not Ollama's"


def test_a_format_constrains_the_answer() -> None:
    model = shared_server().model
    for form in ("json", SCHEMA):
        answer = client().chat(model=model, messages=MESSAGES, format=form, options={"seed": 3, "num_predict": 400})
        if answer.done_reason == "stop":
            assert isinstance(json.loads(answer.message.content or ""), dict)
    assert 0 <= json.loads(answer.message.content or "")["n"] <= 9 or answer.done_reason == "length"


def test_the_model_is_listed_and_shown() -> None:
    server = shared_server()
    (model,) = client().list().models
    assert model.model == server.model
    shown = client().show(server.model)
    assert shown.capabilities == ["completion", "tools"]
    assert (shown.modelinfo or {})["manta.context_length"] == 512
    assert shown.template == Tokenizer(server.folder).chat_template_source()
    version = httpx.get(f"{server.url}/api/version", trust_env=False).json()
    assert version == {"version": API_VERSION}
    (running,) = client().ps().models
    assert (running.model, running.context_length) == (server.model, 512)


def test_an_empty_request_confirms_the_model() -> None:
    model = shared_server().model
    assert client().generate(model=model, keep_alive="5m").done_reason == "load"
    for nothing in (0, "0", "0s", "0m"):
        assert client().generate(model=model, keep_alive=nothing).done_reason == "unload"
    assert client().chat(model=model, messages=[]).done_reason == "load"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"options": {"temperature": 9}}, ["options.temperature", "2"]),
        ({"options": {"num_predict": 100_000}}, ["options.num_predict 100000 exceeds"]),
        ({"options": {"stop": ["x" * 4000] * 20}}, ["options.stop has 80000 characters"]),
        ({"options": {"mirostat": 1}}, ["options.mirostat 1 is not supported"]),
        ({"logprobs": True}, ["ask /v1/chat/completions for them"]),
        ({"model": "gpt-9"}, ["'gpt-9' is not served here"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_name_ollamas_fields(body: dict[str, Any], words: list[str], stream: bool) -> None:
    given = {"model": shared_server().model, "messages": MESSAGES, "stream": stream, **body}
    with pytest.raises(ollama.ResponseError) as caught:
        list(client().chat(**given))
    for word in words:
        assert word in str(caught.value)


# ---- tools, without an engine --------------------------------------------------------------------------------------

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


class Once(Repeating):
    """Says its text once, whole."""

    async def __aiter__(self) -> Any:
        events = [event async for event in super().__aiter__()]
        events[-1].text = ""
        for event in events:
            yield event


class CallingEngines(RepeatingEngines):
    async def submit(self, request: Any, meter: Any = None) -> Repeating:
        self.request = request
        return Once(request.prompts, CALL)


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One number.
        b: Another one.
    """
    return a + b


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_and_its_answer_round_trip(stream: bool) -> None:
    engines = CallingEngines()
    app: Any = HttpApp(ServeConfig(), Tokenizer("demo"), engines, Metrics("demo"))

    async def converse() -> None:
        client = ollama.AsyncClient(host="http://localhost", transport=httpx.ASGITransport(app))
        messages: list[Any] = [{"role": "user", "content": "What is 1 + 2?"}]
        answer = await client.chat(model="demo", messages=messages, tools=[add], stream=stream)
        parts = [part async for part in answer] if stream else [answer]
        (message,) = [part.message for part in parts if part.message.tool_calls]
        (call,) = message.tool_calls
        assert (call.function.name, call.function.arguments) == ("add", {"a": 1, "b": 2})
        assert parts[-1].done_reason == "length"
        messages += [message, {"role": "tool", "content": str(add(**call.function.arguments)), "tool_name": "add"}]
        await client.chat(model="demo", messages=messages, tools=[add])
        prompt = Tokenizer("demo").decode(engines.request.prompts[0], skip_special_tokens=False)
        assert '"arguments": {"a": 1, "b": 2}' in prompt
        assert prompt.rindex("3") > prompt.rindex('"b": 2')

    asyncio.run(converse())
