"""Refusals as data: what is refused, the bound that it misses, and what to do. All rooms raise them in this one form.

The kind decides all that code decides about a refusal, such as its HTTP status. `sentence` writes the words for people,
and nothing reads them back. A refusal crosses processes as it is, by msgspec or within a pickled `ServingError`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

_Shape = Literal["malformed", "unknown_field", "required", "wrong_type", "missing", "empty", "foreign_item"]
_Choice = Literal["wrong_value", "unknown_value", "unsupported", "unsupported_thread", "not_allowed", "unfit"]
_Together = Literal["excludes", "requires", "names_nothing", "unknown_previous_response", "adapter_gone"]
_Size = Literal["over_limit", "exceeds", "context_length"]
_Parameter = Literal["out_of_range", "too_many_values", "invalid_value", "wrong_arguments", "outside_vocabulary"]
_Constraint = Literal["contradictory_parameters", "not_enforced", "unsatisfiable", "over_budget"]
RequestKind = Literal[_Shape, _Choice, _Together, _Size, _Parameter, _Constraint]
"""Faults of a request, whoever is to serve it."""
_Door = Literal["no_key", "forbidden_origin", "operators_only"]
_Access = Literal[_Door, "unknown_url", "wrong_method", "no_websocket", "connection_too_old"]
_Thing = Literal["unknown_file", "unknown_model", "unknown_object", "unknown_response", "unknown_stream"]
_Ended = Literal["batch_has_ended", "cancelled_by_client", "cancelled", "stream_lost", "adapter_lost"]
_State = Literal["name_taken", "no_storage", _Ended]
_Load = Literal["quota", "over_rate_limit", "rate_limit", "queue_full", "too_many_streams", "too_many_messages"]
_Transfer = Literal["too_many_bodies", "body_too_large", "foreign_encoding", "client_too_slow", "deadline"]
_Failure = Literal["bug", "failed", "engine_failed", "model_failed", "unavailable"]
ServerKind = Literal[_Access, _Thing, _State, _Load, _Transfer, _Failure]
"""Why a server does not serve a request."""
Kind = Literal[RequestKind, ServerKind]

Value = int | float | str | None
Bound = int | float | str | tuple[int | float | str, ...] | None

MAX_TEXT = 2000
"""Most characters of one text in a refusal, because clients and libraries may quote a whole body."""
MAX_SHOWN = 80
"""Most characters of a value that the words show."""
MAX_LISTED = 100
"""Most choices that the words list: a server may have ten thousand adapters."""


class Refusal(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a request is not served. Texts are cut at `MAX_TEXT` characters."""

    kind: Kind
    field: str = ""
    """Path of what is at fault in the client's own body, such as `tools[0].function.name`; empty for all of it."""
    value: Value = None
    """The given value, or the number of `unit` that were given."""
    bound: Bound = None
    """What is allowed instead: the limit, the lowest and highest number, the choices, or a noun."""
    remedy: str = ""
    """What the client or the operator can do, as an imperative."""
    cause: str = ""
    """A reason that kind, value and bound do not tell, such as what a library said."""
    unit: str = ""
    """What `value` and `bound` count."""
    place: str = ""
    """A place within the field, such as the JSON pointer of a schema's keyword."""
    can_be_loose: bool = False
    """Whether the constraint could be enforced in part, if the request allowed it."""
    retry_after_s: float | None = None
    """Seconds after which a retry may succeed; None means at any time."""

    def __post_init__(self) -> None:
        for name in _TEXTS:
            text = getattr(self, name)
            if isinstance(text, str) and (len(text) > MAX_TEXT or not text.isascii()):
                text = text[:MAX_TEXT].encode("utf-8", "backslashreplace").decode()  # half a surrogate pair
                msgspec.structs.force_setattr(self, name, text[:MAX_TEXT])
        if isinstance(self.value, int) and self.value.bit_length() > 64:
            msgspec.structs.force_setattr(self, "value", f"an integer of {self.value.bit_length()} bits")


_TEXTS = ("field", "value", "bound", "remedy", "cause", "place")


class ServingError(Exception):
    """A request that is not served. Its text is the refusal in words."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal)
        self.refusal = refusal

    def __str__(self) -> str:
        return sentence(self.refusal)

    def __reduce__(self) -> tuple[Callable[..., ServingError], tuple[Any, ...]]:
        return type(self), (self.refusal,)


class RequestRefused(ServingError, ValueError):
    """A request that can never be served, refused before anything is allocated."""


class QueueFull(ServingError, RuntimeError):
    """A queue is at its limit; a later retry may succeed."""


_COUNTED: tuple[Kind, ...] = ("quota", "queue_full", "too_many_streams", "too_many_messages", "too_many_bodies")
_CAUSED: tuple[Kind, ...] = (
    *("contradictory_parameters", "forbidden_origin", "failed", "engine_failed", "model_failed", "unavailable"),
)
WORDS: dict[Kind, str] = {
    "malformed": "{subject} is not valid {bound}",
    "unknown_field": "{subject} is unknown",
    "required": "{subject} is required",
    "wrong_type": "{subject}: {cause}",
    "missing": "{subject} is missing",
    "empty": "{subject} is empty",
    "wrong_value": "{given} must be {bound}",
    "unknown_value": "{given} is unknown; use one of {bound}",
    "unsupported": "{given} is not supported",
    "unsupported_thread": "{subject} is not supported",
    "excludes": "{subject} and {bound} exclude each other",
    "requires": "{given} is only allowed with {bound}",
    "foreign_item": "{subject} {cause}",
    "not_allowed": "{given} is not allowed",
    "unfit": "{given}: {cause}",
    "exceeds": "{given} exceeds the {bound} {unit}",
    "out_of_range": "{given} must be between {low} and {high}",
    "too_many_values": "{subject} has {value} {unit}; at most {bound} are allowed",
    "invalid_value": "{given} {cause}",
    "wrong_arguments": "{subject}: the arguments of {value} {cause}",
    "outside_vocabulary": "{subject}: token id {value} is outside the vocabulary [0, {bound})",
    "not_enforced": "{subject} cannot be enforced",
    "unsatisfiable": "{subject}: nothing satisfies it",
    "over_budget": "{subject}: compiling takes more than {bound} {unit}",
    "no_key": "a valid API key is required",
    "operators_only": "only operators may change what is served here",
    "unknown_url": "there is nothing at {place}; what is served: {bound}",
    "wrong_method": "{place} takes {bound}, not {value}",
    "unknown_file": "the playground has no file {value}",
    "unknown_model": "{given} is not served here; {bound} is",
    "unknown_object": "there is no {unit} {value}, or none of yours",
    "unknown_response": "there is no stored response {value} of yours; it may have expired",
    "unknown_stream": "there is no stream {value} of yours; it may have ended, or nobody read it for too long",
    "no_storage": "this server {cause}",
    "name_taken": "{given} is taken by {bound}",
    "adapter_gone": "the adapter's values {value} are not here: it was replaced, or its folder has other ones",
    "adapter_lost": "the adapter's values {value} are gone, and the answer had begun with them",
    "batch_has_ended": "batch {place} has ended: it is {value}",
    "foreign_encoding": "the body has the encoding {value}",
    "no_websocket": "{place} opens a WebSocket connection",
    "connection_too_old": "this connection was open for {bound} {unit}, which is the limit",
    "cancelled_by_client": "the client cancelled the response",
    "over_rate_limit": "the prompt has {value} {unit} and the limit of {unit} a minute for {place} is {bound}",
    "rate_limit": "the limit of {unit} a minute for {place} is {bound} and {value} are left",
    "body_too_large": "the body has {value} {unit} and the limit is {bound}",
    "deadline": "{cause}; the limit is {place}",
    "bug": "internal error: {cause}",
    "cancelled": "the stream was cancelled",
    "stream_lost": "every copy of this stream is gone",
    **dict.fromkeys((*_COUNTED, "client_too_slow"), "{value} {unit} and the limit is {bound}"),
    **dict.fromkeys(("over_limit", "context_length"), "{subject} has {value} {unit} and the limit is {bound}"),
    **dict.fromkeys(("names_nothing", "unknown_previous_response"), "{given} is none of {bound}"),
    **dict.fromkeys(_CAUSED, "{cause}"),
}
"""The words of each kind. `subject` is the field and the place in it, `given` the same with the value, `low` and `high`
are the bound's ends. A cause that the words leave out follows behind a colon, and the remedy behind a semicolon.
"""


def sentence(refusal: Refusal) -> str:
    """Returns the refusal in words."""
    subject = ": ".join(filter(None, (refusal.field, refusal.place))) or "the body"
    value = repr(refusal.value[:MAX_SHOWN]) if isinstance(refusal.value, str) else str(refusal.value)
    choices = refusal.bound if isinstance(refusal.bound, tuple) else (refusal.bound,)
    bounds = [_shown(each) for each in choices[:MAX_LISTED]]
    num_more = len(choices) - len(bounds)
    words = WORDS[refusal.kind]
    text = words.format(
        subject=subject,
        given=subject if refusal.value is None else f"{subject} {value}",
        value=value,
        bound=", ".join(bounds) + (f" and {num_more} more" if num_more else ""),
        low=bounds[0],
        high=bounds[-1],
        cause=refusal.cause,
        unit=refusal.unit,
        place=refusal.place,
    )
    cause = f": {refusal.cause}" if refusal.cause and "{cause}" not in words else ""
    remedy = refusal.remedy or ("change it, or ask for loose enforcement" if refusal.can_be_loose else "")
    return f"{text}{cause}; {remedy}" if remedy else f"{text}{cause}"


def _shown(bound: Value) -> str:
    return f"{bound:.15g}" if isinstance(bound, float) else str(bound)
