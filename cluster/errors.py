"""Reasons why a request is not served, in words for its sender: each message names value, bound and remedy.

Whatever checks or runs a request raises these errors. `cluster/protocol/api_errors.py` turns them into answers, and
`manta.cluster.llm.LLM` lets its caller have them. Knows nothing of HTTP.
"""

from __future__ import annotations

from typing import NoReturn


class ServingError(Exception):
    """A request that is not served. `param` is the field at fault, and `code` OpenAI's short name of the error, if any.

    `retry_after_s` is the number of seconds after which a retry may succeed; None means at any time.
    """

    def __init__(
        self, message: str, param: str | None = None, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


class RequestRefused(ServingError, ValueError):
    """A request that can never be served, refused before anything is allocated."""


class QueueFull(ServingError, RuntimeError):
    """A queue is at its limit; a later retry may succeed."""


class Overdue(ServingError):
    """A request's deadline has passed."""


class Unavailable(ServingError):
    """No engine serves now; a later retry may succeed."""


class GenerationFailed(ServingError):
    """The engine failed, and not because of the request."""


def refuse(param: str | None, message: str, code: str | None = None) -> NoReturn:
    """Raises `RequestRefused` for the field `param`."""
    raise RequestRefused(message, param, code)
