"""Constraints beside what a request forbids, forces or ends with, and constraints that spell special tokens' names.

The demo model's tokenizer has the marks of its chats and calls as special tokens. Nothing here may be a server error.
"""

from __future__ import annotations

import concurrent.futures
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from manta.cluster.text.tokenizer import Tokenizer
from tests.conftest import PROVE
from tests.local_server import ThreadedServer
from tests.structured.test_forced_text import KINDS, constraints
from tests.structured.test_grammar_backends import DEMO, vocabulary

MARKS = [vocabulary().tokens[token_id].decode() for token_id in vocabulary().mark_token_ids]
CLOSING = "</tool_call>"
FIELDS = {"json_schema": "json", "lark": "grammar", "ebnf": "grammar"}
"""Names in a body of the kinds of constraints that have another name there."""


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadedServer]:
    running = ThreadedServer(folder=DEMO)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO)


def structured(kind: str, text: str) -> dict[str, Any]:
    """The field of a body for a constraint of this kind."""
    spec, _ = constraints(text)[kind]
    value = json.loads(spec.text) if spec.kind in ("choice", "structural_tag") else spec.text
    return {FIELDS.get(spec.kind, spec.kind): value, "disable_any_whitespace": True}


def tool(parameter: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"k": parameter}, "required": ["k"], "additionalProperties": False}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def asks_all(server: ThreadedServer, bodies: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """Sends completions, or chats if they have messages, several at a time. Returns each status and answer."""

    def ask(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        status, _, answer = server.post(path, {"model": server.model, "temperature": 0, "max_tokens": 90, **body})
        return status, answer

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return list(pool.map(ask, bodies))


def test_the_name_of_a_special_token_can_be_forced(server: ThreadedServer) -> None:
    cases = [(kind, f"a{mark}b") for kind in KINDS for mark in MARKS]
    bodies = [{"prompt": "x", "structured_outputs": structured(*each)} for each in cases]
    for (kind, text), (status, answer) in zip(cases, asks_all(server, bodies), strict=True):
        assert status == 200, (kind, text, answer)
        if kind not in ("structural tag", "lark with a schema"):  # where the model may write something else first
            choice = answer["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == (constraints(text)[kind][1], "stop")


def test_an_escape_of_gbnf_is_a_character(server: ThreadedServer) -> None:
    grammar = r'root ::= "\u00e9\U0001F600" [\u0430-\u0433\U0001F600-\U0001F601]{3} "\x41"'
    ((status, answer),) = asks_all(server, [{"prompt": "x", "structured_outputs": {"grammar": grammar}}])
    assert status == 200, answer
    assert re.fullmatch("é😀[а-г😀😁]{3}A", answer["choices"][0]["text"])  # noqa: RUF001


def test_an_argument_can_hold_the_name_of_a_special_token(server: ThreadedServer) -> None:
    cases = [
        (f"a{mark}b", parameter)
        for mark in MARKS
        for parameter in (
            {"const": f"a{mark}b"},
            {"enum": [f"a{mark}b"]},
            {"type": "string", "pattern": f"^{re.escape(f'a{mark}b')}$"},
        )
    ]
    shared = {"messages": [{"role": "user", "content": "Do it."}], "tool_choice": "required"}
    bodies = [{**shared, "tools": [tool(parameter)], "parallel_tool_calls": False} for _, parameter in cases]
    for (text, _), (status, answer) in zip(cases, asks_all(server, bodies), strict=True):
        assert status == 200, (text, answer)
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"k": text}


def bounds(tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    """Fields that end, forbid or force tokens that the constraints of the table need."""
    (end,) = vocabulary().eos_token_ids
    closing = tokenizer.token_to_id(CLOSING)
    needed = sorted({token_id for text in 'a</tool_call>b{"k: }' for token_id in tokenizer.encode(text)})
    return {
        "stops at a mark": {"stop_token_ids": [closing]},
        "stops at needed tokens": {"stop_token_ids": needed},
        "stops at all": {"stop_token_ids": list(range(300))},
        "stops at the end": {"stop_token_ids": [end]},
        "stops at texts": {"stop": [CLOSING, "b"]},
        "has many tokens": {"min_tokens": 40},
        "has many tokens and stops": {"min_tokens": 40, "stop_token_ids": [closing, *needed]},
        "has one token": {"max_tokens": 1},
        "ignores the end": {"ignore_eos": True, "min_tokens": 9},
        "may not end": {"logit_bias": {str(end): -100}},
        "may not begin": {"logit_bias": {str(token_id): -100 for token_id in [closing, *needed]}},
        "is forbidden the end": {"allowed_token_ids": [*needed, closing]},
        "is allowed the end alone": {"allowed_token_ids": [end]},
        "is allowed some": {"allowed_token_ids": needed[: len(needed) // 2]},
        "has bad words": {"bad_words": ["a", "{", CLOSING]},
        "has late bad words": {"bad_words": ["b", "}"]},
        "is penalised": {"repetition_penalty": 2.0, "frequency_penalty": 2.0},
    }


def constrained_bodies() -> dict[str, dict[str, Any]]:
    text = "a</tool_call>b"
    bodies: dict[str, dict[str, Any]] = {
        kind: {"prompt": "x", "structured_outputs": structured(kind, text)} for kind in KINDS
    }
    free = {"type": "object", "properties": {"k": {"type": "array", "uniqueItems": True}}, "required": ["k"]}
    for backend in ("llguidance", "xgrammar"):
        bodies[f"words by {backend}"] = {"prompt": "x", "structured_outputs": {"regex": "[ab]+c?", "backend": backend}}
    bodies["a guarded object"] = {"prompt": "x", "structured_outputs": {"json": free}}
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "Do it."}], "tools": [tool({"const": text})]}
    bodies["a call"] = {**chat, "tool_choice": "required"}
    bodies["perhaps calls"] = chat
    return bodies


def test_what_contradicts_a_constraint_is_refused_or_ends_it(server: ThreadedServer, tokenizer: Tokenizer) -> None:
    """A request that leaves no first token gets a 400. Later the output ends with what there is."""
    cases = [
        ((name, field), {**body, **extra})
        for name, body in constrained_bodies().items()
        for field, extra in bounds(tokenizer).items()
    ][:: 1 if PROVE else 2]
    seen: dict[str, int] = {}
    for (names, _), (status, answer) in zip(cases, asks_all(server, [body for _, body in cases]), strict=True):
        assert status in (200, 400), (names, answer)
        if status == 400:
            ending = answer["error"]["code"]
            assert ending == "contradictory_parameters", (names, answer)
        else:
            ending = answer["choices"][0]["finish_reason"]
            assert ending in ("stop", "length", "tool_calls"), (names, answer)
        seen[ending] = seen.get(ending, 0) + 1
    assert set(seen) == {"stop", "length", "tool_calls", "contradictory_parameters"}


def test_a_stop_token_ends_a_call_as_its_text_does(server: ThreadedServer, tokenizer: Tokenizer) -> None:
    body = constrained_bodies()["a call"]
    stops = [{"stop_token_ids": [tokenizer.token_to_id(CLOSING)]}, {"stop": [CLOSING + "\n", CLOSING]}]
    body = {**body, "tools": [tool({"const": "ab"})]}
    (by_token, by_text) = asks_all(server, [{**body, **each} for each in stops])
    assert by_token[0] == by_text[0] == 200
    token, text = (answer["choices"][0] for _, answer in (by_token, by_text))
    assert token["finish_reason"] == text["finish_reason"]
    assert token["message"].get("content") == text["message"].get("content")
    calls = [[call["function"] for call in each["message"]["tool_calls"]] for each in (token, text)]
    assert calls[0] == calls[1]


SCHEMAS: dict[str, Any] = {
    "uniqueItems": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 3},
    "contains": {"type": "array", "items": {"type": "integer"}, "contains": {"const": 3}, "maxItems": 3},
    "not": {"type": "integer", "not": {"multipleOf": 2}},
    "lookahead": {"type": "string", "pattern": "^(?=a)[ab]{1,3}$"},
    "plain": {"type": "boolean"},
}
"""Parameters that a strict function may have."""
PARTIAL: dict[str, Any] = {
    "backreference": {"type": "string", "pattern": "^(a)\\1$", "maxLength": 4},
    "no such reference": {"$ref": "#/$defs/nowhere"},
    "no such type": {"type": "strnig"},
    "no pattern": {"type": "string", "pattern": "a{,3}("},
    "nothing": False,
    "a reference that the instance decides": {"$dynamicRef": "#nowhere"},
}
"""Parameters that a strict function may not have."""


def calling(*tools: tuple[dict[str, Any], bool | None]) -> dict[str, Any]:
    """A chat whose answer calls some of these functions, each with its parameter and `strict`."""
    given = []
    for number, (parameter, strict) in enumerate(tools):
        function = {**tool(parameter)["function"], "name": f"f{number}"}
        given.append({"type": "function", "function": function if strict is None else {**function, "strict": strict}})
    messages = [{"role": "user", "content": "call"}]
    return {"messages": messages, "tools": given, "tool_choice": "required", "max_tokens": 60}


def test_functions_that_are_not_strict_are_taken_where_strict_ones_are(server: ThreadedServer) -> None:
    for strict in (True, None, False):
        answers = asks_all(server, [calling((each, strict)) for each in SCHEMAS.values()])
        for (name, parameter), (status, answer) in zip(SCHEMAS.items(), answers, strict=True):
            assert status == 200, (name, strict, answer)
            if answer["choices"][0]["finish_reason"] != "length":
                call = answer["choices"][0]["message"]["tool_calls"][0]["function"]
                jsonschema.validate(json.loads(call["arguments"])["k"], parameter)


def test_no_function_that_is_not_strict_refuses_a_request(server: ThreadedServer) -> None:
    """The others are held to their schemas as if it were not there."""
    unique = SCHEMAS["uniqueItems"]
    answers = asks_all(server, [calling((unique, None), (each, None)) for each in PARTIAL.values()])
    for name, (status, answer) in zip(PARTIAL, answers, strict=True):
        assert status == 200, (name, answer)
        call = answer["choices"][0]["message"].get("tool_calls", [{"function": {"name": ""}}])[0]["function"]
        if call["name"] == "f0" and answer["choices"][0]["finish_reason"] != "length":
            jsonschema.validate(json.loads(call["arguments"])["k"], unique)
    for number, (name, each) in enumerate(PARTIAL.items()):
        strict = (None, False)[number % 2]
        body = {"model": server.model, **calling((each, strict)), "temperature": 0, "max_tokens": 20}
        status, headers, answer = server.post("/v1/chat/completions", body)
        assert status == 200, (name, answer)
        assert headers["x-manta-not-enforced"].startswith("#"), name


def test_refused_functions_show_no_grammar(server: ThreadedServer) -> None:
    answers = asks_all(server, [calling((SCHEMAS["plain"], None), (each, True)) for each in PARTIAL.values()])
    for name, (status, answer) in zip(PARTIAL, answers, strict=True):
        error = answer["error"]
        assert (status, error["param"]) == (400, "tools[1].function.parameters"), (name, answer)
        assert "#" in error["message"], name
        shown = [text for text in ("x-guidance", "start:", "%json", "lenient", " | ") if text in error["message"]]
        assert not shown, (name, error["message"])
