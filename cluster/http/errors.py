"""Errors that users of the HTTP endpoint see: one exception in OpenAI's shape, and how others become it.

Raised by whatever checks a body and by the endpoints; `cluster/http/app.py` answers with `ApiError.body`. The engine
never raises it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import NoReturn

import msgspec

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


def refuse(param: str | None, message: str, code: str | None = None) -> NoReturn:
    """Raises `ApiError` 400 about the field `param`."""
    raise ApiError(400, message, param=param, code=code)


_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING_FIELD = re.compile(r"Object missing required field `(.*)`", re.DOTALL)


def shape_error(message: str, known: Sequence[str] = (), elsewhere: Mapping[str, str] | None = None) -> ApiError:
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
            return ApiError(400, f"{param} {what}", param=param, code=code)
    prefix = f"{path}: " if path else "the body: "
    return ApiError(400, f"{prefix}{text[:1].lower()}{text[1:]}", param=path or None, code="invalid_type")


def _meant(name: str, known: Sequence[str]) -> str | None:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    return f"is unknown; did you mean {near[0]}?" if near else None


def bound_error(message: str, names: dict[str, str]) -> ApiError:
    """An error of `SamplingParams`, whose messages begin with the field, under the body's name for that field."""
    name = re.match(r"\w*", message)[0]  # type: ignore[index]
    param = names.get(name, name)
    if param == "top_logprobs":
        return ApiError(400, f"top_logprobs must be between 0 and {MAX_LOGPROBS}", param=param, code="invalid_value")
    return ApiError(400, param + message[len(name) :], param=param, code="invalid_value")
