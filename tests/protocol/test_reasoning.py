"""Thinking sections: cut at their marks however the text arrives, and constraints that begin after them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.cluster.chat.plan import ChatPlan, plan_chat
from manta.cluster.chat.reader import ChatReader, MessageBuilder
from manta.cluster.chat.reasoning import FORMATS, ReasoningFormat, ReasoningSplitter, detect_reasoning
from manta.cluster.errors import RequestRefused
from manta.cluster.http.access.request_admission import decode
from manta.cluster.protocol.foreign_fields import collect_ignored
from manta.cluster.protocol.requests import ChatCompletionRequest
from manta.cluster.text.chat_template import ChatTemplates
from manta.cluster.text.tokenizer import Tokenizer
from manta.structured.constraint import JsonObjects
from manta.workers.checkpoints.model_folder import resolve_model_folder

THINK, MISTRAL, GEMMA, HARMONY = FORMATS
HYBRID = "{{ messages }}{% if tools %}<tool_call>{% endif %}<think>"
"""A template of a model that may think: the generation prompt says nothing."""


def split(form: ReasoningFormat, inside: bool, strip: bool, chunks: list[str]) -> tuple[str, str]:
    splitter = ReasoningSplitter(form, inside, strip)
    parts = [splitter.feed(chunk) for chunk in chunks] + [splitter.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "answer"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, "Hm.", "Yes."),
        ("\n<think>Hm.</think>Yes.\n", False, "Hm.", "Yes.\n"),
        ("Hm.\n\nSo.\n</think>\n\nYes.", True, "Hm.\n\nSo.", "Yes."),
        ("Yes.", False, "", "Yes."),
        ("No <think> here </think>", False, "", "No <think> here </think>"),
        ("<thi", False, "", "<thi"),
        ("<think>cut off </thi", False, "cut off </thi", ""),
        ("cut off\n", True, "cut off", ""),
        ("</think>", True, "", ""),
        ("a</think>b</think>", True, "a", "b</think>"),
        ("", True, "", ""),
    ],
)
def test_reasoning_and_answer_are_cut_at_the_marks(text: str, inside: bool, reasoning: str, answer: str) -> None:
    assert split(THINK, inside, True, [text]) == (reasoning, answer)
    assert split(THINK, inside, True, list(text)) == (reasoning, answer)


def test_a_constrained_answer_keeps_its_line_breaks() -> None:
    assert split(THINK, True, False, ["Hm.\n</think>\n\n{}"]) == ("Hm.", "\n\n{}")


pieces = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "[THINK]", "[/THINK]", GEMMA.begin, GEMMA.end, "\n", " ", "a", "<", "</th", "<|chan"]
    ),
    max_size=9,
)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.begin)
@given(pieces, st.booleans(), st.booleans(), st.integers(1, 5))
def test_text_is_split_alike_however_it_arrives(
    form: ReasoningFormat, parts: list[str], inside: bool, strip: bool, size: int
) -> None:
    text = "".join(parts)
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    whole = split(form, inside, strip, [text])
    assert split(form, inside, strip, chunks) == whole
    if inside and form.end in text:
        reasoning, answer = text.split(form.end, 1)
        assert whole == (reasoning.strip("\n"), answer.lstrip("\n") if strip else answer)


# ---- requests ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The demo model's, in which the marks are special tokens, under a template that knows thinking."""
    tokenizer = Tokenizer(resolve_model_folder("demo"))
    tokenizer.chat_templates = ChatTemplates({"default": HYBRID})
    return tokenizer


def plan(tokenizer: Tokenizer, prompt: str, **fields: Any) -> ChatPlan:
    message = {"role": "user", "content": "x"}
    request = decode(ChatCompletionRequest, json.dumps({"model": "m", "messages": [message], **fields}).encode())
    return plan_chat(request, request.sampling_params(), tokenizer, prompt, JsonObjects())


def answer(tokenizer: Tokenizer, made: ChatPlan, text: str) -> tuple[str | None, Any]:
    """(content, reasoning) of a text as the detokenizer shows it."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    shown = tokenizer.text_decoder(True, False, made.shown_ids).decode(ids, True)
    message = MessageBuilder()
    message.add(ChatReader(made).feed(shown, True))
    return message.message().content, message.message().reasoning_content or None


PROMPT = "<|im_start|>assistant\n"
JSON = {"response_format": {"type": "json_object"}}


def test_the_prompt_says_whether_the_model_thinks(tokenizer: Tokenizer) -> None:
    assert detect_reasoning("{{ messages }}") is None
    assert detect_reasoning("[THINK]") is MISTRAL
    assert detect_reasoning("<|channel|>analysis<|message|>") is HARMONY
    possible, opened = plan(tokenizer, PROMPT), plan(tokenizer, PROMPT + "<think>\n")
    closed = plan(tokenizer, PROMPT + "<think>\n\n</think>\n\n")
    assert (possible.is_thinking, opened.is_thinking, closed.reasoning) == (False, True, None)
    assert possible.prompt == PROMPT, "without a constraint the model decides"
    assert answer(tokenizer, possible, "<think>\nHm.\n</think>\n\nYes.<|im_end|>") == ("Yes.", "Hm.")
    assert answer(tokenizer, possible, "Yes.<|im_end|>") == ("Yes.", None)
    assert answer(tokenizer, opened, "Hm.\n</think>\n\nYes.") == ("Yes.", "Hm.")
    assert answer(tokenizer, closed, "Yes.") == ("Yes.", None)


def test_reasoning_can_be_left_out(tokenizer: Tokenizer) -> None:
    made = plan(tokenizer, PROMPT, include_reasoning=False)
    assert answer(tokenizer, made, "<think>\nHm.\n</think>\n\nYes.") == ("Yes.", None)


def test_a_constraint_begins_after_the_section(tokenizer: Tokenizer) -> None:
    end = tokenizer.token_to_id("</think>")
    for prompt in (PROMPT, PROMPT + "<think>\n"):
        made = plan(tokenizer, prompt, **JSON)
        assert made.params.thinking.end_token_ids == (end,)
        assert (made.prompt, made.is_thinking) == (PROMPT + "<think>\n", True)
        assert answer(tokenizer, made, 'Hm.</think>\n{"a": 1}') == ('\n{"a": 1}', "Hm.")
    closed = plan(tokenizer, PROMPT + "<think>\n\n</think>\n\n", **JSON)
    assert closed.params.thinking is None


def test_a_constraint_makes_no_model_think_that_was_not_asked_to(tokenizer: Tokenizer) -> None:
    """Gemma 4 thinks if its prompt says so. Its small models get no closed section otherwise."""
    before = tokenizer.chat_templates
    tokenizer.chat_templates = ChatTemplates({"default": "<|channel>thought"})
    try:
        quiet, loud = (plan(tokenizer, f"{asked}{PROMPT}", **JSON) for asked in ("", "<|think|>"))
        free = plan(tokenizer, PROMPT)
    finally:
        tokenizer.chat_templates = before
    assert (quiet.prompt, quiet.reasoning) == (f"{PROMPT}<|channel>thought\n<channel|>", None)
    assert (loud.prompt, loud.reasoning) == (f"<|think|>{PROMPT}<|channel>thought\n", GEMMA)
    assert loud.is_thinking
    assert (free.prompt, free.reasoning) == (PROMPT, GEMMA), "it may still write an empty section"


def test_tool_calls_come_behind_the_section(tokenizer: Tokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    made = plan(tokenizer, PROMPT + "<think>\n", tools=tools)
    assert made.params.thinking.end == "</think>"
    text = 'I could <tool_call>.</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    message = MessageBuilder()
    message.add(ChatReader(made).feed(text, True))
    built = message.message()
    assert (built.reasoning_content, built.tool_calls[0].function.name) == ("I could <tool_call>.", "f")
    assert built.content is None
    message = MessageBuilder()
    message.add(ChatReader(made).feed("Hm.</think>\n\nYes.", True))
    assert message.message().content == "Yes."


def test_reasoning_effort_is_for_templates_that_know_it(tokenizer: Tokenizer) -> None:
    without_effect = collect_ignored()
    assert plan(tokenizer, PROMPT, reasoning_effort="low").prompt == PROMPT
    assert without_effect == ["reasoning_effort"]
    collect_ignored(refuses=True)
    with pytest.raises(RequestRefused) as caught:
        plan(tokenizer, PROMPT, reasoning_effort="low")
    assert caught.value.refusal.field == "reasoning_effort"
    tokenizer.chat_templates = ChatTemplates({"default": HYBRID + "{{ reasoning_effort }}"})
    assert plan(tokenizer, PROMPT, reasoning_effort="low").prompt == PROMPT
    tokenizer.chat_templates = ChatTemplates({"default": HYBRID})
