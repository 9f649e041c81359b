"""Errors that users of the HTTP endpoint see: one exception in OpenAI's format, and the conversion of others to it.

Whatever checks or runs a request raises the errors of `cluster/errors.py`. Errors that only HTTP knows, such as those
about URLs, keys and body sizes, are `ApiError`s. Where an exchange ends, `api_error` converts an error, and its `body`
is sent.
"""

from __future__ import annotations

import msgspec

from manta.cluster.errors import GenerationFailed, Overdue, QueueFull, RequestRefused, ServingError, Unavailable

_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}

RETRIED_STATUSES = (429, 503)
"""Statuses with a `retry-after` header."""


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """Body of every answer with status 400 or above, and event of a stream that fails after it began."""

    error: ErrorDetail


class ApiError(Exception):
    """An answer other than 200, in OpenAI's format.

    `param` is the field at fault, `code` OpenAI's short name. `retry_after_s` is the number of seconds after which to
    retry, for `RETRIED_STATUSES`; None means at any time.
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
        """Returns an `ErrorBody` as JSON."""
        return msgspec.json.encode(ErrorBody(ErrorDetail(self.message, self.type, self.param, self.code)))


_STATUSES = {RequestRefused: 400, Overdue: 408, QueueFull: 429, GenerationFailed: 500, Unavailable: 503}


def api_error(error: Exception) -> ApiError:
    """Returns the answer to a request that ended with `error`. An unknown error counts as a bug, with status 500."""
    if isinstance(error, ApiError):
        return error
    if not isinstance(error, ServingError):
        return ApiError(500, f"internal error: {type(error).__name__}")
    status = next(status for kind, status in _STATUSES.items() if isinstance(error, kind))
    type_ = "timeout_error" if status == 408 else None
    code = error.code or ("queue_full" if status == 429 else None)
    return ApiError(status, error.message, type_, error.param, code, error.retry_after_s)
