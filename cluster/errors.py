"""Why a request is not served, in words for its sender: each message names value, bound and remedy.

Raised by whatever checks a request or runs it, and caught at the door: `cluster/protocol/api_errors.py` makes answers
of these, `cluster.llm.LLM` lets its caller have them. Knows no HTTP.
"""

from __future__ import annotations

from typing import NoReturn


class ServingError(Exception):
    """`param` is the field of the request that is at fault, and `code` OpenAI's short name of the error, if any.

    `retry_after_s` says in how many seconds another try may do better; None is as soon as one likes.
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
    """A queue is at its limit: a later try may do better."""


class Overdue(ServingError):
    """A request's time is over."""


class Unavailable(ServingError):
    """No engine serves now: a later try may do better."""


class GenerationFailed(ServingError):
    """The engine failed, and not because of the request."""


def refuse(param: str | None, message: str, code: str | None = None) -> NoReturn:
    """Raises `RequestRefused` about the field `param`."""
    raise RequestRefused(message, param, code)
