"""Constraints over HTTP: the fields of a body, and what clients get from a random model under them.

The model's weights are random, so whatever fits a schema fits because of the constraint. The clients are the `openai`
package with pydantic models, its streaming helper, and `instructor`.
"""

from __future__ import annotations

import json
import pathlib
import re
import shutil
from typing import Any, Literal

import instructor
import jsonschema
import openai
import pydantic
import pytest

from manta.cluster.errors import RequestRefused
from manta.cluster.http.access.request_admission import decode
from manta.cluster.protocol.requests import ChatCompletionRequest, CompletionRequest
from manta.structured.constraint import ConstraintSpec
from manta.workers.checkpoints.model_folder import resolve_model_folder
from tests.local_server import ThreadedServer
from tests.server import Client, Server, shared_server

MESSAGES = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
UNNAMED = {"$dynamicRef": "#nowhere"}
"""A reference that names nothing, so that nothing can be enforced."""


def json_schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **more}}


# ---- fields --------------------------------------------------------------------------------------------------------


def chat_constraint(**fields: Any) -> ConstraintSpec | None:
    body = json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode()
    return decode(ChatCompletionRequest, body).sampling_params().constraint


@pytest.mark.parametrize(
    ("fields", "spec"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ConstraintSpec(kind="json_object")),
        (
            {"response_format": json_schema({"a": 1.0, "Z": [True]})},
            ConstraintSpec(kind="json_schema", text='{"a":1.0,"Z":[true]}', loose=True),
        ),
        ({"response_format": json_schema({}, strict=True)}, ConstraintSpec(kind="json_schema", text="{}")),
        ({"response_format": json_schema({}, strict=False)}, ConstraintSpec(kind="json_schema", text="{}", loose=True)),
        ({"response_format": json_schema(None)}, ConstraintSpec(kind="json_object")),
        ({"structured_outputs": {"json": {"a": 1}}}, ConstraintSpec(kind="json_schema", text='{"a":1}')),
        ({"structured_outputs": {"json": '{"a": 1}'}}, ConstraintSpec(kind="json_schema", text='{"a": 1}')),
        ({"structured_outputs": {"json": False}}, ConstraintSpec(kind="json_schema", text="false")),
        (
            {"additional_properties": "as_schema", "property_order": "any", "structured_outputs": {"json": {"a": 1}}},
            ConstraintSpec(kind="json_schema", text='{"a":1}', additional_properties="as_schema", property_order="any"),
        ),
        (
            {"structured_outputs": {"json": {"a": 1}, "disable_additional_properties": True}},
            ConstraintSpec(kind="json_schema", text='{"a":1}', additional_properties="closed"),
        ),
        ({"structured_outputs": {"regex": "a+"}}, ConstraintSpec(kind="regex", text="a+")),
        ({"structured_outputs": {"choice": ["ü", "b"]}}, ConstraintSpec(kind="choice", text='["ü","b"]')),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, ConstraintSpec(kind="lark", text='start: "a"')),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, ConstraintSpec(kind="ebnf", text='root ::= "a"')),
        (
            {"structured_outputs": {"structural_tag": {"type": "t"}}},
            ConstraintSpec(kind="structural_tag", text='{"type":"t"}'),
        ),
        (
            {"structured_outputs": {"json_object": True, "backend": "xgrammar", "disable_any_whitespace": True}},
            ConstraintSpec(kind="json_object", backend="xgrammar", any_whitespace=False),
        ),
        (
            {"structured_outputs": {"regex": "a", "loose": True}, "response_format": {"type": "text"}},
            ConstraintSpec(kind="regex", text="a", loose=True),
        ),
    ],
)
def test_fields_become_one_constraint(fields: dict[str, Any], spec: ConstraintSpec | None) -> None:
    assert chat_constraint(**fields) == spec
    body = json.dumps({"model": "m", "prompt": "x", **fields}).encode()
    assert decode(CompletionRequest, body).sampling_params().constraint == spec


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"additional_properties": "open"}, "additional_properties"),
        ({"property_order": "schema first"}, "property_order"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x"),
        ({"response_format": json_schema([])}, "response_format.json_schema.schema"),
        ({"response_format": json_schema({}, colour=1)}, "response_format.json_schema.colour"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "colour": 1}}, "structured_outputs.colour"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1]"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
        ),
    ],
)
def test_a_mistake_names_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        chat_constraint(**fields)
    assert caught.value.refusal.field == param


# ---- a live server -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Server:
    return shared_server()


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


class Trip(pydantic.BaseModel):
    """A trip."""

    city: Literal["Rome", "Oslo"]
    days: int = pydantic.Field(ge=1, le=9)


class Switch(pydantic.BaseModel):
    """A switch."""

    on: bool


def common(server: Client, seed: int = 1, **more: Any) -> dict[str, Any]:
    return {"model": server.model, "messages": MESSAGES, "seed": seed, **more}


def test_a_model_invents_no_properties(client: openai.OpenAI, server: Server) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2]}}}
    names: dict[str, set[str]] = {}
    for reading in ("closed", "as_schema"):
        for seed in range(4):
            reply = client.chat.completions.create(
                **common(server, seed),
                temperature=1.5,
                max_tokens=60,
                response_format={"type": "json_schema", "json_schema": {"name": "trip", "schema": schema}},
                extra_body={} if reading == "closed" else {"additional_properties": reading, "property_order": "any"},
            )
            text = reply.choices[0].message.content or ""
            names.setdefault(reading, set()).update(re.findall(r'"([^"]*)"\s*:', text))
            if reading == "closed":
                assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
    assert names["closed"] <= set(schema["properties"])
    assert names["as_schema"] - set(schema["properties"])


def test_the_clients_parse_gives_pydantic_models(client: openai.OpenAI, server: Server) -> None:
    for seed in range(3):
        reply = client.chat.completions.parse(**common(server, seed), response_format=Trip)
        assert isinstance(reply.choices[0].message.parsed, Trip)
        assert reply.choices[0].finish_reason == "stop"
        assert (reply.choices[0].model_extra or {})["stop_reason"] is None
    with client.chat.completions.stream(**common(server), response_format=Trip) as stream:
        contents = [event.snapshot for event in stream if event.type == "content.delta"]
        assert len(contents) > 1, "a busy client gets several tokens at once, but not all"
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Trip)
    assert final.choices[0].message.content == contents[-1]


def test_every_kind_of_constraint_holds(client: openai.OpenAI, server: Server) -> None:
    def text(**outputs: Any) -> str:
        fields = {"structured_outputs": {"disable_any_whitespace": True, **outputs}}
        reply = client.completions.create(
            model=server.model, prompt="Hello", max_tokens=300, seed=2, temperature=1.5, extra_body=fields
        )
        assert reply.choices[0].finish_reason == "stop"
        return reply.choices[0].text

    jsonschema.validate(json.loads(text(json=SCHEMA)), SCHEMA)
    assert re.fullmatch(r"[a-f]{3}-\d{2}", text(regex=r"[a-f]{3}-[0-9]{2}"))
    assert text(choice=["yes", "no", "perhaps"]) in ("yes", "no", "perhaps")
    assert re.fullmatch(r"(ab){1,4}", text(grammar='start: "ab"{1,4}'))
    assert re.fullmatch(r"x+", text(grammar='root ::= "x" | "xx" | "xxx"'))
    reply = client.chat.completions.create(
        **common(server, temperature=0.5), response_format={"type": "json_object"}, logit_bias={"34": 1}
    )
    if reply.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(reply.choices[0].message.content), dict)


STRICT = {"parameters": {"properties": {"a": UNNAMED}}, "strict": True}
REFUSALS = [
    ({"response_format": json_schema({"type": "strnig"})}, "response_format.json_schema.schema", "strnig"),
    ({"response_format": json_schema(UNNAMED, strict=True)}, "response_format.json_schema.schema", "$dynamicRef"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", ""),
    ({"structured_outputs": {"regex": r"(a)\1"}}, "structured_outputs.regex", r"backreference \1 at position 3"),
    ({"structured_outputs": {"regex": "a++b"}}, "structured_outputs.regex", "possessive quantifier ++ at position 1"),
    ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex", "nothing satisfies it"),
    ({"structured_outputs": {"grammar": "start: b"}}, "structured_outputs.grammar", "b"),
    ({"structured_outputs": {"regex": "a", "backend": "nobody"}}, "structured_outputs.regex", "nobody"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", **STRICT}}]},
        "tools[0].function.parameters",
        "$dynamicRef",
    ),
    (
        {
            "tools": [
                {"type": "function", "function": {"name": "f"}},
                {"type": "function", "function": {"name": "g", **STRICT}},
            ]
        },
        "tools[1].function.parameters",
        "$dynamicRef",
    ),
]


@pytest.mark.parametrize(("fields", "param", "word"), REFUSALS)
def test_what_cannot_be_enforced_is_refused_by_name(
    server: Server, fields: dict[str, Any], param: str, word: str
) -> None:
    for stream in (False, True):
        status, _, answer = server.post("/v1/chat/completions", {**common(server), **fields, "stream": stream})
        assert (status, answer["error"]["param"]) == (400, param), answer
        assert answer["error"]["message"].startswith(param)
        assert word in answer["error"]["message"]


@pytest.mark.parametrize("given", [{}, {"strict": False}], ids=str)
def test_a_loose_request_hears_what_is_not_enforced(
    server: Server, client: openai.OpenAI, given: dict[str, Any]
) -> None:
    properties = {"city": {"enum": ["Rome", "Oslo"]}, "a": UNNAMED}
    schema = {"type": "object", "properties": properties, "required": ["city"], "additionalProperties": False}
    strict = json_schema(schema, **given)
    status, headers, answer = server.post("/v1/chat/completions", {**common(server), "response_format": strict})
    assert status == 200, answer
    assert "$dynamicRef" in headers["x-manta-not-enforced"]
    assert re.match(r'\{\s*"city"\s*:\s*"(Rome|Oslo)"', answer["choices"][0]["message"]["content"])
    raw = client.chat.completions.with_raw_response.create(**common(server), response_format=strict, stream=True)
    assert "$dynamicRef" in raw.headers["x-manta-not-enforced"]
    status, headers, _ = server.post(
        "/v1/chat/completions", {**common(server), "response_format": json_schema(SCHEMA, **given)}
    )
    assert status == 200
    assert "x-manta-not-enforced" not in headers
    bad = json_schema({"type": "strnig"}, **given)
    status, _, answer = server.post("/v1/chat/completions", {**common(server), "response_format": bad})
    assert (status, answer["error"]["param"]) == (400, "response_format.json_schema.schema")
    assert "Traceback" not in answer["error"]["message"]


@pytest.mark.parametrize("pattern", [r"(?!a)[a-c]{3}(?<!b)", r"[ab]+?\b [a-c]{1,3}\b", r"(?=.*[0-9])[a-z0-9]{4,6}"])
def test_a_regex_that_looks_around_holds(client: openai.OpenAI, server: Server, pattern: str) -> None:
    for seed in range(3):
        outputs = {"structured_outputs": {"regex": pattern}}
        reply = client.chat.completions.create(**common(server, seed), extra_body=outputs)
        assert re.fullmatch(pattern, reply.choices[0].message.content), reply


# ---- tools ---------------------------------------------------------------------------------------------------------

TOOLS = [openai.pydantic_function_tool(Trip), openai.pydantic_function_tool(Switch)]
MODELS = {"Trip": Trip, "Switch": Switch}
NAMED = {"type": "function", "function": {"name": "Switch"}}


def test_calls_are_made_as_the_choice_says(client: openai.OpenAI, server: Server) -> None:
    counts = set()
    for seed in range(4):
        for choice, parallel in [("required", True), ("required", False), (NAMED, True)]:
            reply = client.chat.completions.parse(
                **common(server, seed), tools=TOOLS, tool_choice=choice, parallel_tool_calls=parallel
            )
            calls = reply.choices[0].message.tool_calls
            for call in calls:
                assert isinstance(call.function.parsed_arguments, MODELS[call.function.name])
                assert re.fullmatch(r"call_\w+", call.id)
            assert reply.choices[0].message.content is None
            assert reply.choices[0].finish_reason == ("stop" if choice == NAMED else "tool_calls")
            if choice == NAMED:
                assert [call.function.name for call in calls] == ["Switch"]
            counts.add((parallel and choice != NAMED, len(calls)))
    assert {count for parallel, count in counts if not parallel} == {1}
    free = client.chat.completions.create(**common(server, max_tokens=20), tools=TOOLS, tool_choice="none")
    assert free.choices[0].message.tool_calls is None
    auto = client.chat.completions.create(**common(server, max_tokens=20), tools=TOOLS)
    assert auto.choices[0].message.content


def test_streamed_calls_add_up(client: openai.OpenAI, server: Server) -> None:
    fields = {**common(server, seed=3), "tools": TOOLS, "tool_choice": "required"}
    whole = client.chat.completions.create(**fields).choices[0].message.tool_calls
    events = []
    with client.chat.completions.stream(**fields) as stream:
        events += stream
        final = stream.get_final_completion().choices[0]
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert len(deltas) > len(done) == len(whole)
    assert final.finish_reason == "tool_calls"
    for call, event, expected in zip(final.message.tool_calls, done, whole, strict=True):
        assert isinstance(event.parsed_arguments, MODELS[event.name])
        assert (call.function.name, call.function.arguments) == (expected.function.name, expected.function.arguments)


def test_a_conversation_goes_on_after_a_call(client: openai.OpenAI, server: Server) -> None:
    first = client.chat.completions.create(**common(server), tools=TOOLS, tool_choice=NAMED).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "done"}
    messages = [*MESSAGES, first.model_dump(exclude_none=True), result]
    reply = client.chat.completions.create(**common(server) | {"messages": messages, "max_tokens": 5}, tools=TOOLS)
    assert reply.usage.prompt_tokens > 20


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA], ids=lambda mode: mode.name)
def test_instructor_works(client: openai.OpenAI, server: Server, mode: instructor.Mode) -> None:
    patched = instructor.from_openai(client, mode=mode)
    for seed in range(3):
        found = patched.chat.completions.create(**common(server, seed), response_model=Trip, max_retries=0)
        assert isinstance(found, Trip)


# ---- a model with marks --------------------------------------------------------------------------------------------

THINKING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}<tool_call>{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The demo model, whose tokenizer has marks as special tokens, under a template of a model that may think."""
    folder = tmp_path_factory.mktemp("thinking")
    demo = pathlib.Path(resolve_model_folder("demo"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, folder / name)
    (folder / "chat_template.jinja").write_text(THINKING)
    server = ThreadedServer(f"engine.tokenizer={folder}", folder=demo)
    yield server
    server.stop()


def test_constraints_and_calls_come_behind_the_reasoning(thinking: ThreadedServer) -> None:
    client = openai.OpenAI(base_url=thinking.url + "/v1", api_key="none", max_retries=0)
    end = 4  # </think>
    fields = common(thinking, logit_bias={str(end): 30, "2": -100})
    outputs = {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}
    reply = client.chat.completions.create(**fields, extra_body=outputs)
    jsonschema.validate(json.loads(reply.choices[0].message.content), SCHEMA)
    shut = client.chat.completions.create(
        **common(thinking), extra_body={**outputs, "chat_template_kwargs": {"enable_thinking": False}}
    )
    jsonschema.validate(json.loads(shut.choices[0].message.content), SCHEMA)
    assert not hasattr(shut.choices[0].message, "reasoning_content")
    assert shut.usage.prompt_tokens > reply.usage.prompt_tokens
    called = (
        client.chat.completions.parse(**fields, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
        .choices[0]
        .message
    )
    assert all(isinstance(call.function.parsed_arguments, MODELS[call.function.name]) for call in called.tool_calls)
    assert called.content is None


END_OF_THOUGHTS, BUDGETS = 4, (0, 1, 20, None)
TWO_CITIES = {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}


def thinking_tokens(token_ids: list[int]) -> int:
    return token_ids.index(END_OF_THOUGHTS) if END_OF_THOUGHTS in token_ids else len(token_ids)


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_bound_on_thinking_is_exact_whole_and_streamed(thinking: ThreadedServer, budget: int | None) -> None:
    body = common(thinking, n=2, max_tokens=60, return_token_ids=True, **TWO_CITIES)
    body["logit_bias"] = {str(END_OF_THOUGHTS): 30} if budget is None else {}
    body |= {} if budget is None else {"thinking_token_budget": budget}
    status, _, whole = thinking.post("/v1/chat/completions", body)
    assert status == 200, whole
    for choice in whole["choices"]:
        assert budget is None or thinking_tokens(choice["token_ids"]) == budget
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    pieces: list[dict[str, str]] = [{"content": "", "reasoning_content": ""} for _ in range(2)]
    client = openai.OpenAI(base_url=thinking.url + "/v1", api_key="none", max_retries=0)
    for event in client.post(
        "/chat/completions", body=body | {"stream": True}, cast_to=object, stream=True, stream_cls=openai.Stream[Any]
    ):
        for choice in event["choices"]:
            for name, piece in pieces[choice["index"]].items():
                pieces[choice["index"]][name] = piece + (choice["delta"].get(name) or "")
    for choice, streamed in zip(whole["choices"], pieces, strict=True):
        assert streamed["content"] == choice["message"]["content"]
        assert streamed["reasoning_content"] == choice["message"].get("reasoning_content", "")


def test_every_api_bounds_thinking_by_its_own_field(thinking: ThreadedServer) -> None:
    """Of the chat, all forms of the same bound are the same request."""
    forms: list[dict[str, Any]] = [
        {"thinking_token_budget": 3},
        {"reasoning": {"max_tokens": 3}},
        {"thinking_token_budget": 0},
        {"reasoning": {"effort": "none"}, "chat_template_kwargs": {"enable_thinking": True}},
        {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
    ]
    bodies = [common(thinking, max_tokens=60, return_token_ids=True, **TWO_CITIES, **form) for form in forms]
    ids = [thinking.post("/v1/chat/completions", body)[2]["choices"][0]["token_ids"] for body in bodies]
    assert list(map(thinking_tokens, ids)) == [3, 3, 0, 0, 0]
    assert (ids[0], ids[2], ids[2]) == (ids[1], ids[3], ids[4])
    output = {"format": {"type": "json_schema", "schema": SCHEMA}}
    body = {"model": thinking.model, "max_tokens": 90, "messages": MESSAGES, "output_config": output}
    status, _, message = thinking.post("/v1/messages", {**body, "thinking": {"type": "enabled", "budget_tokens": 3}})
    assert (status, message["content"][0]["type"]) == (200, "thinking"), message
    text = {"format": {"type": "json_schema", "name": "trip", "schema": SCHEMA, "strict": True}}
    body = {"model": thinking.model, "max_output_tokens": 90, "input": "Hello", "text": text}
    status, _, response = thinking.post("/v1/responses", {**body, "reasoning": {"max_tokens": 3}})
    assert (status, response["reasoning"]["max_tokens"]) == (200, 3), response
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]


def test_a_completion_bounds_each_prompt_that_thinks(thinking: ThreadedServer) -> None:
    prompts = ["So.\n<think>Hm", "So.\n<think>Hm</think>"]
    body = {"model": thinking.model, "prompt": prompts, "max_tokens": 9, "seed": 1, "return_token_ids": True}
    status, _, answer = thinking.post("/v1/completions", {**body, "thinking_token_budget": 2, "temperature": 1})
    assert status == 200, answer
    inside, closed = (choice["token_ids"] for choice in answer["choices"])
    assert thinking_tokens(inside) == 2
    assert thinking_tokens(closed) == len(closed)


@pytest.mark.parametrize(
    ("fields", "kind", "field"),
    [
        ({"thinking_token_budget": -2}, "out_of_range", "thinking_token_budget"),
        ({"reasoning": {"max_tokens": -2}}, "out_of_range", "reasoning.max_tokens"),
        ({"reasoning": {"max_tokens": 1}, "thinking_token_budget": 1}, "excludes", "reasoning.max_tokens"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "excludes", "reasoning.effort"),
        ({"guided_choice": []}, "empty", "guided_choice"),
    ],
)
def test_fields_without_a_meaning_are_refused(fields: dict[str, Any], kind: str, field: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        chat_constraint(**fields)
    assert (caught.value.refusal.kind, caught.value.refusal.field) == (kind, field)


def test_a_model_that_does_not_think_keeps_any_bound(server: Server) -> None:
    for path, fields in (("/v1/chat/completions", {"messages": MESSAGES}), ("/v1/completions", {"prompt": "Hello"})):
        body = {"model": server.model, "max_tokens": 2, "thinking_token_budget": 1, **fields}
        status, headers, _ = server.post(path, body)
        assert (status, headers["x-manta-ignored"]) == (200, "thinking_token_budget")
    thinks = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2, "messages": MESSAGES}
    status, headers, _ = server.post("/v1/messages", {"model": server.model, **thinks})
    assert (status, headers["x-manta-ignored"]) == (200, "thinking.budget_tokens")


def test_a_spontaneous_call_is_completed_by_the_grammar(thinking: ThreadedServer) -> None:
    client = openai.OpenAI(base_url=thinking.url + "/v1", api_key="none", max_retries=0)
    begin = 5  # <tool_call>
    for seed in range(3):
        with client.chat.completions.stream(
            **common(thinking, seed, logit_bias={str(begin): 40}),
            tools=TOOLS,
            parallel_tool_calls=False,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        ) as stream:
            choice = stream.get_final_completion().choices[0]
        (call,) = choice.message.tool_calls
        assert isinstance(call.function.parsed_arguments, MODELS[call.function.name])
        assert (choice.finish_reason, choice.message.content or "") == ("tool_calls", "")
