"""Writes a refusal as the answer to an HTTP request, in the shape of the API that was asked.

Whatever checks or runs a request raises the errors of `cluster/errors.py`. Where an exchange ends, `refusal_of` takes
the refusal out of the error, `ANSWERS` has its status, and a writer its body.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import msgspec

from manta.structured.refusals import Kind, Refusal, ServingError, sentence

RETRIED_STATUSES = (429, 503)
"""Statuses with a `retry-after` header."""


class Answer(NamedTuple):
    """The status of a refusal, and OpenAI's short name of it."""

    status: int = 400
    code: str | None = None


ANSWERS: dict[Kind, Answer] = {
    "unknown_field": Answer(code="unknown_parameter"),
    "required": Answer(code="missing_required_parameter"),
    "wrong_type": Answer(code="invalid_type"),
    "unsupported_thread": Answer(code="thread_unsupported_request"),
    "unknown_previous_response": Answer(code="previous_response_not_found"),
    "foreign_item": Answer(code="invalid_encrypted_content"),
    "context_length": Answer(code="context_length_exceeded"),
    "out_of_range": Answer(code="invalid_value"),
    "too_many_values": Answer(code="invalid_value"),
    "invalid_value": Answer(code="invalid_value"),
    "wrong_arguments": Answer(code="invalid_type"),
    "contradictory_parameters": Answer(code="contradictory_parameters"),
    "no_key": Answer(401, "invalid_api_key"),
    "forbidden_origin": Answer(403, "forbidden_origin"),
    "operators_only": Answer(403, "operators_only"),
    "unknown_url": Answer(404, "unknown_url"),
    "wrong_method": Answer(405, "method_not_allowed"),
    "unknown_file": Answer(404),
    "unknown_model": Answer(404, "model_not_found"),
    "unknown_object": Answer(404, "not_found"),
    "unknown_response": Answer(404, "response_not_found"),
    "unknown_stream": Answer(404, "stream_not_found"),
    "no_storage": Answer(404, "no_batch_storage"),
    "batch_has_ended": Answer(409, "batch_has_ended"),
    "name_taken": Answer(409, "name_taken"),
    "adapter_gone": Answer(503, "adapter_gone"),
    "adapter_lost": Answer(503, "adapter_lost"),
    "foreign_encoding": Answer(415, "unsupported_encoding"),
    "no_websocket": Answer(426, "upgrade_required"),
    "connection_too_old": Answer(code="websocket_connection_limit_reached"),
    "cancelled_by_client": Answer(code="response_cancelled"),
    "quota": Answer(code="quota_exceeded"),
    "over_rate_limit": Answer(code="rate_limit_exceeded"),
    "rate_limit": Answer(429, "rate_limit_exceeded"),
    "queue_full": Answer(429, "queue_full"),
    "too_many_streams": Answer(429, "too_many_streams"),
    "too_many_messages": Answer(429, "too_many_messages"),
    "too_many_bodies": Answer(503, "too_many_bodies"),
    "body_too_large": Answer(413, "body_too_large"),
    "client_too_slow": Answer(408, "client_too_slow"),
    "deadline": Answer(408),
    "bug": Answer(500),
    "failed": Answer(500, "internal_error"),
    "engine_failed": Answer(500),
    "cancelled": Answer(500, "cancelled"),
    "model_failed": Answer(503, "model_failed"),
    "unavailable": Answer(503),
    "stream_lost": Answer(503, "stream_lost"),
}
"""The answers of kinds; those of others are `Answer()`."""
_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = {**_OPENAI_TYPES, 413: "request_too_large", 500: "api_error", 503: "overloaded_error"}


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """Body of every answer with status 400 or above, and event of a stream that fails after it began."""

    error: ErrorDetail


class MessagesError(msgspec.Struct, kw_only=True):
    """The same in Anthropic's shape."""

    type: Literal["error"] = "error"
    error: dict[str, Any]


class OllamaError(msgspec.Struct):
    """The same in Ollama's shape."""

    error: str


Writer = Callable[[Refusal], bytes]
"""A function that writes a refusal as the JSON body of an answer."""


def refusal_of(error: Exception) -> Refusal:
    """Returns why the request that ended with `error` is not served. An unknown error counts as a bug."""
    return error.refusal if isinstance(error, ServingError) else Refusal("bug", cause=type(error).__name__)


def answer_of(refusal: Refusal) -> Answer:
    return ANSWERS.get(refusal.kind, Answer())


def openai_body(refusal: Refusal) -> bytes:
    """Returns an `ErrorBody`. The type of an exceeded rate limit is what it counts, as in OpenAI's API."""
    status, code = answer_of(refusal)
    kind = refusal.unit if refusal.kind == "rate_limit" else _openai_type(status)
    return msgspec.json.encode(ErrorBody(ErrorDetail(sentence(refusal), kind, refusal.field or None, code)))


def anthropic_body(refusal: Refusal) -> bytes:
    """Returns a `MessagesError`. Its `param` and `code` are additions to Anthropic's API."""
    status, code = answer_of(refusal)
    kind, field = _ANTHROPIC_TYPES.get(status, "invalid_request_error"), refusal.field or None
    error: dict[str, Any] = {"type": kind, "message": sentence(refusal), "param": field, "code": code}
    if refusal.kind == "unsupported_thread":
        error["details"] = {"error_code": code, "unsupported": [field]}
    return msgspec.json.encode(MessagesError(error=error))


def ollama_body(refusal: Refusal) -> bytes:
    """Returns the refusal in words as `error`, which Ollama's clients show."""
    return msgspec.json.encode(OllamaError(sentence(refusal)))


def connection_error_body(status: int, message: str) -> bytes:
    """Returns the `ErrorBody` of a fault of the connection itself, such as a head that is too long."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return msgspec.json.encode(ErrorBody(ErrorDetail(message, kind, None, None)))


def _openai_type(status: int) -> str:
    return _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


# ---- constraints -----------------------------------------------------------------------------------------------------

_WAYS_OUT = (
    ("response_format", 'send "strict": false in response_format.json_schema'),
    ("text.format", 'send "strict": false in text.format'),
    ("tools", 'send "strict": false in that function'),
    ("structured_outputs", 'send "loose": true in structured_outputs'),
)
"""The beginning of a field, and what lets its constraint be enforced in part."""


def under_field(refusal: Refusal, field: str) -> Refusal:
    """Returns a refusal under the name of the body's `field` that it is about, with a remedy in this body's terms."""
    if not refusal.can_be_loose:
        return msgspec.structs.replace(refusal, field=field)
    way = next((way for start, way in _WAYS_OUT if field.startswith(start)), None)
    remedy = "constrain less" if way is None else f"change it, or {way} to enforce the rest"
    return msgspec.structs.replace(refusal, field=field, remedy=remedy)
