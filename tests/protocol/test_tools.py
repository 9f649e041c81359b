"""Tools: requests that make sense, grammars under which any model's calls parse, and a parser that no cut confuses."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import llguidance
import llguidance.numpy
import msgspec
import numpy as np
import openai.types.chat as openai_chat
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.cluster.chat.argument_forms import argument_forms
from manta.cluster.chat.plan import plan_chat
from manta.cluster.chat.reader import ChatReader, MessageBuilder
from manta.cluster.chat.tool_formats import HERMES, LLAMA3, MISTRAL, ToolFormat, detect_format
from manta.cluster.chat.tool_grammar import calls_grammar
from manta.cluster.chat.tool_parser import Piece, ToolCallParser
from manta.cluster.engine.request import FinishStatus
from manta.cluster.errors import RequestRefused
from manta.cluster.http.access.request_admission import decode
from manta.cluster.http.exchange.codec import encode
from manta.cluster.protocol import responses
from manta.cluster.protocol.requests import ChatCompletionRequest
from manta.cluster.protocol.response_items import chat_messages
from manta.cluster.protocol.responses import usage_info
from manta.cluster.protocol.tools import Function, Tool, arguments_schema, template_tools
from manta.cluster.text.chat_template import ChatTemplates
from manta.cluster.text.tokenizer import Tokenizer
from manta.structured.constraint import ConstraintSpec, JsonObjects
from manta.workers.checkpoints.model_folder import resolve_model_folder
from tests.checkpoints import checkpoint

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
FLAG = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False}
TOOLS = [Tool(Function("get_weather", "The weather.", CITY)), Tool(Function("get_weather_2", None, FLAG))]
NAMES = frozenset(tool.function.name for tool in TOOLS)
SCHEMAS = {tool.function.name: arguments_schema(tool) for tool in TOOLS}
FORMS = {name: argument_forms(schema) for name, schema in SCHEMAS.items()}
FORMATS = [HERMES, MISTRAL, LLAMA3]


def body(**fields: Any) -> ChatCompletionRequest:
    message = {"role": "user", "content": "How is the weather?"}
    return decode(ChatCompletionRequest, json.dumps({"model": "m", "messages": [message], **fields}).encode())


def tools_field(*tools: Tool) -> list[Any]:
    return msgspec.to_builtins(list(tools or TOOLS))


# ---- requests ------------------------------------------------------------------------------------------------------


def allowing(mode: str, *names: str) -> dict[str, Any]:
    """Returns the tool choice that allows these functions only."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools[1].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": tools_field(), "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": tools_field(), "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": tools_field(), "tool_choice": allowing("required", "get_weather_2", "f")}, "tool_choice"),
        ({"tools": tools_field(), "tool_choice": allowing("auto")}, "tool_choice"),
        ({"tools": tools_field(), "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
def test_a_mistake_in_tools_names_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        body(**fields)
    assert caught.value.refusal.field == param


def test_calls_and_results_reach_the_template() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": [2]}'}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
    ]
    called = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"b": 1, "a": [2]}}}
    assert body(messages=messages).template_messages()[1:] == [
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    text = "{{ 'call ' + messages[1].tool_calls[0].function.arguments + '!' }}"
    rendered = ChatTemplates({"default": text}).render(None, {"messages": body(messages=messages).template_messages()})
    assert rendered == 'call {"b": 1, "a": [2]}!'
    assert template_tools([Tool(Function("f", strict=True))]) == [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize("arguments", ["", " \n", "{}"])
def test_blank_arguments_of_a_call_are_none(arguments: str) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    (message,) = body(messages=[{"role": "assistant", "tool_calls": [call]}]).template_messages()
    assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_null_content_is_empty() -> None:
    tool = {"role": "tool", "tool_call_id": "call_1"}
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    given = [
        *({"role": role, "content": None} for role in ("system", "user", "assistant")),
        {"role": "assistant"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {**tool, "content": None},
    ]
    assert [message["content"] for message in body(messages=given).template_messages()] == [""] * 6
    for message in ({"role": "user"}, {"role": "system"}, tool):
        with pytest.raises(RequestRefused) as caught:
            body(messages=[message])
        assert caught.value.refusal.field == "messages[0].content"
    items = [
        {"role": "user", "content": None},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
    ]
    output = {"type": "function_call_output", "call_id": "a", "output": None}
    messages = chat_messages(None, [*items, output])
    assert [message.get("content") for message in messages] == ["", "", ""]
    with pytest.raises(RequestRefused):
        chat_messages(None, [{"role": "user"}])


def test_the_format_is_read_from_the_template() -> None:
    assert detect_format("{{ messages }}") is None
    assert detect_format("{% if tools %}{{ tools }}") is HERMES
    assert detect_format("{% if tools %}<tool_call>") is HERMES
    assert detect_format("{% if tools %}[AVAILABLE_TOOLS][TOOL_CALLS]") is MISTRAL
    assert detect_format("{% if tools %}{{ '\"parameters\": ' }}") is LLAMA3


# ---- the parser ----------------------------------------------------------------------------------------------------


def parse(form: ToolFormat, chunks: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """(content, calls as (name, arguments)), after checks that hold for every stream."""
    parser = ToolCallParser(form, FORMS)
    pieces = [piece for chunk in chunks for piece in parser.feed(chunk)] + parser.finish()
    calls: list[list[str]] = []
    for piece in pieces:
        assert piece != Piece()
        if piece.name is not None:
            assert (piece.call, piece.arguments, piece.text) == (len(calls), "", "")
            calls.append([piece.name, ""])
        elif piece.call is not None:
            assert piece.call == len(calls) - 1
            calls[-1][1] += piece.arguments
    assert parser.num_calls == len(calls)
    return "".join(piece.text for piece in pieces), [(name, arguments) for name, arguments in calls]


@st.composite
def chunked(draw: Any, texts: st.SearchStrategy[str]) -> list[str]:
    text = draw(texts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.sampled_from(["</tool_call>", '{"', "\\"]),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=4), children, max_size=3),
    max_leaves=6,
)
calls_made = st.lists(
    st.tuples(st.sampled_from(sorted(NAMES)), st.dictionaries(st.text(max_size=4), json_values, max_size=3)),
    min_size=1,
    max_size=3,
)
layouts = st.sampled_from([{}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}])


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@given(data=st.data())
def test_calls_survive_any_cutting_of_the_text(form: ToolFormat, data: Any) -> None:
    calls, layout = data.draw(calls_made), data.draw(layouts)
    if form.is_bare:
        calls = calls[:1]
    flipped = data.draw(st.booleans())
    space = data.draw(st.sampled_from(["", " ", "\n"]))
    written = []
    for name, arguments in calls:
        fields = {"name": name, form.arguments_key: arguments}
        written.append(json.dumps(dict(reversed(fields.items())) if flipped else fields, **layout))
    if form.calls == "list":
        text = form.begin + "[" + f",{space}".join(written) + "]"
    else:
        text = space.join(f"{form.begin}{space}{call}{space}{form.end}" for call in written)
    before = data.draw(st.sampled_from(["", "Let me see.", "a < b [1] {", "<tool", "{ü}"]))
    if before:
        text = before + space + text
    elif form.is_bare and data.draw(st.booleans()):
        text = text.removeprefix(form.begin)
    content, found = parse(form, data.draw(chunked(st.just(text))))
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    assert content == before
    assert all(arguments in text for _, arguments in found), "arguments are given out as they stand"
    assert parse(form, [text]) == (content, found)


FRAGMENTS = """
<tool_call> </tool_call> [TOOL_CALLS] <|python_tag|> [ ] { } , " x \\ 1 <tool_c
{"name":"get_weather","arguments":{ "parameters":{"x":1}} {"name":"nobody"} {"name":"get_weather"}
"name":"get_weather" "arguments":
"""
fragments = st.lists(st.sampled_from([*FRAGMENTS.split(), " ", "\n"]), max_size=12).map("".join)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@given(text=fragments, data=st.data())
def test_text_parses_alike_however_it_is_cut(form: ToolFormat, text: str, data: Any) -> None:
    whole = parse(form, [text])
    assert parse(form, data.draw(chunked(st.just(text)))) == whole
    assert parse(form, list(text)) == whole


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("", "", []),
        ("Hello \n", "Hello \n", []),
        ("<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
        ('<tool_call>{"name": "nobody", "arguments": {}}', '<tool_call>{"name": "nobody", "arguments": {}}', []),
        ('<tool_call>{"name": "get_wea', "", []),
        ('Well. <tool_call>{"name": "get_weather", "argu', "Well.", []),
        ('<tool_call>{"name": "get_weather", "arguments": {"a": "b', "", [("get_weather", '{"a": "b')]),
        (
            '<tool_call>{"name": "get_weather", "arguments": 5}',
            '<tool_call>{"name": "get_weather", "arguments": 5}',
            [],
        ),
        ('<tool_call>{"name": "get_weather"}</tool_', "", [("get_weather", "{}")]),
    ],
)
def test_what_is_no_call_stays_text(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parse(HERMES, [text]) == (content, calls)


# ---- the grammar ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo_vocabulary() -> tuple[Any, Any]:
    """(tokenizers' tokenizer, llguidance's) of the demo model, whose marks are special tokens."""
    import transformers
    from llguidance.hf import from_tokenizer

    loaded = transformers.AutoTokenizer.from_pretrained(resolve_model_folder("demo"))
    return loaded.backend_tokenizer, from_tokenizer(loaded)


def random_walk(vocabulary: tuple[Any, Any], grammar: str, wish: str, seed: int) -> str:
    """A text that the grammar takes: `wish` while it is allowed, then tokens at random."""
    tokenizer, known = vocabulary
    matcher = llguidance.LLMatcher(known, llguidance.LLMatcher.grammar_from_lark(grammar))
    assert not matcher.get_error()
    wished, rng, taken = tokenizer.encode(wish, add_special_tokens=False).ids, random.Random(seed), []
    mask = llguidance.numpy.allocate_token_bitmask(1, known.vocab_size)
    while not matcher.is_stopped() and len(taken) < 400:
        llguidance.numpy.fill_next_token_bitmask(matcher, mask, 0)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8)[0], bitorder="little"))
        token = wished.pop(0) if wished and wished[0] in allowed else int(rng.choice(allowed))
        if known.eos_token in allowed and (token == known.eos_token or not wished):
            break
        assert matcher.try_consume_tokens([token]) == 1
        taken.append(token)
    assert matcher.is_accepting() or len(taken) == 400
    return tokenizer.decode(taken, skip_special_tokens=False) if matcher.is_accepting() else ""


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_grammar_texts_parse_into_valid_calls(
    demo_vocabulary: Any, form: ToolFormat, required: bool, parallel: bool
) -> None:
    token_id = demo_vocabulary[0].token_to_id
    grammar = calls_grammar(form, TOOLS, token_id, parallel=parallel, required=required)
    begin = form.begin + "[" * (form.calls == "list")
    wishes = ["", begin + '{"name": "get_weather_2", ', "Well. " + begin + '{"name": "get_weather", "argu']
    num_calls = 0
    for seed, wish in enumerate(wishes * 4):
        text = random_walk(demo_vocabulary, grammar, wish, seed)
        content, calls = parse(form, [text])
        num_calls += len(calls)
        if text and required:
            assert content == ""
            assert len(calls) >= 1
        assert parallel or len(calls) <= 1
        assert form.begin not in content
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    assert num_calls > 0


def test_an_answer_schema_rules_what_is_no_call(demo_vocabulary: Any) -> None:
    token_id = demo_vocabulary[0].token_to_id
    grammar = calls_grammar(HERMES, TOOLS, token_id, parallel=False, required=False, answer_schema=json.dumps(FLAG))
    for seed in range(6):
        content, calls = parse(HERMES, [random_walk(demo_vocabulary, grammar, '{"on"' if seed % 2 else "", seed)])
        assert bool(content) != bool(calls)
        if content:
            jsonschema.validate(json.loads(content), FLAG)


# ---- plan and answer -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(checkpoint("llama"))


def plan(tokenizer: Tokenizer, **fields: Any) -> Any:
    request = body(**fields)
    return plan_chat(request, request.sampling_params(), tokenizer, "<|im_start|>assistant\n", JsonObjects())


def test_the_choice_decides_the_constraint(tokenizer: Tokenizer) -> None:
    named = {"type": "function", "function": {"name": "get_weather_2"}}
    allowed = ("get_weather_2",)
    for choice, calls, starts in [
        (allowing("auto", *allowed), 1, "start: TEXT?"),
        (allowing("required", *allowed), 1, "start: SPACE?"),
        (None, 2, "start: TEXT?"),
        ("auto", 2, "start: TEXT?"),
        ("required", 2, "start: SPACE?"),
        (named, 1, "start: SPACE?"),
    ]:
        spec = plan(tokenizer, tools=tools_field(), tool_choice=choice).params.constraint
        assert isinstance(spec, ConstraintSpec)
        assert (spec.kind, spec.loose) == ("lark", True)
        assert starts in spec.text
        assert spec.text.count("%json") == calls
    assert plan(tokenizer, tools=tools_field(), tool_choice="none").params.constraint is None
    assert plan(tokenizer, tools=tools_field(), tool_choice="none").tool_format is None
    for strict in (None, False, True):
        loose = plan(tokenizer, tools=tools_field(Tool(Function("f", strict=strict)))).params.constraint.loose
        assert loose == (not strict)


def test_the_prompt_shows_tools_beside_the_choice() -> None:
    request = body(tools=tools_field(), tool_choice=allowing("auto", "get_weather_2"))
    assert len(request.shown_tools()) == len(tools_field())
    assert [tool.function.name for tool in request.callable_tools()] == ["get_weather_2"]
    assert [field for field, _ in request.tool_constraints()] == ["tools[1].function.parameters"]


def test_a_template_without_tools_refuses_them() -> None:
    folder = checkpoint("llama", num_hidden_layers=1)
    tokenizer = Tokenizer(folder)
    tokenizer.chat_templates = ChatTemplates({"default": "{{ messages }}"})
    with pytest.raises(RequestRefused, match="no place for tools") as caught:
        plan(tokenizer, tools=tools_field())
    assert caught.value.refusal.field == "tools"


def test_openai_s_types_parse_calls(tokenizer: Tokenizer) -> None:
    text = '<tool_call>{"name": "get_weather_2", "arguments": {"on": true}}</tool_call>'
    reader, message = ChatReader(plan(tokenizer, tools=tools_field())), MessageBuilder()
    deltas = reader.feed(text, True)
    message.add(deltas)
    common: dict[str, Any] = {"id": "x-1", "created": 1, "model": "m"}
    choice = responses.ChatChoice(message=message.message(), finish_reason="tool_calls")
    body = responses.ChatCompletion(**common, choices=[choice], usage=usage_info([]))
    parsed = openai_chat.ChatCompletion.model_validate_json(encode(body), strict=True).choices[0].message
    assert (parsed.content, parsed.tool_calls[0].function.arguments) == (None, '{"on": true}')
    chunks = [
        responses.ChatCompletionChunk(**common, choices=[responses.ChatChunkChoice(delta=delta)]) for delta in deltas
    ]
    first, second = (
        openai_chat.ChatCompletionChunk.model_validate_json(encode(chunk), strict=True).choices[0].delta
        for chunk in chunks
    )
    (begin,), (rest,) = first.tool_calls, second.tool_calls
    assert (begin.index, begin.type, begin.function.name, begin.function.arguments) == (
        0,
        "function",
        "get_weather_2",
        "",
    )
    assert begin.id
    assert rest.model_dump(exclude_unset=True) == {"index": 0, "function": {"arguments": '{"on": true}'}}


def test_finish_reasons_are_openai_s(tokenizer: Tokenizer) -> None:
    text = '<tool_call>{"name": "get_weather_2", "arguments": {"on": true}}</tool_call>'
    named = {"type": "function", "function": {"name": "get_weather_2"}}
    for choice, finish, expected in [
        ("auto", FinishStatus.FINISHED_STOPPED, "tool_calls"),
        ("required", FinishStatus.FINISHED_STOPPED, "tool_calls"),
        (named, FinishStatus.FINISHED_STOPPED, "stop"),
        ("auto", FinishStatus.FINISHED_LENGTH, "length"),
        ("none", FinishStatus.FINISHED_STOPPED, "stop"),
    ]:
        reader, message = ChatReader(plan(tokenizer, tools=tools_field(), tool_choice=choice)), MessageBuilder()
        message.add(reader.feed(text, True))
        assert reader.finish_reason(finish) == expected
        built = message.message()
        if choice == "none":
            assert built.content == text
        else:
            assert built.content is None
            (call,) = built.tool_calls
            assert call.id.startswith("call_")
            assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather_2", {"on": True})
