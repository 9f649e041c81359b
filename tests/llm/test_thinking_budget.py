"""A bound on thinking through `LLM.chat`, in each format of sections, with drafts: counts are exact, and nothing else
changes.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import msgspec
import pytest

from manta.cluster.chat.reasoning import FORMATS, ReasoningFormat
from manta.cluster.chat.tool_formats import GPT_OSS
from manta.cluster.errors import RequestRefused
from manta.cluster.llm import LLM, ConstraintSpec, SamplingParams
from manta.cluster.text.chat_template import ChatTemplates
from tests.checkpoints import checkpoint
from tests.grammar_pools import VOCAB_SIZE
from tests.tool_formats import template_of, tokenizer_folder

MESSAGES = [{"role": "user", "content": "Do it."}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}
JSON = ConstraintSpec(kind="json_schema", text=json.dumps(SCHEMA), any_whitespace=False)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
MAX_TOKENS = 48
BUDGETS = (0, 1, 20, MAX_TOKENS)
SECTIONS = [form for form in FORMATS if not form.is_channel]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Its tokenizer has `<think>` as a token, and writes `[THINK]` in several."""
    folder = tokenizer_folder(tmp_path_factory.mktemp("tokenizer"), "")
    drafts = {"proposers": ["forced"], "adaptive": False}
    options = {"tokenizer": str(folder), "dtype": "float32", "kv_cache_bytes": "64MiB", "max_num_sequences": 16}
    return LLM(str(checkpoint("llama", vocab_size=VOCAB_SIZE)), speculative=drafts, **options)


def speak(llm: LLM, template: str) -> None:
    llm.tokenizer.chat_templates = ChatTemplates({"default": template})


def opened(form: ReasoningFormat) -> str:
    """A template that opens the section, and knows its end."""
    return f"{{# {form.end} #}}<|im_start|>assistant\n{form.begin}"


def answers(
    llm: LLM, budgets: tuple[int, ...] = BUDGETS, constraint: ConstraintSpec | None = None, **options: Any
) -> list[Any]:
    """The choices of a request for each budget, two each, in the order of the budgets."""
    params = SamplingParams(temperature=1, seed=3, n=2, max_tokens=MAX_TOKENS, ignore_eos=True, constraint=constraint)
    each = [msgspec.structs.replace(params, thinking_token_budget=budget) for budget in budgets]
    outputs = llm.chat([MESSAGES] * len(each), each, use_tqdm=False, **options)
    return [choice for output in outputs for choice in output.outputs]


def thoughts(llm: LLM, form: ReasoningFormat, token_ids: list[int]) -> int:
    """Returns the tokens before the one that begins the end of the section."""
    end = llm.tokenizer.encode(form.end, add_special_tokens=False)
    return next((at for at in range(len(token_ids)) if token_ids[at : at + len(end)] == end), len(token_ids))


@pytest.mark.parametrize("form", SECTIONS, ids=lambda form: form.begin)
def test_a_section_has_as_many_tokens_as_it_may(llm: LLM, form: ReasoningFormat) -> None:
    speak(llm, opened(form))
    choices = answers(llm)
    for number, choice in enumerate(choices):
        budget, longest = BUDGETS[number // 2], choices[number % 2 - 2].token_ids
        assert thoughts(llm, form, choice.token_ids) == budget
        assert choice.token_ids[:budget] == longest[:budget], "before the end of the section nothing is forced"
        assert form.end not in choice.message["content"]


@pytest.mark.parametrize("form", SECTIONS, ids=lambda form: form.begin)
def test_an_answer_behind_the_section_fits_its_schema(llm: LLM, form: ReasoningFormat) -> None:
    speak(llm, form.begin)  # a template of a model that may think
    for number, choice in enumerate(answers(llm, BUDGETS[:3], JSON)):
        assert thoughts(llm, form, choice.token_ids) == BUDGETS[number // 2]
        jsonschema.validate(json.loads(choice.message["content"]), SCHEMA)
        assert choice.finish_reason == "stop"


def test_channels_of_thoughts_end_beside_calls(llm: LLM) -> None:
    """The grammar of the calls covers the thoughts too, and both restrict the tokens."""
    speak(llm, template_of(GPT_OSS))
    channel, message, end = map(llm.tokenizer.token_to_id, ("<|channel|>", "<|message|>", "<|end|>"))
    analysis = llm.tokenizer.encode("analysis", add_special_tokens=False)
    num_thinking = []
    for number, choice in enumerate(answers(llm, (0, 1, 5), tools=TOOLS, tool_choice="required")):
        ids, count, at = choice.token_ids, 0, 0
        header = [channel, *analysis, message]
        while at < len(ids):
            if ids[at : at + len(header)] == header:
                at += len(header)
                stop = ids.index(end, at) if end in ids[at:] else len(ids)
                count += stop - at
                at = stop
            at += 1
        most = (0, 1, 5)[number // 2]
        assert count <= most + 3, "a character is completed"
        num_thinking.append(count)
    assert num_thinking[:2] == [0, 0]
    assert any(num_thinking)


def test_a_model_without_sections_refuses_a_bound(llm: LLM) -> None:
    speak(llm, "<|im_start|>assistant\n")
    params = SamplingParams(thinking_token_budget=3, max_tokens=4)
    for ask in (lambda: llm.chat(MESSAGES, params, use_tqdm=False), lambda: llm.generate("x", params, use_tqdm=False)):
        with pytest.raises(RequestRefused) as caught:
            ask()
        assert (caught.value.refusal.kind, caught.value.refusal.field) == ("unsupported", "thinking_token_budget")


def test_an_answer_without_a_constraint_needs_no_masks(llm: LLM) -> None:
    (form,) = (each for each in SECTIONS if each.begin == "<think>")
    speak(llm, opened(form))
    params = SamplingParams(temperature=1, seed=1, max_tokens=40, thinking_token_budget=4, ignore_eos=True)
    llm.add_request("bounded", "Why?\n<think>", params)
    sessions = []
    while llm.engine.has_unfinished:
        llm.step()
        sessions.append(llm.engine.stats().grammar_pool.num_sessions)
    assert sessions[2] == 1
    assert sessions[8:] == [0] * len(sessions[8:])


def test_a_prompt_that_thinks_is_bounded_too(llm: LLM) -> None:
    (form,) = (each for each in SECTIONS if each.begin == "<think>")
    speak(llm, opened(form))
    params = SamplingParams(temperature=1, seed=1, max_tokens=12, thinking_token_budget=4)
    prompts = ["Why?\n<think>Because", "Why?\n<think>So.</think>"]
    (inside, closed) = (each.outputs[0].token_ids for each in llm.generate(prompts, params, use_tqdm=False))
    assert thoughts(llm, form, inside) == 4
    assert thoughts(llm, form, closed) == len(closed)
