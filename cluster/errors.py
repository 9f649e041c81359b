"""Errors of requests that are not served. Each carries a `Refusal`; its class says what a caller may do about it.

Whatever checks or runs a request raises these errors. `cluster/protocol/error_bodies.py` turns them into answers, and
`manta.cluster.llm.LLM` lets its caller have them. Knows nothing of HTTP.
"""

from __future__ import annotations

from typing import Any, NoReturn, get_args

from manta.structured.refusals import Bound, Kind, QueueFull, Refusal, RequestKind, RequestRefused, ServingError, Value

__all__ = ["QueueFull", "RequestRefused", "ServingError"]


class Overdue(ServingError):
    """A request's deadline has passed."""


class Unavailable(ServingError):
    """No engine serves now; a later retry may succeed."""


class GenerationFailed(ServingError):
    """The engine failed, and not because of the request."""


_CLASSES: dict[Kind, type[ServingError]] = {
    "queue_full": QueueFull,
    "too_many_streams": QueueFull,
    "deadline": Overdue,
    "model_failed": Unavailable,
    "unavailable": Unavailable,
    "stream_lost": Unavailable,
    "failed": GenerationFailed,
    "engine_failed": GenerationFailed,
    "cancelled": GenerationFailed,
    **dict.fromkeys(get_args(RequestKind), RequestRefused),
}
"""The classes of kinds that a caller tells apart."""


TOO_DEEP = Refusal("malformed", bound="JSON", cause="it is nested too deeply")


def error_of(refusal: Refusal) -> ServingError:
    """Returns the error that carries a refusal."""
    return _CLASSES.get(refusal.kind, ServingError)(refusal)


def refuse(
    kind: Kind, field: str = "", value: Value = None, bound: Bound = None, remedy: str = "", **more: Any
) -> NoReturn:
    """Raises the error of a `Refusal` with these fields."""
    raise error_of(Refusal(kind, field, value, bound, remedy, **more))
