"""Requests that must be answered, each always alike: the catalogue, and what of an answer may not change.

Every one is greedy or seeded, so that its answer is a function of the request in float32, whatever else is served.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from tests.fuzz.http.connection import Answer, encoded

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

_FOX = "The quick brown fox"
_RECORD = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
_TOOLS = [
    {"type": "function", "function": {"name": "book", "parameters": _RECORD}},
    {"type": "function", "function": {"name": "cancel", "parameters": {"type": "object", "properties": {}}}},
]
_NAMED = {"type": "function", "function": {"name": "book"}}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "record", "schema": _RECORD}}
_LINE = {"disable_any_whitespace": True}


class Good(NamedTuple):
    """One request; `fields` are its body without the model."""

    path: str
    fields: dict[str, Any]
    streams: bool = True
    """Whether it may be asked for as a stream, whose parts must add up to the same."""

    def body(self, model: str, stream: bool = False) -> bytes:
        more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        return encoded({"model": model, **self.fields, **more})


def _completion(streams: bool = True, **fields: Any) -> Good:
    return Good(
        COMPLETIONS, {"prompt": _FOX, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **fields}, streams
    )


def _chat(**fields: Any) -> Good:
    messages = [{"role": "user", "content": "Hello there"}]
    return Good(CHAT, {"messages": messages, "max_tokens": 24, "temperature": 0, **fields})


def _constrained(**constraint: Any) -> Good:
    return _completion(structured_outputs=constraint, temperature=1, seed=3, max_tokens=60, ignore_eos=None)


CATALOGUE: tuple[Good, ...] = (
    _completion(),
    _completion(max_tokens=120),
    _completion(prompt=[5, 9, 17, 30, 31, 40], max_tokens=1),
    _completion(prompt=" ".join([_FOX] * 20), max_tokens=40, priority=1),
    _completion(prompt=" ".join([_FOX] * 20) + " jumps", priority=3),
    _completion(prompt=[_FOX, "Größe, 東京, 🙂"], n=2, temperature=1, seed=7),
    _completion(n=8, temperature=1.2, seed=1, top_p=0.9, top_k=40, min_p=0.01),
    _completion(logprobs=3, echo=True),
    _completion(stop=["e", "th"], max_tokens=60),
    _completion(stop="o", include_stop_str_in_output=True, max_tokens=60),
    _completion(stop_token_ids=list(range(100, 140)), max_tokens=60),
    _completion(presence_penalty=1.2, frequency_penalty=0.8, repetition_penalty=1.3, temperature=1, seed=11),
    _completion(logit_bias={"40": 5, "41": -100}, bad_words=["the", "a"], allowed_token_ids=list(range(20, 90))),
    _completion(streams=False, prompt_logprobs=2, logprobs=1),
    _constrained(regex="[a-f]{4}-[0-9]{2,12}"),
    _constrained(choice=["yes", "yes, but no", "nö"]),
    _constrained(json=_RECORD, **_LINE),
    _constrained(json=_RECORD, backend="xgrammar", **_LINE),
    _constrained(grammar='start: "a" b\nb: /[0-9]{2}/ | "(" b ")"'),
    _constrained(grammar='root ::= "item " [0-9] ", " root | "end"'),
    _chat(),
    _chat(max_tokens=None, max_completion_tokens=40, stop=["a"]),
    _chat(n=3, temperature=1, seed=5, logprobs=True, top_logprobs=2),
    _chat(temperature=1, seed=6, response_format=_FORMAT),
    _chat(temperature=1, seed=8, tools=_TOOLS, tool_choice="required", max_tokens=120),
    _chat(temperature=1, seed=9, tools=_TOOLS, tool_choice=_NAMED, max_tokens=120),
    _chat(tools=_TOOLS, parallel_tool_calls=False),
    Good("/tokenize", {"prompt": "Größe, 東京", "return_token_strs": True}, streams=False),
    Good("/tokenize", {"messages": [{"role": "user", "content": "Hello"}]}, streams=False),
    Good("/detokenize", {"tokens": [5, 9, 17, 30]}, streams=False),
)


def essence(answer: Answer) -> Any:
    """By choice its text, tokens, calls and end, and how much was counted; other answers whole. A stream's parts are
    added up. Raises `AssertionError` where the answer is not 200 or its stream is not whole.
    """
    assert answer.status == 200, f"{answer.status} {answer.body[:500]!r}"
    if not answer.content_type.startswith("text/event-stream"):
        body = json.loads(answer.body)
        return _added_up([body]) if "choices" in body else body
    events = [event.removeprefix(b"data: ") for event in answer.body.split(b"\n\n")]
    assert events[-2:] == [b"[DONE]", b""], f"the stream ends with {answer.body[-500:]!r}"
    return _added_up([json.loads(event) for event in events[:-2]])


def _added_up(chunks: list[dict[str, Any]]) -> Any:
    choices: dict[int, dict[str, Any]] = {}
    usage: dict[str, int] = {}
    for chunk in chunks:
        assert "error" not in chunk, chunk
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            _add(choices.setdefault(choice["index"], {"text": "", "tokens": [], "calls": {}, "end": None}), choice)
    counts = [usage[name] for name in ("prompt_tokens", "completion_tokens")]
    return {"choices": choices, "usage": counts}


def _add(whole: dict[str, Any], choice: dict[str, Any]) -> None:
    part = choice.get("delta") or choice.get("message") or choice
    whole["text"] += part.get("text") or part.get("content") or ""
    for place, call in enumerate(part.get("tool_calls") or ()):
        function = whole["calls"].setdefault(call.get("index", place), {"name": "", "arguments": ""})
        for name in function:
            function[name] += call["function"].get(name) or ""
    logprobs = choice.get("logprobs") or {}
    whole["tokens"] += logprobs.get("tokens") or [entry["token"] for entry in logprobs.get("content") or ()]
    if choice.get("finish_reason"):
        whole["end"] = [choice["finish_reason"], choice.get("stop_reason")]
