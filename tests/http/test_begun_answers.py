"""A last message that is continued belongs to the constrained answer: whole, it satisfies the constraint, or it is
refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from manta import LLM, SamplingParams
from manta.structured.constraint import ConstraintSpec
from manta.structured.refusals import RequestRefused
from tests.server import shared_server

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}
UNIQUE = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 2}


def _is(schema: Any) -> Callable[[str], bool]:
    return lambda text: jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


def _matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


KINDS: dict[str, tuple[dict[str, Any], str, str, Callable[[str], bool]]] = {
    "json": ({"json": SCHEMA}, '{"a": 2', '{"b"', _is(SCHEMA)),
    "guarded": ({"json": UNIQUE}, "[1, ", "[1, 1", _is(UNIQUE)),
    "whole": ({"json": SCHEMA}, '{"a": 1}', '{"a": 1} ,', _is(SCHEMA)),
    "json_object": ({"json_object": True}, '{"é": {"b": [', "[", lambda text: text.startswith('{"é": {"b": [')),
    "regex": ({"regex": "(ab)+c(?!d)."}, "aba", "abb", _matches("(ab)+c[^d]")),
    "choice": ({"choice": ["red", "green"]}, "gr", "go", _matches("red|green")),
    "lark": ({"grammar": 'start: "<" /[0-9]{3}/ ">"'}, "<1", "1", _matches("<[0-9]{3}>")),
    "ebnf": ({"grammar": 'root ::= "<" [0-9] [0-9] ">"'}, "<1", "<a", _matches("<[0-9]{2}>")),
    "xgrammar": ({"grammar": 'root ::= "<" [0-9] [0-9] ">"', "backend": "xgrammar"}, "<1", "a", _matches("<[0-9]{2}>")),
}
"""Each kind of constraint with a beginning that fits, one that does not, and what holds of the whole."""
kinds = pytest.mark.parametrize("kind", KINDS)


def _messages(begun: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "Count."}, {"role": "assistant", "content": begun}]


def _chat(begun: str, **body: Any) -> tuple[int, dict[str, Any]]:
    server = shared_server()
    given = {"model": server.model, "messages": _messages(begun), "continue_final_message": True, "max_tokens": 60}
    status, _, answer = server.post("/v1/chat/completions", {"temperature": 0, **given, **body})
    return status, answer


@kinds
def test_a_chat_continues_within_its_constraint(kind: str) -> None:
    constraint, begun, unfit, holds = KINDS[kind]
    status, answer = _chat(begun, structured_outputs=constraint)
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length" or holds(begun + choice["message"]["content"])
    assert choice["finish_reason"] == "stop" or kind == "json_object"
    status, answer = _chat(unfit, structured_outputs=constraint)
    assert status == 400, answer
    assert answer["error"]["param"].startswith("structured_outputs")
    assert "the answer's beginning: the constraint does not allow" in answer["error"]["message"]


def test_several_choices_and_seeds_continue_alike() -> None:
    status, answer = _chat("[2, ", structured_outputs={"json": UNIQUE}, n=4, temperature=1, seed=3)
    assert status == 200, answer
    assert [json.loads("[2, " + choice["message"]["content"]) for choice in answer["choices"]] == [[2, 1]] * 4


def test_messages_of_anthropic_continue_within_their_schema() -> None:
    server = shared_server()
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    for begun, expected in (('{"a": 22', 200), ("Sure", 400)):
        body = {"model": server.model, "messages": _messages(begun), "max_tokens": 40, "output_config": form}
        status, _, answer = server.post("/v1/messages", body)
        assert status == expected, answer
        if status == 200:
            assert json.loads(begun + answer["content"][0]["text"]) == {"a": 22}
        else:
            assert "the answer's beginning" in answer["error"]["message"]


def test_a_text_beside_tools_is_continued() -> None:
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    status, answer = _chat("One, two", tools=tools)
    assert status == 200, answer
    status, answer = _chat("One, two", tools=tools, tool_choice="required")
    assert status == 400, answer


def test_an_offline_chat_continues_within_its_schema() -> None:
    llm = LLM("demo", dtype="float32", kv_cache_bytes="64MiB", max_num_sequences=8)
    spec = ConstraintSpec(kind="json_schema", text=json.dumps(SCHEMA))
    params = SamplingParams(temperature=0, max_tokens=60, constraint=spec)
    (output,) = llm.chat(_messages('{"a": 2'), params, use_tqdm=False, continue_final_message=True)
    assert json.loads('{"a": 2' + output.outputs[0].text) == {"a": 22}
    with pytest.raises(RequestRefused):
        llm.chat(_messages("Sure"), params, use_tqdm=False, continue_final_message=True)
