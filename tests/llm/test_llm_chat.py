"""`LLM.chat`: the model's template, tools, `response_format`, streams, and mistakes named by their field."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import transformers

from benchmarks.demo_model.data import TASKS, held_out
from manta.cluster.engine.request import FinishStatus
from manta.cluster.errors import RequestRefused
from manta.cluster.llm import LLM, OutputKind, RequestOutput, SamplingParams
from manta.cluster.text.chat_template import ChatTemplates
from manta.workers.checkpoints.model_folder import resolve_model_folder
from tests.checkpoints import checkpoint
from tests.structured.test_forced_text import KINDS, constraints

GREEDY = SamplingParams(temperature=0, max_tokens=80)
QUESTIONS = ("What is Manta?", "What can you do?")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", dtype="float32", kv_cache_bytes="64MiB", max_num_sequences=8)


def asked(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_chats_use_the_template_and_append_answers(llm: LLM) -> None:
    (output,) = llm.chat(asked(QUESTIONS[0]), GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == llm.tokenizer.apply_chat_template(asked(QUESTIONS[0]))
    (plain,) = llm.generate(output.prompt_token_ids, GREEDY, use_tqdm=False)
    assert output.outputs[0].text == plain.outputs[0].text
    assert output.outputs[0].message == {"role": "assistant", "content": plain.outputs[0].text}
    assert plain.outputs[0].message is None


def test_several_conversations_are_one_batch(llm: LLM) -> None:
    together = llm.chat([asked(question) for question in QUESTIONS], GREEDY, use_tqdm=False)
    alone = [llm.chat(asked(question), GREEDY, use_tqdm=False)[0] for question in QUESTIONS]
    assert [each.outputs[0].text for each in together] == [each.outputs[0].text for each in alone]
    with pytest.raises(ValueError, match="1 sampling parameters for 2 conversations"):
        llm.chat([asked(question) for question in QUESTIONS], [GREEDY], use_tqdm=False)


def test_a_response_format_holds(llm: LLM) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"minutes": {"type": "integer"}}, "required": ["minutes"]}
    form = {
        "type": "json_schema",
        "json_schema": {"name": "timer", "schema": {**schema, "additionalProperties": False}},
    }
    (output,) = llm.chat(asked("Twenty minutes, please."), GREEDY, use_tqdm=False, response_format=form)
    assert set(json.loads(output.outputs[0].message["content"])) == {"minutes"}


def test_the_name_of_a_special_token_can_be_forced(llm: LLM) -> None:
    texts = [f"a{llm.tokenizer.token_text(token_id)}b" for token_id in sorted(llm.tokenizer.special_ids)]
    cases = [constraints(text)[kind] for text in texts for kind in KINDS]
    params = [SamplingParams(temperature=0, max_tokens=60, constraint=spec) for spec, _ in cases]
    outputs = llm.generate(["x"] * len(cases), params, use_tqdm=False)
    for (spec, text), output in zip(cases, outputs, strict=True):
        choice = output.outputs[0]
        assert choice.finish_reason is not FinishStatus.FINISHED_INTERNAL_ERROR, (spec, choice)
        if choice.finish_reason is FinishStatus.FINISHED_STOPPED and spec.kind != "structural_tag":
            assert choice.text == text


def test_the_model_sees_tool_calls_and_results(llm: LLM) -> None:
    (sample,) = held_out("tool_call", 1)
    messages = list(sample.messages)
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False, tools=sample.tools)
    assert output.outputs[0].text == sample.answer
    message = output.outputs[0].message
    (call,) = message["tool_calls"]
    assert message["content"] is None
    messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "It is done."}]
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False, tools=sample.tools)
    end = f"<|im_start|>assistant\n{sample.answer}<|im_end|>\n<|im_start|>tool\nIt is done.<|im_end|>\n"
    assert output.prompt.endswith(f"{end}<|im_start|>assistant\n")
    assert output.outputs[0].message == {"role": "assistant", "content": "It is done."}


def test_a_loop_of_tools_ends_in_words(llm: LLM) -> None:
    """Results that training never shows: after its own call the model tells them, and calls nothing again."""
    num_right = 0
    for sample in held_out("tool_answer", 16):
        request, _, result = sample.messages
        (output,) = llm.chat([request], GREEDY, use_tqdm=False, tools=sample.tools)
        (call,) = output.outputs[0].message["tool_calls"]
        messages = [request, output.outputs[0].message, {**result, "tool_call_id": call["id"]}]
        (output,) = llm.chat(messages, GREEDY, use_tqdm=False, tools=sample.tools)
        told = output.outputs[0].message
        assert "tool_calls" not in told
        num_right += told["content"] == sample.answer
    assert num_right >= 13


@pytest.mark.parametrize("name", ["target", "draft"])
def test_demo_templates_render_alike_in_transformers(llm: LLM, name: str) -> None:
    reference = transformers.AutoTokenizer.from_pretrained(resolve_model_folder("demo").parent / name)
    for task in TASKS:
        (sample,) = held_out(task, 1)
        expected = reference.apply_chat_template(
            sample.messages, tools=sample.tools, add_generation_prompt=True, tokenize=False
        )
        assert llm.tokenizer.render_chat_template(list(sample.messages), tools=sample.tools) == expected


def test_a_chat_may_be_streamed(llm: LLM) -> None:
    async def stream() -> list[RequestOutput]:
        params = SamplingParams(temperature=0, max_tokens=80, output_kind=OutputKind.DELTA)
        return [output async for output in llm.stream_chat(asked(QUESTIONS[0]), params)]

    outputs = asyncio.run(stream())
    (whole,) = llm.chat(asked(QUESTIONS[0]), GREEDY, use_tqdm=False)
    assert len(outputs) > 5
    assert "".join(output.outputs[0].text for output in outputs) == whole.outputs[0].text
    assert [output.outputs[0].message for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    assert outputs[-1].outputs[0].message == whole.outputs[0].message


@pytest.mark.parametrize(
    ("messages", "options", "param", "words"),
    [
        ([], {}, "messages", "at least one message"),
        ([{"role": "usr", "content": "x"}], {}, "messages[0].role", "'usr' is unknown; use one of system"),
        ([{"role": "user", "text": "x"}], {}, "messages[0].text", "is unknown"),
        (asked("x"), {"temperature": 0}, "temperature", "SamplingParams"),
        (asked("x"), {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "is required"),
        (asked("x"), {"tool_choice": "required"}, "tool_choice", "only allowed with tools"),
        (asked("x"), {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "own field"),
    ],
)
def test_a_mistake_is_named_by_its_field(
    llm: LLM, messages: list[dict[str, Any]], options: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(RequestRefused, match=words) as refused:
        llm.chat(messages, GREEDY, use_tqdm=False, **options)
    assert refused.value.refusal.field == param


def test_engine_options_are_read_like_a_configuration() -> None:
    with pytest.raises(ValueError, match=r"`max_num_sequence`; did you mean `max_num_sequences`\?"):
        LLM("demo", max_num_sequence=8)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({}, "shorten the prompt"),
        ({"max_model_len": 64}, "shorten the prompt, or raise max_model_len"),
        ({"kv_cache_bytes": 2**16}, r"shorten the prompt, or enlarge the KV cache \(kv_cache_bytes\)"),
    ],
)
def test_overlong_input_gets_an_applicable_remedy(options: dict[str, Any], remedy: str) -> None:
    llm = LLM(str(checkpoint("llama")), **{"kv_cache_bytes": 2**22, **options})
    with pytest.raises(RequestRefused, match=f"{remedy}$"):
        llm.generate([[5] * 600], use_tqdm=False)


TEMPLATES = {
    "as it is": "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}",
    "stripped": "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>\n{% endfor %}",
}


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("text", ["one, two", "one, two ", " one"])
def test_a_message_is_continued_where_transformers_would(
    source: str, text: str, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(llm.tokenizer.folder)
    theirs.chat_template = source
    monkeypatch.setattr(llm.tokenizer, "chat_templates", ChatTemplates({"default": source}))
    messages = [*asked("Count."), {"role": "assistant", "content": text}]
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False, continue_final_message=True)
    expected = theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert output.prompt_token_ids == llm.tokenizer.encode(expected, add_special_tokens=False)
