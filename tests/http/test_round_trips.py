"""What the server sent comes back: an answer of any kind, cut after any token, is part of a conversation as it is.

An engine's place is taken by a text that ends after so many tokens, so each API, each format of calls and each cut is
tried in this process.
"""

from __future__ import annotations

import asyncio
import functools
import json
import pathlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import pytest

from manta.cluster.chat.tool_formats import HERMES, ToolFormat
from manta.cluster.config import ServeConfig
from manta.cluster.engine.request import FinishStatus, Usage
from manta.cluster.http.app import HttpApp
from manta.cluster.http.exchange.engines import Event, GenerationRequest
from manta.cluster.http.exchange.metrics import Metrics
from manta.cluster.text.tokenizer import Tokenizer
from tests.conftest import PROVE
from tests.http.test_routes import RepeatingEngines
from tests.tool_formats import TOOLS, WRITERS, Call, template_of, tokenizer_folder

CALLS: list[Call] = [("log", {"text": 'say "é"\n', "level": 3}), ("stop_all", {})]
USER = {"role": "user", "content": "log it"}
LEAD = "Well: 1 < 2. "


class Begun:
    """An answer that ends behind these tokens, at its limit or by itself."""

    ended_at = 1
    num_choices = 1

    def __init__(self, tokenizer: Tokenizer, request: GenerationRequest, token_ids: list[int], is_cut: bool) -> None:
        self.usages = [Usage(len(request.prompts[0]), len(token_ids), 0)]
        self._decoder = tokenizer.text_decoder(True, False, request.shown_ids)
        self._token_ids, self._is_cut = token_ids, is_cut

    async def __aiter__(self) -> AsyncIterator[Event]:
        for number, token_id in enumerate(self._token_ids, 1):
            is_last = number == len(self._token_ids)
            event = Event(index=0, text=self._decoder.decode((token_id,), is_last), token_ids=[token_id])
            if is_last:
                event.finish = FinishStatus.FINISHED_LENGTH if self._is_cut else FinishStatus.FINISHED_STOPPED
            yield event

    def close(self) -> None:
        pass


class BegunEngines(RepeatingEngines):
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.token_ids: list[int] = []
        self.is_cut = True

    async def submit(self, request: GenerationRequest, meter: Any = None) -> Any:
        self.request = request
        return Begun(self._tokenizer, request, self.token_ids, self.is_cut)


class World:
    """An application whose model writes its calls in one format."""

    def __init__(self, form: ToolFormat, folder: pathlib.Path, has_marks: bool) -> None:
        template = template_of(form)
        if form.argument:  # such models' templates go through the arguments
            members = "{% for key, value in call.function.arguments | items %}{{ key }}={{ value }}{% endfor %}"
            template = template.replace("{{ call.function.arguments | tojson }}", members)
            assert "| items" in template
        self.form = form
        self.tokenizer = Tokenizer(tokenizer_folder(folder, template, has_marks))
        self.engines = BegunEngines(self.tokenizer)
        app: Any = HttpApp(ServeConfig(), self.tokenizer, self.engines, Metrics("demo"))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost", trust_env=False)

    def calls(self) -> list[Call]:
        return CALLS[:1] if self.form.calls == "one" else CALLS

    def lead(self) -> str:
        """The text before the calls."""
        return "" if self.form.is_bare or self.form.is_channel else LEAD

    def tokens(self) -> list[int]:
        before = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant" if self.form.is_channel else self.lead()
        return self.tokenizer.encode(before + WRITERS[self.form](self.calls()), add_special_tokens=False)

    async def ask(self, path: str, body: dict[str, Any]) -> str:
        answer = await self.client.post(path, json={"model": "demo", **body})
        assert answer.status_code == 200, (path, body, answer.text)
        return answer.text


def events_of(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


Trip = tuple[str, list[tuple[str, Any]]]
"""The text of an answer, and the names and arguments of its calls."""


async def chat_trip(world: World, streams: bool) -> Trip:
    body: dict[str, Any] = {"messages": [USER], "tools": TOOLS}
    text = await world.ask("/v1/chat/completions", {**body, "stream": streams})
    message = _joined(events_of(text)) if streams else json.loads(text)["choices"][0]["message"]
    calls = message.get("tool_calls") or []
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in calls]
    await world.ask("/v1/chat/completions", {**body, "messages": [USER, message, *results, USER]})
    await world.ask("/v1/chat/completions", {**body, "messages": [USER, message, USER]})
    return message["content"] or "", [(each["function"]["name"], each["function"]["arguments"]) for each in calls]


def _joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """A streamed message, with the fields that a client joins."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: list[dict[str, Any]] = []
    for delta in [choice["delta"] for chunk in chunks for choice in chunk["choices"]]:
        message["content"] += delta.get("content") or ""
        if "reasoning_content" in delta:
            message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
        for call in delta.get("tool_calls") or []:
            if call["index"] == len(calls):
                calls.append(call)
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return {**message, **({"tool_calls": calls} if calls else {})}


async def responses_trip(world: World, streams: bool) -> Trip:
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body: dict[str, Any] = {"input": [USER], "tools": tools, "store": False}
    text = await world.ask("/v1/responses", {**body, "stream": streams})
    output = events_of(text)[-1]["response"]["output"] if streams else json.loads(text)["output"]
    calls = [item for item in output if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": each["call_id"], "output": "done"} for each in calls]
    await world.ask("/v1/responses", {**body, "input": [USER, *output, *results, USER]})
    texts = [part["text"] for item in output if item["type"] == "message" for part in item["content"]]
    return "".join(texts), [(each["name"], each["arguments"]) for each in calls]


async def messages_trip(world: World, streams: bool) -> Trip:
    functions = [tool["function"] for tool in TOOLS]
    tools = [{"name": each["name"], "input_schema": each.get("parameters", {"type": "object"})} for each in functions]
    body: dict[str, Any] = {"messages": [USER], "tools": tools, "max_tokens": 90, "thinking": {"type": "adaptive"}}
    text = await world.ask("/v1/messages", {**body, "stream": streams})
    content = _blocks(events_of(text)) if streams else json.loads(text)["content"]
    calls = [block for block in content if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": block["id"], "content": "done"} for block in calls]
    last = {"role": "user", "content": [*results, {"type": "text", "text": "go on"}]}
    await world.ask("/v1/messages", {**body, "messages": [USER, {"role": "assistant", "content": content}, last]})
    texts = [block["text"] for block in content if block["type"] == "text"]
    return "".join(texts), [(block["name"], block["input"]) for block in calls]


def _blocks(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            for field, mine in (("text", "text"), ("thinking", "thinking"), ("partial_json", "json")):
                if field in delta:
                    blocks[-1][mine] += delta[field]
    for block in blocks:
        written = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = _whole(written) or {}
    return blocks


def _whole(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


async def ollama_trip(world: World, streams: bool) -> Trip:
    body: dict[str, Any] = {"messages": [USER], "tools": TOOLS}
    lines = [json.loads(line) for line in (await world.ask("/api/chat", {**body, "stream": streams})).splitlines()]
    assert lines[-1]["done"]
    message: dict[str, Any] = {"role": "assistant", "content": "".join(each["message"]["content"] for each in lines)}
    for field, empty in (("thinking", ""), ("tool_calls", [])):
        parts = [each["message"][field] for each in lines if each["message"].get(field)]
        if parts:
            message[field] = functools.reduce(lambda one, other: one + other, parts, empty)
    calls = message.get("tool_calls", [])
    results = [{"role": "tool", "tool_name": each["function"]["name"], "content": "done"} for each in calls]
    await world.ask("/api/chat", {**body, "messages": [USER, message, *results, USER], "stream": False})
    return message["content"], [(each["function"]["name"], each["function"]["arguments"]) for each in calls]


TRIPS: dict[str, Callable[[World, bool], Any]] = {
    "chat": chat_trip,
    "responses": responses_trip,
    "messages": messages_trip,
    "ollama": ollama_trip,
}


def check(world: World, trip: Trip, is_whole: bool) -> None:
    content, calls = trip
    assert world.lead().startswith(content.rstrip()), content
    written = world.calls()
    assert len(calls) <= len(written)
    for number, ((name, given), (wanted, arguments)) in enumerate(zip(calls, written, strict=False)):
        assert name == wanted
        if is_whole or number < len(calls) - 1:
            assert (json.loads(given) if isinstance(given, str) else given) == arguments
    if is_whole:
        assert len(calls) == len(written)
        assert content.rstrip() == world.lead().rstrip()


async def trips(world: World, apis: Sequence[str], step: int) -> int:
    """Takes APIs along, with answers that end after every `step` tokens."""
    tokens = world.tokens()
    for length in range(1, len(tokens) + 1):
        world.engines.token_ids = tokens[:length]
        world.engines.is_cut = length < len(tokens)
        for number, api in enumerate(apis):
            for streams in (False, True):
                if length == len(tokens) or (length + 2 * number + streams) % step == 0:
                    check(world, await TRIPS[api](world, streams), length == len(tokens))
    return len(tokens)


@pytest.mark.few(6)
@pytest.mark.parametrize("form", WRITERS, ids=lambda form: form.name)
def test_every_answer_comes_back_wherever_it_is_cut(form: ToolFormat, tmp_path: pathlib.Path) -> None:
    world = World(form, tmp_path, has_marks=True)
    assert asyncio.run(trips(world, list(TRIPS), 1 if PROVE else 23)) > 10


SPELT = [form for form in WRITERS if form.begin.isascii() and not form.is_channel]
"""Formats whose marks some tokenizers have no tokens for. The others' models need them."""


@pytest.mark.few(5)
@pytest.mark.parametrize("form", SPELT, ids=lambda form: form.name)
def test_no_part_of_a_mark_is_text(form: ToolFormat, tmp_path: pathlib.Path) -> None:
    world = World(form, tmp_path, has_marks=False)
    assert asyncio.run(trips(world, list(TRIPS) if PROVE else ["chat"], 1 if PROVE else 7)) > 10


OPENED: dict[str, Any] = {"role": "assistant", "content": None}
CALL_ID = {"id": "call_1", "type": "function"}
MESSAGES: dict[str, tuple[dict[str, Any], str]] = {
    "arguments that are empty": (
        {**OPENED, "tool_calls": [{**CALL_ID, "function": {"name": "f", "arguments": ""}}]},
        "f {}",
    ),
    "arguments that are null": (
        {**OPENED, "tool_calls": [{**CALL_ID, "function": {"name": "f", "arguments": None}}]},
        "f {}",
    ),
    "arguments that are cut": (
        {**OPENED, "tool_calls": [{**CALL_ID, "function": {"name": "f", "arguments": '{"a": "b\\'}}]},
        'f {"a": "b\\',
    ),
    "arguments that are no object": (
        {**OPENED, "tool_calls": [{**CALL_ID, "function": {"name": "f", "arguments": '"Rome"'}}]},
        'f "Rome"',
    ),
    "reasoning": ({**OPENED, "reasoning": "hm", "content": "yes"}, "<hm>yes"),
    "reasoning_content": ({**OPENED, "reasoning_content": "hm", "content": "yes"}, "<hm>yes"),
    "a refusal": ({**OPENED, "refusal": "I cannot"}, "I cannot"),
    "a part that is a refusal": ({**OPENED, "content": [{"type": "refusal", "refusal": "I cannot"}]}, "I cannot"),
    "nothing": (OPENED, ""),
    "no parts": ({**OPENED, "content": []}, ""),
}
"""Messages of the assistant, each with what the model reads."""


@pytest.mark.parametrize("name", MESSAGES)
def test_the_model_reads_what_a_message_says(name: str, tmp_path: pathlib.Path) -> None:
    message, expected = MESSAGES[name]
    template = template_of(HERMES).replace(
        "{{ message.role }}\n",
        "{{ message.role }}\n{% if message.reasoning_content %}<{{ message.reasoning_content }}>{% endif %}",
    )
    tokenizer = Tokenizer(tokenizer_folder(tmp_path, template))
    engines = BegunEngines(tokenizer)
    engines.token_ids = [1]
    app: Any = HttpApp(ServeConfig(), tokenizer, engines, Metrics("demo"))

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", trust_env=False) as client:
            return await client.post("/v1/chat/completions", json={"model": "demo", "messages": [USER, message]})

    answer = asyncio.run(ask())
    assert answer.status_code == 200, answer.text
    read = tokenizer.decode(engines.request.prompts[0], skip_special_tokens=False)
    assert read.split("assistant\n")[1].removeprefix("call_1 ").startswith(f"{expected}<|im_end|>"), read
