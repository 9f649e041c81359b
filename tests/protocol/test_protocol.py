"""OpenAI bodies and responses: the `openai` client's types parse what is sent, and every mistake names its field."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import openai.types as openai_types
import openai.types.chat as openai_chat
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.cluster.engine.request import Usage
from manta.cluster.errors import RequestRefused
from manta.cluster.http.access.request_admission import decode
from manta.cluster.http.endpoints.models import ModelCard, ModelList
from manta.cluster.http.endpoints.tokens import DetokenizeRequest, TokenizeRequest
from manta.cluster.http.exchange.codec import encode, sse_event
from manta.cluster.protocol import responses
from manta.cluster.protocol.error_bodies import answer_of
from manta.cluster.protocol.requests import ChatCompletionRequest, CompletionRequest
from manta.cluster.protocol.responses import usage_info
from manta.structured.refusals import Refusal
from manta.workers.sampling_params import SamplingParams

chat_fields = [field.encode_name for field in msgspec.structs.fields(ChatCompletionRequest)]
completion_fields = [field.encode_name for field in msgspec.structs.fields(CompletionRequest)]

HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> ChatCompletionRequest:
    return decode(ChatCompletionRequest, json.dumps({"model": "m", "messages": HELLO} | fields).encode())


def completion(**fields: Any) -> CompletionRequest:
    return decode(CompletionRequest, json.dumps({"model": "m", "prompt": "hello"} | fields).encode())


def refused(call: Any, *args: Any, **fields: Any) -> Refusal:
    """The refusal of what `call` refuses."""
    with pytest.raises(RequestRefused) as caught:
        call(*args, **fields)
    refusal = caught.value.refusal
    assert answer_of(refusal).status == 400
    assert refusal.field in str(caught.value)
    return refusal


# ---- requests ------------------------------------------------------------------------------------------------------


def test_chat_fields_become_sampling_params() -> None:
    request = chat(
        temperature=0.5,
        top_p=0.9,
        max_tokens=7,
        max_completion_tokens=9,
        stop=["a", "b"],
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"5": 3, "7": -100},
        seed=-3,
        logprobs=True,
        top_logprobs=4,
        top_k=5,
        min_p=0.1,
        repetition_penalty=1.1,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[3],
        bad_words=["x"],
        allowed_token_ids=[1, 2],
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        prompt_logprobs=1,
        priority=-2,
    )
    assert request.sampling_params() == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        max_tokens=9,
        stop=("a", "b"),
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={5: 3.0, 7: -100.0},
        seed=-3,
        logprobs=4,
        top_k=5,
        min_p=0.1,
        repetition_penalty=1.1,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=(3,),
        bad_words=("x",),
        allowed_token_ids=(1, 2),
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        prompt_logprobs=1,
    )
    assert request.priority == -2


def test_defaults_are_openai_s() -> None:
    assert chat().sampling_params() == SamplingParams()
    assert chat(stop=None, temperature=None, logprobs=False, stream=None).sampling_params() == SamplingParams()
    assert completion().sampling_params() == SamplingParams(max_tokens=16)
    assert chat(logprobs=True).sampling_params().logprobs == 0
    assert chat(stop="x").sampling_params().stop == ("x",)
    assert not chat(stream=True).include_usage
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage


def test_echo_with_logprobs_asks_for_the_prompt_s() -> None:
    assert completion(logprobs=2, echo=True).sampling_params().prompt_logprobs == 2
    assert completion(logprobs=2).sampling_params().prompt_logprobs is None
    assert completion(echo=True).sampling_params().prompt_logprobs is None
    both = completion(echo=True, logprobs=1, prompt_logprobs=3).sampling_params()
    assert (both.logprobs, both.prompt_logprobs) == (1, 3)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "verbosity": "low"},
        {"parallel_tool_calls": True, "safety_identifier": "s", "prompt_cache_key": "k", "tool_choice": "none"},
        {"reasoning_effort": "low", "include_reasoning": False},
        {"tools": [], "functions": None, "response_format": {"type": "text"}, "modalities": ["text"], "audio": None},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_fields_that_change_nothing_are_accepted(fields: dict[str, Any]) -> None:
    assert chat(**fields).sampling_params() == SamplingParams()


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_every_form_of_prompt(prompt: Any, expected: list[Any]) -> None:
    assert completion(prompt=prompt).prompts() == expected


def test_messages_become_plain_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    answer = openai_chat.ChatCompletionMessage(role="assistant", content="hi").model_dump()
    messages = [{"role": "developer", "content": "d"}, {"role": "user", "content": parts, "name": "Ann"}, answer]
    assert chat(messages=messages).template_messages() == [
        {"role": "system", "content": "d"},
        {"role": "user", "content": "one\ntwo", "name": "Ann"},
        {"role": "assistant", "content": "hi"},
    ]


# ---- refusals ------------------------------------------------------------------------------------------------------

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

CHAT_MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "content": "x", "function_call": {}}]}, "messages[0].function_call"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}}"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [CALL, {**CALL, "type": "custom"}]}]},
        "messages[0].tool_calls[1].custom",
    ),
    ({"messages": [*HELLO, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [*HELLO, {"role": "user", "content": 5}]}, "messages[1].content"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
    ({"model": 3}, "model"),
    ({"guided_json": {}, "grammar": "a"}, "guided_json"),
    ({"temperature": "warm"}, "temperature"),
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
    ({"seed": 2**70}, "seed"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": "1"}}, "logit_bias"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 65}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"n": 129}, "n"),
    ({"n": -1}, "n"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"n": 0}, "n"),
    ({"priority": 2**40}, "priority"),
    ({"functions": [{}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"prediction": {"type": "content"}}, "prediction.content"),
    ({"prediction": {"type": "content", "content": [{"type": "refusal"}]}}, "prediction.content[0].type"),
    ({"metadata": {str(key): "" for key in range(17)}}, "metadata"),
    ({"metadata": {"k" * 65: ""}}, "metadata"),
    ({"metadata": {"k": "v" * 513}}, "metadata"),
    ({"metadata": {"k": 1}}, "metadata"),
    ({"reasoning_effort": 3}, "reasoning_effort"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"moderation": {"model": "m"}}, "moderation"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
]

COMPLETION_MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": [[1], []]}, "prompt[1]"),
    ({"prompt": [1, "a"]}, "prompt[0]"),
    ({"prompt": ["a", 1]}, "prompt[1]"),
    ({"prompt": ["a", [1]]}, "prompt[1]"),
    ({"prompt": [1, -1]}, "prompt[1]"),
    ({"prompt": [[1], [2**40]]}, "prompt[1][0]"),
    ({"prompt": [1, 2.5]}, "prompt[1]"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"logprobs": 65}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "x", "echo": True}, "suffix"),
    ({"suffix": "x", "truncate_prompt_tokens": 4}, "suffix"),
    ({"n": 129}, "n"),
    ({"n": 2, "best_of": 3}, "best_of"),
    ({"echo": "yes"}, "echo"),
    ({"messages": HELLO}, "messages"),
]


@pytest.mark.parametrize(("fields", "param"), CHAT_MISTAKES)
def test_a_chat_body_error_names_its_field(fields: dict[str, Any], param: str) -> None:
    error = refused(lambda: chat(**fields).sampling_params())
    assert error.field == param


@pytest.mark.parametrize(("fields", "param"), COMPLETION_MISTAKES)
def test_a_completion_body_error_names_its_field(fields: dict[str, Any], param: str) -> None:
    error = refused(lambda: completion(**fields).sampling_params())
    assert error.field == param


def test_missing_fields_are_named() -> None:
    assert refused(decode, ChatCompletionRequest, b'{"model": "m"}').field == "messages"
    assert refused(decode, CompletionRequest, b'{"model": "m"}').field == "prompt"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"hello", "JSON"),
        (b'{"model": "m", "messages": []} x', "JSON"),
        (b'{"model": NaN}', "JSON"),
        (b'{"model": "\\ud800"}', "JSON"),
        (b'{"model": "\xff"}', "UTF-8"),
        (b"[1]", "object"),
        (b"null", "object"),
        (b'{"model": "m", "chat_template_kwargs": ' + b'{"a":' * 100_000, "nested|JSON"),
        (b'{"model": "m", "messages": [{"role": "user", "content": ' + b"[" * 100_000, "nested|JSON|content"),
    ],
)
def test_bodies_that_are_no_json_object(body: bytes, reason: str) -> None:
    for kind in (ChatCompletionRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest):
        with pytest.raises(RequestRefused) as caught:
            decode(kind, body)
        if kind is ChatCompletionRequest:
            assert any(word in str(caught.value) for word in reason.split("|"))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=8,
)


def outcome(call: Any) -> SamplingParams | RequestRefused:
    try:
        return call().sampling_params()
    except RequestRefused as error:
        return error


@given(st.dictionaries(st.sampled_from(chat_fields), json_values, max_size=4))
def test_any_chat_body_is_taken_or_refused(fields: dict[str, Any]) -> None:
    result = outcome(lambda: chat(**fields))
    assert isinstance(result, SamplingParams) or result.refusal.field.split(".")[0].split("[")[0] in fields


@given(st.dictionaries(st.sampled_from(completion_fields), json_values, max_size=4))
def test_any_completion_body_is_taken_or_refused(fields: dict[str, Any]) -> None:
    result = outcome(lambda: completion(**fields))
    assert isinstance(result, SamplingParams) or result.refusal.field.split(".")[0].split("[")[0] in fields


@given(st.binary(max_size=40))
def test_any_bytes_are_answered(body: bytes) -> None:
    with pytest.raises(RequestRefused):
        decode(ChatCompletionRequest, body)


def test_tokenize_takes_text_or_messages() -> None:
    assert decode(TokenizeRequest, b'{"prompt": ""}').prompt == ""
    request = decode(TokenizeRequest, json.dumps({"model": "m", "messages": HELLO}).encode())
    assert request.template_messages() == HELLO
    assert refused(decode, TokenizeRequest, b"{}").field == "prompt"
    assert refused(decode, TokenizeRequest, b'{"prompt": "a", "messages": []}').field == "prompt"
    assert refused(decode, TokenizeRequest, b'{"messages": []}').field == "messages"
    assert decode(DetokenizeRequest, b'{"tokens": []}').tokens == []
    assert refused(decode, DetokenizeRequest, b'{"tokens": [-1]}').field == "tokens[0]"
    assert refused(decode, DetokenizeRequest, b'{"tokens": ["a"]}').field == "tokens[0]"


# ---- responses -----------------------------------------------------------------------------------------------------

USAGE = usage_info([Usage(5, 2, 4, 1, 6), Usage(3, 1, 0, 2)])
TOP = responses.TopLogprob("b", -1.0, [98])
CHAT_LOGPROBS = responses.ChatLogprobs([responses.ChatTokenLogprob("a", -0.5, [97], [TOP])])
COMMON: dict[str, Any] = {"id": "x-1", "created": 1, "model": "m"}


def parsed(kind: Any, response: msgspec.Struct) -> Any:
    """Validates strictly, which the client itself does not."""
    return kind.model_validate_json(encode(response), strict=True)


def test_usage_sums_over_prompts() -> None:
    usage = parsed(openai_types.CompletionUsage, USAGE)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (8, 3, 11)
    assert usage.prompt_tokens_details.cached_tokens == 4
    details = usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (3, 6)


def test_openai_s_types_parse_a_chat_completion() -> None:
    choice = responses.ChatChoice(
        message=responses.ChatResponseMessage("hé"), logprobs=CHAT_LOGPROBS, finish_reason="stop", stop_reason="x"
    )
    body = parsed(openai_chat.ChatCompletion, responses.ChatCompletion(**COMMON, choices=[choice], usage=USAGE))
    assert body.choices[0].message.content == "hé"
    assert body.choices[0].message.role == "assistant"
    assert body.choices[0].finish_reason == "stop"
    assert body.choices[0].logprobs.content[0].top_logprobs[0].token == "b"
    assert body.usage.prompt_tokens == 8
    assert "prompt_logprobs" not in body.model_dump()


def test_openai_s_types_parse_chat_chunks() -> None:
    first = responses.ChatChunkChoice(delta=responses.ChatDelta(role="assistant", content=""), logprobs=CHAT_LOGPROBS)
    chunk = responses.ChatCompletionChunk(**COMMON, choices=[first])
    body = parsed(openai_chat.ChatCompletionChunk, chunk)
    assert (body.choices[0].delta.role, body.choices[0].delta.content) == ("assistant", "")
    assert body.choices[0].finish_reason is None
    assert b"usage" not in encode(chunk)
    assert sse_event(chunk) == b"data: " + encode(chunk) + b"\n\n"
    last = responses.ChatChunkChoice(delta=responses.ChatDelta(), finish_reason="length")
    body = parsed(openai_chat.ChatCompletionChunk, responses.ChatCompletionChunk(**COMMON, choices=[last], usage=None))
    assert body.choices[0].finish_reason == "length"
    assert body.choices[0].delta.model_dump(exclude_unset=True) == {}
    body = parsed(openai_chat.ChatCompletionChunk, responses.ChatCompletionChunk(**COMMON, choices=[], usage=USAGE))
    assert body.usage.total_tokens == 11


def test_openai_s_types_parse_a_completion() -> None:
    logprobs = responses.CompletionLogprobs([0], ["a"], [-0.5], [{"a": -0.5, "b": -1.0}])
    choice = responses.CompletionChoice(index=1, text="a", logprobs=logprobs, finish_reason="length")
    body = parsed(openai_types.Completion, responses.Completion(**COMMON, choices=[choice], usage=USAGE))
    assert body.choices[0].logprobs.top_logprobs == [{"a": -0.5, "b": -1.0}]
    assert (body.choices[0].index, body.choices[0].finish_reason) == (1, "length")


def test_openai_s_types_parse_the_models() -> None:
    card = ModelCard(id="m", created=1, max_model_len=512, task="generate", root="m")
    body = json.loads(encode(ModelList([card])))
    assert body["object"] == "list"
    assert openai_types.Model.model_validate(body["data"][0], strict=True).id == "m"
