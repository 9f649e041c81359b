"""Errors that users of the HTTP endpoint see: one exception in OpenAI's shape, and how others become it.

Whatever checks or runs a request raises the errors of `cluster/errors.py`; what only HTTP knows, such as URLs, keys and
sizes of bodies, is an `ApiError`. Where an exchange ends, `api_error` makes one of the other, and its `body` is sent.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence

import msgspec

from cluster.errors import GenerationFailed, Overdue, QueueFull, RequestRefused, ServingError, Unavailable
from workers.sampling_params import MAX_LOGPROBS

_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}

RETRIED_STATUSES = (429, 503)
"""Their answers say when to try again."""


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """What every answer of 400 and above holds, and an event of a stream that fails after it began."""

    error: ErrorDetail


class ApiError(Exception):
    """An answer other than 200, in OpenAI's shape. `param` is the field at fault, `code` OpenAI's short name.
    `retry_after_s` says when to try again if the status is one of `RETRIED_STATUSES`; None is as soon as one likes.
    """

    def __init__(
        self,
        status: int,
        message: str,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type or _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """An `ErrorBody`."""
        return msgspec.json.encode(ErrorBody(ErrorDetail(self.message, self.type, self.param, self.code)))


_STATUSES = {RequestRefused: 400, Overdue: 408, QueueFull: 429, GenerationFailed: 500, Unavailable: 503}


def api_error(error: Exception) -> ApiError:
    """Returns the answer to a request that ended by `error`: by a bug of ours, if nothing that is known."""
    if isinstance(error, ApiError):
        return error
    if not isinstance(error, ServingError):
        return ApiError(500, f"internal error: {type(error).__name__}")
    status = next(status for kind, status in _STATUSES.items() if isinstance(error, kind))
    type_ = "timeout_error" if status == 408 else None
    code = error.code or ("queue_full" if status == 429 else None)
    return ApiError(status, error.message, type_, error.param, code, error.retry_after_s)


_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING_FIELD = re.compile(r"Object missing required field `(.*)`", re.DOTALL)


def shape_error(message: str, known: Sequence[str] = (), elsewhere: Mapping[str, str] | None = None) -> RequestRefused:
    """msgspec's `Expected ..., got ... - at `$.path`` as an error that names the field.

    `known` are the fields of the body, and `elsewhere` what to do about fields of other bodies.
    """
    text, _, place = message.partition(" - at ")
    path = place.removeprefix("`key` in ").strip("`").removeprefix("$").removeprefix(".").replace("[...]", "")
    for pattern, code, what in (
        (_UNKNOWN_FIELD, "unknown_parameter", "is unknown; remove it"),
        (_MISSING_FIELD, "missing_required_parameter", "is required"),
    ):
        match = pattern.fullmatch(text)
        if match:
            param = f"{path}.{match[1]}" if path else match[1]
            if pattern is _UNKNOWN_FIELD and not path:
                what = (elsewhere or {}).get(param) or _meant(param, known) or what
            return RequestRefused(f"{param} {what}", param, code)
    prefix = f"{path}: " if path else "the body: "
    return RequestRefused(f"{prefix}{text[:1].lower()}{text[1:]}", path or None, "invalid_type")


def _meant(name: str, known: Sequence[str]) -> str | None:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    return f"is unknown; did you mean {near[0]}?" if near else None


def bound_error(message: str, names: dict[str, str]) -> RequestRefused:
    """An error of `SamplingParams`, whose messages begin with the field, under the body's name for that field."""
    name = re.match(r"\w*", message)[0]  # type: ignore[index]
    param = names.get(name, name)
    if param == "top_logprobs":
        return RequestRefused(f"top_logprobs must be between 0 and {MAX_LOGPROBS}", param, "invalid_value")
    return RequestRefused(param + message[len(name) :], param, "invalid_value")
