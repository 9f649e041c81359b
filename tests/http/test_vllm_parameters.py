"""Parameters that vLLM adds to OpenAI's, over HTTP against a live server: what they change in prompt and answer."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest

from manta.cluster.protocol.error_bodies import under_field
from manta.cluster.text.tokenizer import Tokenizer
from manta.structured.refusals import Refusal, sentence
from tests.checkpoints import reference_logits
from tests.patience import PATIENCE_S
from tests.server import shared_server

MESSAGES = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "one, two"}]


def ask(path: str, expected: int = 200, **body: Any) -> dict[str, Any]:
    """The answer to a greedy request."""
    server = shared_server()
    status, _, answer = server.post(path, {"model": server.model, "temperature": 0, **body})
    assert status == expected, answer
    return answer


def refusal(path: str, **body: Any) -> tuple[str, str]:
    """The field at fault and the message of a 400."""
    error = ask(path, 400, **body)["error"]
    return error["param"], error["message"]


def events(path: str, **body: Any) -> list[dict[str, Any]]:
    server = shared_server()
    data = json.dumps({"model": server.model, "temperature": 0, "stream": True, **body}).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        lines = answer.read().decode().split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]


# ---- continue_final_message ----------------------------------------------------------------------------------------


def test_an_answer_continues_the_last_message() -> None:
    tokenizer = Tokenizer(shared_server().folder)
    whole = tokenizer.render_chat_template(MESSAGES, add_generation_prompt=False)
    prompt = whole[: whole.rindex("one, two") + len("one, two")]
    expected = ask("/v1/completions", prompt=prompt, add_special_tokens=False, max_tokens=9, ignore_eos=True)
    answer = ask("/v1/chat/completions", messages=MESSAGES, continue_final_message=True, max_tokens=9, ignore_eos=True)
    assert answer["choices"][0]["message"]["content"] == expected["choices"][0]["text"]
    assert answer["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
    _, _, tokens = shared_server().post("/tokenize", {"messages": MESSAGES, "continue_final_message": True})
    assert tokens["tokens"] == tokenizer.encode(prompt, add_special_tokens=False)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": MESSAGES, "add_generation_prompt": True}, "send add_generation_prompt: false"),
        ({"messages": MESSAGES[:1]}, "a text of the assistant as the last message; add one"),
    ],
)
def test_only_a_text_of_the_assistant_is_continued(body: dict[str, Any], words: str) -> None:
    field, message = refusal("/v1/chat/completions", continue_final_message=True, **body)
    assert field == "continue_final_message"
    assert words in message


# ---- truncate_prompt_tokens ----------------------------------------------------------------------------------------


def test_only_a_prompts_last_tokens_are_used() -> None:
    ids = list(range(3, 60))
    kept = ask("/v1/completions", prompt=ids[-7:], max_tokens=5, ignore_eos=True)
    cut = ask("/v1/completions", prompt=ids, truncate_prompt_tokens=7, max_tokens=5, ignore_eos=True, echo=True)
    assert cut["usage"]["prompt_tokens"] == 7
    assert cut["choices"][0]["text"].endswith(kept["choices"][0]["text"])
    long = "word " * 20_000
    for path, prompt in (
        ("/v1/completions", {"prompt": long}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}),
    ):
        assert ask(path, truncate_prompt_tokens=-1, max_tokens=10, **prompt)["usage"]["prompt_tokens"] == 512 - 10
        assert refusal(path, truncate_prompt_tokens=0, **prompt)[0] == "truncate_prompt_tokens"


# ---- return_token_ids ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
def test_token_ids_of_prompt_and_output_are_reported(n: int) -> None:
    body = {"prompt": [[5, 9, 17], [4, 4]], "n": n, "seed": 1, "temperature": 1, "max_tokens": 6, "ignore_eos": True}
    choices = ask("/v1/completions", return_token_ids=True, **body)["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [[5, 9, 17]] * n + [[4, 4]] * n
    assert [len(choice["token_ids"]) for choice in choices] == [6] * 2 * n
    streamed: dict[int, list[int]] = {}
    prompts: dict[int, list[int]] = {}
    for event in events("/v1/completions", return_token_ids=True, **body):
        for choice in event["choices"]:
            streamed[choice["index"]] = streamed.get(choice["index"], []) + choice["token_ids"]
            if "prompt_token_ids" in choice:
                assert choice["index"] not in prompts, "once a choice"
                prompts[choice["index"]] = choice["prompt_token_ids"]
    assert streamed == {choice["index"]: choice["token_ids"] for choice in choices}
    assert prompts == {choice["index"]: choice["prompt_token_ids"] for choice in choices}
    assert "token_ids" not in ask("/v1/completions", **body)["choices"][0]


def test_token_ids_of_a_chat_are_reported() -> None:
    body = {"messages": MESSAGES[:1], "max_tokens": 6, "ignore_eos": True}
    answer = ask("/v1/chat/completions", return_token_ids=True, **body)
    tokenizer = Tokenizer(shared_server().folder)
    assert answer["prompt_token_ids"] == tokenizer.apply_chat_template(MESSAGES[:1])
    assert len(answer["choices"][0]["token_ids"]) == 6
    chunks = events("/v1/chat/completions", return_token_ids=True, **body)
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [
        answer["prompt_token_ids"]
    ]
    streamed = [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids", [])]
    assert streamed == answer["choices"][0]["token_ids"]


# ---- max_tokens 0 --------------------------------------------------------------------------------------------------


def test_a_prompt_is_scored_without_output() -> None:
    body = {"prompt": [[5, 9, 17, 30], [7]], "echo": True, "logprobs": 2}
    scored, answered = (ask("/v1/completions", max_tokens=count, **body) for count in (0, 1))
    for choice, longer, length in zip(scored["choices"], answered["choices"], (4, 1), strict=True):
        assert choice["finish_reason"] == "length"
        assert longer["text"].startswith(choice["text"])
        for name, values in choice["logprobs"].items():
            assert values == longer["logprobs"][name][:length]
            assert len(values) == length
    assert scored["usage"]["completion_tokens"] == 0
    assert scored["usage"]["prompt_tokens"] == 5
    (event,) = events("/v1/completions", max_tokens=0, **body | {"prompt": [7]})
    assert event["choices"][0]["logprobs"]["token_logprobs"] == [None]


@pytest.mark.parametrize("max_tokens", [1, 0])
def test_lm_evals_requests_score_a_continuation(max_tokens: int) -> None:
    """Its `local-completions` (0.4.13) sends such bodies, and reads the answer so. It asks for one token, and would be
    as well off with none.
    """
    context, continuation = [5, 9, 17], [30, 7]
    body = {"prompt": [context + continuation], "max_tokens": max_tokens, "logprobs": 1, "seed": 1234, "echo": True}
    (choice,) = ask("/v1/completions", **body)["choices"]
    end = len(choice["logprobs"]["token_logprobs"]) - max_tokens
    assert end == 5
    scores = choice["logprobs"]["token_logprobs"][len(context) : end]
    logprobs = reference_logits(shared_server().folder, context + continuation).log_softmax(-1)
    expected = [logprobs[position, token].item() for position, token in ((2, 30), (3, 7))]
    assert scores == pytest.approx(expected, abs=1e-3)
    for score, top in zip(scores, choice["logprobs"]["top_logprobs"][len(context) : end], strict=True):
        assert (score == max(top.values())) == (len(top) == 1)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_chunk_has_the_usage_so_far(path: str) -> None:
    prompt: dict[str, Any] = {"prompt": "x"} if path == "/v1/completions" else {"messages": MESSAGES}
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(path, **prompt, max_tokens=60, ignore_eos=True, stream_options=options)
    *counts, last = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert last == max(counts) == 60


def test_nothing_to_do_is_refused() -> None:
    field, message = refusal("/v1/completions", prompt="x", max_tokens=0)
    assert field == "max_tokens"
    assert "echo or prompt_logprobs, to score; add one, or send at least 1" in message
    assert refusal("/v1/chat/completions", messages=MESSAGES, max_tokens=0)[0] == "max_tokens"


# ---- what is answered with what serves -----------------------------------------------------------------------------


def test_a_pattern_of_whitespace_points_to_structured_outputs() -> None:
    for path, prompt in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": MESSAGES})):
        param, message = refusal(path, **prompt, guided_whitespace_pattern=" ")
        assert param == "guided_whitespace_pattern"
        assert "disable_any_whitespace" in message


def test_a_suffix_is_refused_for_a_model_without_tokens_for_it() -> None:
    field, message = refusal("/v1/completions", prompt="def f(", suffix="return 1")
    assert field == "suffix"
    assert "the model's tokenizer has no tokens for a text around a gap" in message


def _asking(way: str, schema: dict[str, Any], is_loose: bool) -> dict[str, Any]:
    if way == "response_format":
        form = {"name": "x", "schema": schema, "strict": not is_loose}
        return {"response_format": {"type": "json_schema", "json_schema": form}}
    if way == "tools":
        function = {"name": "f", "parameters": schema} | ({} if is_loose else {"strict": True})
        return {"tools": [{"type": "function", "function": function}]}
    return {"structured_outputs": {"json": schema, "loose": is_loose}}


UNNAMED = {"$dynamicRef": "#nowhere"}
"""A reference that names nothing, so that nothing can be enforced."""


@pytest.mark.parametrize("way", ["response_format", "structured_outputs", "tools"])
def test_unenforceable_keywords_are_named_and_may_be_dropped(way: str) -> None:
    schema = {"type": "object", "properties": {"a": UNNAMED}, "required": ["a"]}
    body = {"messages": MESSAGES[:1], "max_tokens": 1}
    refused, message = refusal("/v1/chat/completions", **body, **_asking(way, schema, False))
    assert refused.startswith(way)
    for word in ("#/properties/a/$dynamicRef '#nowhere' is none of the parts of", "put what it names into $defs"):
        assert word in message
    for backend in ("llguidance", "xgrammar", "Unimplemented", "lark"):
        assert backend not in message
    ask("/v1/chat/completions", **body, **_asking(way, schema, True))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            {"response_format": {"type": "xml"}},
            ["response_format.type", "'xml'", "text, json_object, json, regex, json_schema"],
        ),
        ({"tool_choice": "maybe"}, ["tool_choice", "'maybe'", "none, auto, required"]),
    ],
)
def test_a_wrong_choice_lists_the_right_ones(body: dict[str, Any], words: list[str]) -> None:
    _, message = refusal("/v1/chat/completions", messages=MESSAGES, **body)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("field", "way_out"),
    [
        ("response_format.json_schema.schema", 'send "strict": false in response_format.json_schema'),
        ("tools[0].function.parameters", 'send "strict": false in that function'),
        ("structured_outputs.json", 'send "loose": true in structured_outputs'),
    ],
)
def test_an_unsupported_keyword_is_refused_with_a_remedy(field: str, way_out: str) -> None:
    refusal = under_field(Refusal("not_enforced", "constraint", place="#/items/a", can_be_loose=True), field)
    assert (refusal.field, refusal.remedy) == (field, f"change it, or {way_out} to enforce the rest")
    assert sentence(refusal) == f"{field}: #/items/a cannot be enforced; {refusal.remedy}"
