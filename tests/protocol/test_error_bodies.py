"""Refusals as OpenAI's, Anthropic's and Ollama's clients read them: a table of kinds and shapes."""

from __future__ import annotations

import json
import pickle
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray import cloudpickle
from ray.exceptions import RayTaskError

from manta.cluster.errors import (
    GenerationFailed,
    Overdue,
    QueueFull,
    RequestRefused,
    ServingError,
    Unavailable,
    error_of,
    refuse,
)
from manta.cluster.protocol.error_bodies import anthropic_body, ollama_body, openai_body, refusal_of, under_field
from manta.structured.constraint import ConstraintError, Unsupported
from manta.structured.logits_processors import LogitsProcessorError
from manta.structured.refusals import MAX_TEXT, Kind, Refusal, sentence

KINDS: tuple[Kind, ...] = get_args(Kind)
REQUEST, SERVER, LIMIT = "invalid_request_error", "server_error", "rate_limit_error"
TABLE: dict[Kind, tuple[str, str | None, str]] = {
    "malformed": (REQUEST, None, REQUEST),
    "unknown_field": (REQUEST, "unknown_parameter", REQUEST),
    "required": (REQUEST, "missing_required_parameter", REQUEST),
    "wrong_type": (REQUEST, "invalid_type", REQUEST),
    "out_of_range": (REQUEST, "invalid_value", REQUEST),
    "over_limit": (REQUEST, None, REQUEST),
    "context_length": (REQUEST, "context_length_exceeded", REQUEST),
    "contradictory_parameters": (REQUEST, "contradictory_parameters", REQUEST),
    "not_enforced": (REQUEST, None, REQUEST),
    "unsupported_thread": (REQUEST, "thread_unsupported_request", REQUEST),
    "no_key": ("authentication_error", "invalid_api_key", "authentication_error"),
    "forbidden_origin": ("permission_error", "forbidden_origin", "permission_error"),
    "operators_only": ("permission_error", "operators_only", "permission_error"),
    "unknown_model": ("not_found_error", "model_not_found", "not_found_error"),
    "name_taken": (REQUEST, "name_taken", REQUEST),
    "wrong_method": (REQUEST, "method_not_allowed", REQUEST),
    "deadline": ("timeout_error", None, "timeout_error"),
    "foreign_encoding": (REQUEST, "unsupported_encoding", REQUEST),
    "client_too_slow": ("timeout_error", "client_too_slow", "timeout_error"),
    "body_too_large": (REQUEST, "body_too_large", "request_too_large"),
    "queue_full": (LIMIT, "queue_full", LIMIT),
    "too_many_streams": (LIMIT, "too_many_streams", LIMIT),
    "rate_limit": ("tokens", "rate_limit_exceeded", LIMIT),
    "bug": (SERVER, None, "api_error"),
    "failed": (SERVER, "internal_error", "api_error"),
    "cancelled": (SERVER, "cancelled", "api_error"),
    "model_failed": (SERVER, "model_failed", "overloaded_error"),
    "unavailable": (SERVER, None, "overloaded_error"),
    "too_many_bodies": (SERVER, "too_many_bodies", "overloaded_error"),
}
"""OpenAI's type and code, and Anthropic's type."""


def example(kind: Kind, field: str = "") -> Refusal:
    return Refusal(kind, field, 9, 8, "send less", "it is so", "tokens")


@pytest.mark.parametrize("kind", TABLE)
@pytest.mark.parametrize("field", ["", "messages[0].content"])
def test_a_refusal_in_openais_and_ollamas_shape(kind: Kind, field: str) -> None:
    type_, code, _ = TABLE[kind]
    refusal = example(kind, field)
    error = {"message": sentence(refusal), "type": type_, "param": field or None, "code": code}
    assert json.loads(openai_body(refusal)) == {"error": error}
    assert json.loads(ollama_body(refusal)) == {"error": sentence(refusal)}


@pytest.mark.parametrize("kind", TABLE)
@pytest.mark.parametrize("field", ["", "messages[0].content"])
def test_a_refusal_in_anthropics_shape(kind: Kind, field: str) -> None:
    _, code, type_ = TABLE[kind]
    refusal = example(kind, field)
    found = json.loads(anthropic_body(refusal))
    details = found["error"].pop("details", None)
    error = {"type": type_, "message": sentence(refusal), "param": field or None, "code": code}
    assert found == {"type": "error", "error": error}
    expected = {"error_code": code, "unsupported": [field or None]} if kind == "unsupported_thread" else None
    assert details == expected


@pytest.mark.parametrize("kind", KINDS)
def test_words_name_what_the_refusal_holds(kind: Kind) -> None:
    text = sentence(Refusal(kind, "n", 9, (1, 8), "send less", "it is so", "choices", "place"))
    assert text.endswith("; send less")
    assert "it is so" in text
    assert "{" not in text


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("queue_full", QueueFull),
        ("too_many_streams", QueueFull),
        ("deadline", Overdue),
        ("failed", GenerationFailed),
        ("cancelled", GenerationFailed),
        ("model_failed", Unavailable),
        ("unavailable", Unavailable),
        ("stream_lost", Unavailable),
        ("out_of_range", RequestRefused),
        ("unknown_model", ServingError),
    ],
)
def test_the_kind_decides_the_error(kind: Kind, error: type[ServingError]) -> None:
    assert type(error_of(Refusal(kind))) is error
    with pytest.raises(error) as caught:
        refuse(kind, "n", 9, 8, "send less")
    assert caught.value.refusal == Refusal(kind, "n", 9, 8, "send less")


CARRIERS: list[type[ServingError]] = [
    *(RequestRefused, QueueFull, Overdue, GenerationFailed, Unavailable),
    *(ConstraintError, Unsupported, LogitsProcessorError),
]


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_refusal_crosses_processes_as_it_is(carrier: type[ServingError]) -> None:
    refusal = Refusal("out_of_range", "temperature", 3.0, (0, 2), "lower it", retry_after_s=1.5)
    error = carrier(refusal)
    for load, dump in ((pickle.loads, pickle.dumps), (cloudpickle.loads, cloudpickle.dumps)):
        copied = load(dump(error))
        assert (type(copied), copied.refusal, str(copied)) == (carrier, refusal, str(error))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(refusal), type=Refusal) == refusal
    told = RayTaskError("f", "Traceback ...", error).as_instanceof_cause()  # as Ray raises it at the caller
    assert isinstance(told, carrier)
    assert refusal_of(told) == refusal


@given(st.text(max_size=20) | st.integers() | st.floats(allow_nan=False))
def test_any_value_can_be_told(value: str | int | float) -> None:
    refusal = Refusal("wrong_value", "\ud800", value, "\udfff" + "x" * 2 * MAX_TEXT, cause="\ud800")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(refusal), type=Refusal) == refusal
    assert json.loads(openai_body(refusal))["error"]["message"] == sentence(refusal)
    assert len(sentence(refusal)) < 2 * MAX_TEXT


@pytest.mark.parametrize(
    ("field", "remedy"),
    [
        ("response_format.json_schema.schema", 'send "strict": false in response_format.json_schema'),
        ("text.format.schema", 'send "strict": false in text.format'),
        ("tools[0].function.parameters", 'send "strict": false in that function'),
        ("structured_outputs.json", 'send "loose": true in structured_outputs'),
    ],
)
def test_the_remedy_is_in_the_terms_of_the_body(field: str, remedy: str) -> None:
    refusal = under_field(Refusal("not_enforced", "constraint", place="#/not", can_be_loose=True), field)
    assert (refusal.field, refusal.remedy) == (field, f"change it, or {remedy} to enforce the rest")
    assert under_field(refusal, "format").remedy == "constrain less"
