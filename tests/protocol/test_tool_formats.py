"""Formats of tool calls: what a chat template shows, what is read of a text however it is cut, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.cluster.chat import tool_formats as formats
from manta.cluster.chat.argument_forms import argument_forms
from manta.cluster.chat.channels import ChannelSplitter
from manta.cluster.chat.reader import ChatReader, MessageBuilder
from manta.cluster.chat.tool_formats import ToolFormat, detect_format
from manta.cluster.chat.tool_grammar import FormatRefused, calls_grammar
from manta.cluster.chat.tool_parser import ToolCallParser
from manta.cluster.engine.request import FinishStatus
from manta.cluster.errors import RequestRefused
from manta.cluster.protocol.tools import Function, Tool
from tests.protocol.test_tool_sampling import world
from tests.tool_formats import TOOLS, WRITERS, template_of

SCHEMAS = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in TOOLS}
FORMS = {name: argument_forms(schema) for name, schema in SCHEMAS.items()}
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\r\x00"), max_size=8)
STRINGS = TEXTS | st.sampled_from(["null", "12", "<b>", "\n\n", '"', "\\", "'", "[1]", "True", "</param", "</arg_"])
ENDS = st.sampled_from(["</parameter>", "</arg_value>", "\n</function>", "</tool_call>", "]<|END_ACTION|>", "\\n```"])
"""The marks of formats, which end raw strings but not those of JSON."""
ARGUMENTS = {
    "log": st.fixed_dictionaries(
        {"text": STRINGS, "level": st.integers(1, 9), "when": st.none() | st.dates().map(str)}
    ),
    "find": st.fixed_dictionaries(
        {
            "city": st.just("São Paulo <north>"),
            "code": st.just("ab-1/"),
            "note": st.none() | st.booleans() | st.just("x"),
        },
        optional={
            "more": st.lists(
                st.fixed_dictionaries({"x": st.integers() | st.floats(-9, 9)}, optional={"y": STRINGS | ENDS}),
                max_size=2,
            )
        },
    ),
    "set_on": st.fixed_dictionaries({"on": st.booleans(), "level": st.integers() | st.just("high")}),
    "stop_all": st.just({}),
    "tag": st.fixed_dictionaries({"id": st.just(7)}, optional={"some": st.just("x"), "other": st.just("ü")}),
    "mix": st.fixed_dictionaries({"either": TEXTS | ENDS | st.lists(st.integers(), max_size=2)}),
}
CALLS = st.lists(
    st.sampled_from(sorted(ARGUMENTS)).flatmap(lambda name: st.tuples(st.just(name), ARGUMENTS[name])),
    min_size=1,
    max_size=3,
)


def parse(form: ToolFormat, chunks: list[str]) -> tuple[str, list[tuple[str, str, str | None]]]:
    """(content, calls as (name, arguments, id)) of a text in pieces."""
    parser = ToolCallParser(form, FORMS)
    calls: list[list[Any]] = []
    content = ""
    for piece in [piece for chunk in chunks for piece in parser.feed(chunk)] + parser.finish():
        content += piece.text
        if piece.name is not None:
            assert piece.call == len(calls)
            calls.append([piece.name, "", piece.call_id])
        elif piece.call is not None:
            assert piece.call == len(calls) - 1
            calls[-1][1] += piece.arguments
    return content, [tuple(call) for call in calls]


def chunks_of(text: str, data: Any) -> list[str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def in_quotes(form: ToolFormat, calls: list[Any]) -> list[Any]:
    """The calls as the format writes them: a string where lists are allowed too is JSON among raw strings."""
    if form.values != "raw":
        return calls
    return [
        (name, {**given, "either": json.dumps(given["either"])} if name == "mix" else given) for name, given in calls
    ]


@pytest.mark.parametrize("form", WRITERS, ids=lambda form: form.name)
def test_a_template_shows_its_format(form: ToolFormat) -> None:
    assert detect_format(template_of(form)) is form
    assert detect_format(template_of(form).replace("tools", "toys")) is None


def test_an_unknown_format_is_said_to_be_one() -> None:
    """A model whose template shows none of the known formats calls as Hermes does, and the answer says so."""
    here = world(True)
    for form, template in ((formats.HERMES, "<tool_call>"), (None, "<my_calls>")):
        assert formats.shown_format(f"{{% if tools %}}{template}{{% endif %}}") is form
        assert detect_format(f"{{% if tools %}}{template}{{% endif %}}") is formats.HERMES
        said = here.plan_of(f"{{% if tools %}}{template}{{% endif %}}", tools=TOOLS[:1]).not_enforced
        assert [("format of calls" in each) for each in said] == [True] * (form is None)


@pytest.mark.few(6)
@pytest.mark.parametrize("form", WRITERS, ids=lambda form: form.name)
@given(data=st.data())
def test_calls_survive_any_cutting_of_the_text(form: ToolFormat, data: Any) -> None:
    calls = data.draw(CALLS)[: 1 if form.calls == "one" else 3]
    before = "" if form.is_bare else data.draw(st.sampled_from(["", "Let me see.", "a < b [1] {", "<tool", "<|"]))
    text = before + WRITERS[form](in_quotes(form, calls))
    content, found = parse(form, chunks_of(text, data))
    if form is formats.MISTRAL_CALL_ID:
        assert [call_id for _, _, call_id in found] == [f"a1B2c3D4{index}" for index in range(len(calls))]
    assert [(name, json.loads(arguments)) for name, arguments, _ in found] == calls
    assert content == before
    assert parse(form, [text]) == (content, found) == parse(form, list(text))


FRAGMENTS = """
<tool_call> </tool_call> [TOOL_CALLS] <|python_start|> <|tool_call|> functools [ ] ( ) { } , " ' = : x 1 log <tool_c
[ARGS] {"name":"log","arguments":{ "name":"log" [log(level=1) [stop_all() log(text="a",
<function=log> <function=stop_all> <parameter=text> <parameter=level> </parameter> </function> <function=
<arg_key>text</arg_key> <arg_value> </arg_value> <arg_key>level</arg_key>
<｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> function<｜tool▁sep｜> <｜tool▁sep｜> ```json ``` <｜tool▁call▁end｜>
<|tool_calls_section_begin|> <|tool_call_begin|> functions.log:0 functions.log:1<|tool_call_argument_begin|>
<|tool_call_end|> <|tool_calls_section_end|> <|channel|>commentary to=functions.log <|constrain|>json <|message|>
<|START_ACTION|> "tool_name":"log" "parameters":{ <|END_ACTION|> [CALL_ID] abcdefghi {"level":1} null tru
"""
fragments = st.lists(st.sampled_from([*FRAGMENTS.split(), " ", "\n"]), max_size=14).map("".join)


@pytest.mark.few(7)
@pytest.mark.parametrize("form", WRITERS, ids=lambda form: form.name)
@given(text=fragments, data=st.data())
def test_text_reads_alike_however_it_is_cut(form: ToolFormat, text: str, data: Any) -> None:
    whole = parse(form, [text])
    assert parse(form, chunks_of(text, data)) == whole == parse(form, list(text))
    if not whole[1]:
        assert text.startswith(whole[0])
        cut = text[len(whole[0]) :].lstrip()
        assert not cut or cut.startswith((*form.begins, *form.bare_starts(FORMS)))


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("form", WRITERS, ids=lambda form: form.name)
def test_an_answer_cut_anywhere_shows_no_part_of_a_call_as_text(form: ToolFormat, choice: str) -> None:
    calls = [("log", {"text": "a", "level": 1, "when": None}), ("stop_all", {})][: 1 if form.calls == "one" else 2]
    text = WRITERS[form](calls)
    _, whole = parse(form, [text])
    plan = world(True).plan(form, tool_choice=choice)
    for end in range(len(text)):
        reader, builder = ChatReader(plan), MessageBuilder()
        builder.add(reader.feed(text[:end], True))
        message = builder.message()
        found = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
        content = (message.content or "").strip()
        may_be_text = not found and (choice == "auto" or form.is_channel)
        starts = (*form.begins, *form.bare_starts(FORMS)) if may_be_text else ("",)
        assert any(start.startswith(content) for start in starts), (text[:end], content)
        if reader.finish_reason(FinishStatus.FINISHED_STOPPED) == "tool_calls":
            assert found == [(name, arguments) for name, arguments, _ in whole[: len(found)]]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (
            formats.QWEN3_CODER,
            "<tool_call>\n<function=nobody>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        ),
        (formats.QWEN3_CODER, "Write <tool_call> and <function=log> to log."),
        (formats.GLM, "<tool_call>nobody\n<arg_key>a</arg_key>"),
        (formats.DEEPSEEK_V3, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>code<｜tool▁sep｜>log"),
        (
            formats.KIMI_K2,
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.nobody:0<|tool_call_argument_begin|>{}",
        ),
        (formats.PYTHONIC, "[nobody(a=1)]"),
        (formats.PYTHONIC, "[1] is a list, and [log] another."),
        (formats.MISTRAL_ARGS, "[TOOL_CALLS]log {}"),
        (formats.GRANITE, "<tool_call>{}"),
        (formats.COHERE, '<|START_ACTION|>[{"tool_name": "nobody", "parameters": {}}]'),
    ],
)
def test_text_resembling_a_call_stays_text(form: ToolFormat, text: str) -> None:
    assert parse(form, [text]) == (text, [])


@pytest.mark.axes_in_turns
@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("has_marks", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("form", WRITERS, ids=lambda form: form.name)
def test_the_grammar_takes_calls_as_models_write_them(form: ToolFormat, has_marks: bool, required: bool) -> None:
    if form.is_channel and not has_marks:
        pytest.skip("harmony's marks are always tokens")
    here = world(has_marks)
    calls: list[Any] = [
        ("log", {"text": "a <b>\n\n  c\n", "level": 3, "when": None}),
        ("find", {"city": "São Paulo <north>", "code": "ab-1/", "note": True, "more": [{"x": 1.5}]}),
        ("stop_all", {}),
        ("tag", {"id": 7, "some": "x"}),
        ("set_on", {"on": False, "level": "high"}),
        ("mix", {"either": "[x"}),
    ]
    grammar = here.grammar(here.plan(form, tool_choice="required" if required else "auto").params.constraint)
    for group in [[call] for call in calls] if form.calls == "one" else [calls]:
        text = WRITERS[form](in_quotes(form, group)).removesuffix("<|call|>")
        session = grammar.session()
        for token in here.tokenizer.encode(text, add_special_tokens=False):
            assert session.accept(token), text
        assert session.is_accepting()


NO_ARGUMENTS: list[dict[str, Any] | None] = [
    None,
    {},
    {"type": "object", "properties": {}},
    {"properties": {}, "required": [], "title": "fArguments", "type": "object"},
]


@pytest.mark.parametrize("form", WRITERS, ids=lambda form: form.name)
def test_a_tool_without_parameters_gets_no_arguments(form: ToolFormat) -> None:
    here = world(True)

    def takes(parameters: dict[str, Any] | None, arguments: dict[str, Any]) -> bool:
        function = {"name": "f", **({} if parameters is None else {"parameters": parameters})}
        tools = [{"type": "function", "function": function}]
        grammar = here.grammar(here.plan(form, tools=tools, tool_choice="required").params.constraint)
        text = WRITERS[form]([("f", arguments)]).removesuffix("<|call|>")
        session = grammar.session()
        return (
            all(map(session.accept, here.tokenizer.encode(text, add_special_tokens=False))) and session.is_accepting()
        )

    for parameters in NO_ARGUMENTS:
        assert takes(parameters, {})
        assert not takes(parameters, {"a": 1})
    assert takes({"type": "object"}, {"a": 1})
    assert takes({"type": "object", "properties": {}, "additionalProperties": True}, {"a": 1})


CANNOT = [
    ({"type": "object", "minProperties": 1}, "the keyword minProperties"),
    ({"type": "object", "properties": {"a>b": {"type": "string"}}}, "whose name holds"),
    ({"type": "object", "properties": {"a": {"type": "string", "pattern": "(a)\\1"}}}, "the pattern"),
    ({"type": "object", "properties": {"a": {"type": "string", "pattern": "a", "maxLength": 3}}}, "beside a length"),
    (
        {"type": "object", "properties": {"a": {"oneOf": [{"type": "string"}, {"const": "x"}]}}},
        "oneOf with one type twice",
    ),
    ({"type": "object", "properties": {"a": {"type": "string", "not": {"const": "x"}}}}, "the keyword not"),
]


@pytest.mark.parametrize(("schema", "what"), CANNOT, ids=[what for _, what in CANNOT])
def test_unrepresentable_raw_strings_are_refused_unless_loose(schema: dict[str, Any], what: str) -> None:
    def grammar(form: ToolFormat, strict: bool | None) -> str:
        tools = [Tool(Function("f", parameters=schema, strict=strict))]
        return calls_grammar(form, tools, world(True).tokenizer.token_to_id, parallel=False, required=True)

    for form in (formats.QWEN3_CODER, formats.GLM, formats.GEMMA4):
        with pytest.raises(FormatRefused, match=what):
            grammar(form, True)
        for strict in (None, False):
            assert "arguments_0" in grammar(form, strict)
    assert "arguments_0" in grammar(formats.HERMES, True)


MIXED: list[tuple[dict[str, Any], dict[str, bool]]] = [
    (
        {"anyOf": [{"type": "string", "pattern": "^[0-9]{1,3}$"}, {"type": "integer"}]},
        {"012": True, "12": True, "x": False},
    ),
    ({"anyOf": [{"type": "string", "pattern": "^[0-9]$"}, {"enum": [2]}]}, {"1": False, "2": True}),
    ({"type": "integer", "enum": [1, "a", 2.5]}, {"1": True, "a": False, "2.5": False}),
    ({"enum": ["", "null", None, "b"]}, {"": True, "null": True, "b": True, "a": False}),
    ({"type": ["string", "null"], "maxLength": 2}, {"": True, "null": True, "nul": False, "nu": True}),
]


@pytest.mark.parametrize("form", [formats.QWEN3_CODER, formats.GLM], ids=lambda form: form.name)
@pytest.mark.parametrize(("schema", "texts"), MIXED)
def test_raw_text_is_taken_if_its_value_fits(form: ToolFormat, schema: dict[str, Any], texts: dict[str, bool]) -> None:
    here = world(True)
    whole = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "f", "parameters": whole}}]
    grammar = here.grammar(here.plan(form, tools=tools, tool_choice="required").params.constraint)
    for value, expected in texts.items():
        text = WRITERS[form]([("f", {"a": value})])
        session = grammar.session()
        taken = all(map(session.accept, here.tokenizer.encode(text, add_special_tokens=False)))
        assert (taken and session.is_accepting()) == expected, text
        if taken:
            parser = ToolCallParser(form, {"f": argument_forms(whole)})
            arguments = "".join(piece.arguments for piece in parser.feed(text))
            jsonschema.validate(json.loads(arguments), whole)


def test_a_tokenizer_without_harmony_s_tokens_is_refused() -> None:
    with pytest.raises(RequestRefused, match=r"lacks the token <\|start\|>") as caught:
        world(False).plan(formats.GPT_OSS)
    assert caught.value.refusal.field == "tools"


# ---- harmony's channels --------------------------------------------------------------------------------------------

THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
ANSWERS = [
    ("<|channel|>final<|message|>Hello", "", "Hello", 0),
    (f"{THOUGHT}<|channel|>final<|message|>Hello", "Hm.", "Hello", 0),
    (f"{THOUGHT}{THOUGHT}<|channel|>final<|message|>A <|x", "Hm.\n\nHm.", "A <|x", 0),
    (f"{THOUGHT}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant", "Hm.", "I look.", 0),
    (
        f'{THOUGHT}<|channel|>commentary to=functions.set_on <|constrain|>json<|message|>{{"on": true, "level": 1}}',
        "Hm.",
        None,
        1,
    ),
    ("<|start|>assistant to=functions.stop_all<|channel|>commentary json<|message|>{}", "", None, 1),
    ("<|channel|>analysis<|message|>cut off", "cut off", "", 0),
    ("<|channel|>fin", "", "", 0),
    ("<|channel|>?? hm<|end|><|start|>assistant" + THOUGHT + "<|channel|>final<|message|>Hello", "Hm.", "Hello", 0),
    (
        "<|channel|>commentary to=assistant<|channel|>commentary??<|end|><|start|>assistant<|channel|>analysis"
        "<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello",
        "Hm.",
        "Hello",
        0,
    ),
    (
        "<|channel|>commentary to=functions.stop_all<|end|><|start|>assistant<|channel|>final<|message|>Hello",
        "",
        "Hello",
        0,
    ),
    ("<|channel|>analysis<|constrain|>text<|message|>Hm.<|end|>", "Hm.", "", 0),
    ("plain", "", "plain", 0),
]


@pytest.mark.parametrize(("text", "reasoning", "content", "num_calls"), ANSWERS)
def test_channels_are_told_apart(text: str, reasoning: str, content: str | None, num_calls: int) -> None:
    plan = world(True).plan(formats.GPT_OSS)
    for size in (1, 3, len(text)):
        reader, builder = ChatReader(plan), MessageBuilder()
        for start in range(0, len(text), size):
            builder.add(reader.feed(text[start : start + size], start + size >= len(text)))
        message = builder.message()
        assert message.content == content
        assert (message.reasoning_content or "") == reasoning
        calls = message.tool_calls or []
        assert len(calls) == num_calls
        for call in calls:
            jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


ODD_HEADERS = ["<|channel|>analysis", "<|start|>assistant", "??", " to=", "functions.log", "<|constrain|>", " text"]


@pytest.mark.few(40)
@given(odd=st.lists(st.sampled_from([*ODD_HEADERS, "<|end|>"])).map("".join), data=st.data())
def test_a_broken_header_hides_no_later_message(odd: str, data: Any) -> None:
    """Neither reasoning nor answer of well-formed messages changes by what a model writes where a header should be."""
    whole = f"{THOUGHT}<|channel|>final<|message|>Hello"
    splitter = ChannelSplitter()
    parts = [*map(splitter.feed, chunks_of(f"<|channel|>{odd}<|end|><|start|>assistant{whole}", data))]
    parts.append(splitter.finish())
    assert ("".join(reasoning for reasoning, _ in parts), "".join(answer for _, answer in parts)) == ("Hm.", "Hello")


@given(
    text=fragments
    | st.lists(st.sampled_from([THOUGHT, "<|channel|>", "final", "<|message|>", "<|end|>", "x"])).map("".join),
    data=st.data(),
)
def test_channels_do_not_depend_on_cuts(text: str, data: Any) -> None:
    def split(chunks: list[str]) -> tuple[str, str]:
        splitter = ChannelSplitter()
        parts = [*map(splitter.feed, chunks), splitter.finish()]
        return "".join(reasoning for reasoning, _ in parts), "".join(answer for _, answer in parts)

    assert split([text]) == split(chunks_of(text, data)) == split(list(text))


def test_a_constraint_begins_after_the_answers_header() -> None:
    here = world(True)
    plan = here.plan(formats.GPT_OSS, tools=None, response_format={"type": "json_object"})
    assert plan.params.thinking.answer == "<|channel|>final<|message|>"
