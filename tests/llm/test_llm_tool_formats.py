"""Every format of tool calls through `LLM.chat`: a model with random weights at temperature 2 makes calls that fit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest

from manta.cluster.chat.tool_formats import KIMI_K2, MISTRAL, MISTRAL_ARGS, MISTRAL_CALL_ID, QWEN3_CODER, ToolFormat
from manta.cluster.errors import RequestRefused
from manta.cluster.llm import LLM, SamplingParams
from manta.cluster.text.chat_template import ChatTemplates
from tests.checkpoints import checkpoint
from tests.conftest import PROVE
from tests.grammar_pools import VOCAB_SIZE
from tests.tool_formats import TOOLS, WRITERS, template_of, tokenizer_folder

MESSAGES = [{"role": "user", "content": "Do it."}]
SHORT = [tool for tool in TOOLS if tool["function"]["name"] in ("set_on", "stop_all", "tag")]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in SHORT}
MOST_CHATS = 6
NUM_CHATS = MOST_CHATS if PROVE else 3


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tokenizer_folder(tmp_path_factory.mktemp("tokenizer"), "")
    model = checkpoint("llama", vocab_size=VOCAB_SIZE)
    return LLM(str(model), tokenizer=str(folder), dtype="float32", kv_cache_bytes="64MiB", max_num_sequences=16)


def speak(llm: LLM, form: ToolFormat) -> None:
    """Gives the model the chat template of another one."""
    llm.tokenizer.chat_templates = ChatTemplates({"default": template_of(form)})


def calls_of(llm: LLM, seeds: Sequence[int] = range(NUM_CHATS), **options: Any) -> list[Any]:
    """The calls of complete answers, after the verdict of `jsonschema` on each."""
    params = [SamplingParams(temperature=2, seed=seed, max_tokens=300) for seed in seeds]
    outputs = llm.chat([MESSAGES] * len(seeds), params, use_tqdm=False, tools=SHORT, **options)
    found = []
    for output in (each.outputs[0] for each in outputs):
        calls = output.message.get("tool_calls", [])
        if output.finish_reason != "length":
            for call in calls:
                arguments = json.loads(call["function"]["arguments"])
                jsonschema.validate(arguments, SCHEMAS[call["function"]["name"]])
            found.append(calls)
    return found


@pytest.mark.few(3)
@pytest.mark.parametrize("form", WRITERS, ids=lambda form: form.name)
def test_a_random_model_makes_calls_that_fit(llm: LLM, form: ToolFormat) -> None:
    speak(llm, form)
    for parallel in (False, True):
        found = calls_of(llm, tool_choice="required", parallel_tool_calls=parallel)
        assert found
        assert all(calls for calls in found)
        assert parallel or all(len(calls) == 1 for calls in found)
    named = {"type": "function", "function": {"name": "set_on"}}
    assert {call["function"]["name"] for calls in calls_of(llm, tool_choice=named) for call in calls} == {"set_on"}


@pytest.mark.few(5)
@pytest.mark.parametrize("form", WRITERS, ids=lambda form: form.name)
def test_the_next_prompt_has_the_calls_id(llm: LLM, form: ToolFormat) -> None:
    speak(llm, form)
    answers = (calls_of(llm, [seed], tool_choice="required") for seed in range(MOST_CHATS))
    ((call, *_),) = next(filter(None, answers))
    given = call["function"]
    if form is KIMI_K2:
        assert call["id"].partition(":")[0] == f"functions.{given['name']}"
    elif form in (MISTRAL, MISTRAL_ARGS, MISTRAL_CALL_ID):
        assert len(call["id"]) == 9
        assert call["id"].isalnum()
    else:
        assert call["id"].startswith("call_")
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
    params = SamplingParams(max_tokens=1)
    (output,) = llm.chat([*MESSAGES, message, result], params, use_tqdm=False, tools=SHORT, tool_choice="none")
    prompt = llm.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
    assert f"{call['id']} {given['name']} " in prompt


def test_what_formats_cannot_carry_is_refused_or_dropped(llm: LLM) -> None:
    speak(llm, QWEN3_CODER)
    parameters: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}, "minProperties": 1}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}
    params = SamplingParams(temperature=0, max_tokens=8)
    with pytest.raises(RequestRefused, match="cannot carry the keyword minProperties") as caught:
        llm.chat(MESSAGES, params, use_tqdm=False, tools=[tool])
    assert caught.value.refusal.field == "tools[0].function.parameters"
    loose = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    (output,) = llm.chat(MESSAGES, params, use_tqdm=False, tools=[loose], tool_choice="required")
    assert output.outputs[0].text.lstrip("\n").startswith("<tool_call>\n<function=f>")
