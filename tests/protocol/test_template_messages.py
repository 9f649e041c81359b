"""Messages as chat templates take them: reasoning under their names for it, system messages where they allow them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from manta.cluster.chat.plan import render
from manta.cluster.chat.template_messages import with_one_system_message, with_reasoning
from manta.cluster.errors import RequestRefused
from manta.cluster.http.access.request_admission import decode
from manta.cluster.protocol.anthropic import MessagesRequest
from manta.cluster.protocol.requests import ChatCompletionRequest
from manta.cluster.protocol.response_items import chat_messages
from manta.cluster.text.chat_template import ChatTemplates
from manta.cluster.text.tokenizer import Tokenizer
from manta.workers.checkpoints.model_folder import resolve_model_folder


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve_model_folder("demo"))


# ---- the reasoning of earlier answers ------------------------------------------------------------------------------

ONE_OF_TWO = (
    "<|channel|>analysis<|message|>{{ message.thinking }}{% if message.thinking and message.content %}{{ no() }}"
)
NAMED = [
    ("{{ message.reasoning_content or message.thinking }}", "reasoning_content"),
    ("{{ message.thinking }}", "thinking"),
    ("{{ message['thinking'] }}", "thinking"),
    ('{% if "thinking" in message %}', "thinking"),
    ("{{ message.get('reasoning') }}", "reasoning"),
    ("{% if thinking %}<think>{% endif %}", "reasoning_content"),
    (ONE_OF_TWO, "thinking"),
]
"""Pieces of chat templates, and the name under which each reads the reasoning of a message."""


@pytest.mark.parametrize(("template", "name"), NAMED)
def test_a_template_gets_earlier_reasoning_under_its_own_name(template: str, name: str) -> None:
    user = {"role": "user", "content": "x"}
    message = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    renamed = {"role": "assistant", "content": "", name: "Hm."}
    assert with_reasoning([user, message], template) == [user, renamed]
    assert with_reasoning([user], template) == [user]
    both = message | {"content": "I look.", "tool_calls": [{}]}
    expected = renamed | {"content": "I look.", "tool_calls": [{}]}
    if template is ONE_OF_TWO:  # which takes one of them
        expected |= {"content": "", "thinking": "Hm.\n\nI look."}
    assert with_reasoning([both], template) == [expected]


def test_the_model_sees_why_it_called(tokenizer: Tokenizer) -> None:
    """Through the API: a conversation with a call, whose reasoning the template reads by another name."""
    tokenizer.chat_templates = ChatTemplates({"default": "{% for m in messages %}{{ m.thinking }}|{% endfor %}"})
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "reasoning_content": "Because.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
    ]
    request = decode(ChatCompletionRequest, json.dumps({"model": "m", "messages": messages}).encode())
    assert render(tokenizer, request) == "|Because.||"
    items = [
        {"role": "user", "content": "x"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "One."}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Two."}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
    ]
    assert chat_messages(None, items)[-1]["reasoning_content"] == "One.\n\nTwo."


# ---- answers of tools ------------------------------------------------------------------------------------------------

OF_GEMMA = (
    "{% for m in messages %}<{{ m.role }}>{% for c in m.tool_calls or [] %}call:{{ c.function.name }};{% endfor %}"
    "{% for r in m.tool_responses or [] %}{{ r.name }}={{ r.response }};{% endfor %}{{ m.content }}"
    "{{ '</>' if m.content or not m.tool_responses }}{% endfor %}"
)
"""As Gemma 4's first template shows calls, answers of tools and text."""


def test_answers_of_tools_stand_where_gemma_4_reads_them(tokenizer: Tokenizer) -> None:
    def call(name: str) -> dict[str, Any]:
        return {"id": f"id_{name}", "type": "function", "function": {"name": name, "arguments": "{}"}}

    def answer(name: str, content: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": f"id_{name}", "content": content}

    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call("f"), call("g")]},
        answer("f", '{"a": 1}'),
        answer("g", "[1]"),
        {"role": "assistant", "content": "", "tool_calls": [call("h")]},
        answer("h", "{"),
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "y"},
        {"role": "assistant", "tool_calls": [call("f")]},
        answer("f", "2"),
    ]
    request = decode(ChatCompletionRequest, json.dumps({"model": "m", "messages": messages}).encode())
    tokenizer.chat_templates = ChatTemplates({"default": OF_GEMMA})
    expected = (
        "<user>x</><assistant>I look.</><assistant>call:f;call:g;f={'a': 1};g=[1];<assistant>call:h;h={;Done.</>"
        "<user>y</><assistant>call:f;f=2;"
    )
    assert render(tokenizer, request) == expected
    tokenizer.chat_templates = ChatTemplates(
        {"default": OF_GEMMA + "{% if messages[0]['role'] == 'tool' %}{% endif %}"}
    )
    assert "<tool>" in render(tokenizer, request), "later templates read such messages themselves"


# ---- system messages -----------------------------------------------------------------------------------------------

SHOWN = "{{ m.role[0] }}({{ m.content }})"
BEGINNING = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    f"{{{{ raise_exception('System message must be at the beginning.') }}}}{{% endif %}}{SHOWN}{{% endfor %}}"
)
"""As Qwen3.5's template."""
ALTERNATING = BEGINNING.replace(
    SHOWN,
    "{% if not loop.first and m.role == loop.previtem.role %}{{ raise_exception('roles must alternate') }}{% endif %}"
    + SHOWN,
)
"""As those of Gemma and Mistral."""
DROPPING = f"{{% for m in messages %}}{{% if loop.first or m.role != 'system' %}}{SHOWN}{{% endif %}}{{% endfor %}}"
"""As gpt-oss's template, which reads the first system message only."""
ANYWHERE = f"{{% for m in messages %}}{SHOWN}{{% endfor %}}"
CONVERSATIONS = [
    ("s1 u1", "s(s1)u(u1)", "s(s1)u(u1)"),
    ("s1 s2 u1", "s(s1\n\ns2)u(u1)", "s(s1)s(s2)u(u1)"),
    ("s1 u1 s2", "s(s1)u(u1\n\ns2)", "s(s1)u(u1)s(s2)"),
    ("u1 s2", "u(u1\n\ns2)", "u(u1)s(s2)"),
    ("s1 u1 a1 s2 u2", "s(s1)u(u1)a(a1)u(s2\n\nu2)", "s(s1)u(u1)a(a1)s(s2)u(u2)"),
    ("s1 u1 a1 t1 s2", "s(s1)u(u1)a(a1)t(t1)u(s2)", "s(s1)u(u1)a(a1)t(t1)s(s2)"),
]
"""Messages, how templates that take one system message show them, and how one does that takes any."""


@pytest.mark.parametrize(("short", "one", "every"), CONVERSATIONS)
def test_no_system_message_is_refused_or_lost(tokenizer: Tokenizer, short: str, one: str, every: str) -> None:
    """Agents send reminders as system messages within a conversation, and a developer's message behind instructions."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    messages = [{"role": roles[each[0]], "content": each} for each in short.split()]
    for message in messages:
        message |= {"tool_call_id": "x"} if message["role"] == "tool" else {}
    request = decode(ChatCompletionRequest, json.dumps({"model": "m", "messages": messages}).encode())
    for template in (BEGINNING, ALTERNATING, DROPPING, ANYWHERE):
        tokenizer.chat_templates = ChatTemplates({"default": template})
        assert render(tokenizer, request) == (every if template is ANYWHERE else one)


def test_a_reminder_keeps_the_prompt_before_it() -> None:
    """The prefix cache works, because a later system message changes nothing in front of it."""
    before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    later = with_one_system_message([*before, {"role": "system", "content": "c"}])
    assert later == [*before, {"role": "user", "content": "c"}]


def test_claude_code_s_reminders_reach_a_template_that_takes_one_system_message(tokenizer: Tokenizer) -> None:
    tokenizer.chat_templates = ChatTemplates({"default": BEGINNING})
    messages = [{"role": "user", "content": "hi"}, {"role": "system", "content": "<total_tokens>5</total_tokens>"}]
    body = {"model": "m", "max_tokens": 9, "system": "Be brief.", "messages": messages}
    request = decode(MessagesRequest, json.dumps(body).encode()).as_openai()
    assert render(tokenizer, request) == "s(Be brief.)u(hi\n\n<total_tokens>5</total_tokens>)"
    tokenizer.chat_templates = ChatTemplates({"default": "{{ raise_exception('never') }}"})
    with pytest.raises(RequestRefused, match="never"):
        render(tokenizer, request)
