"""JSON bodies to structs and back, and structs as server-sent events.

Decoding raises a `RequestRefused` that names the field of a mistake, for every type of body.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from manta.cluster.config import BodyLimits
from manta.cluster.errors import TOO_DEEP, RequestRefused, refuse
from manta.cluster.protocol.body_limits import check_lists, check_num_values
from manta.cluster.protocol.shape_errors import shape_error


class StreamForm(NamedTuple):
    """The form in which the parts of a streamed answer are written."""

    media_type: str
    before: bytes
    """Bytes in front of an error that becomes a part."""
    after: bytes


EVENTS = StreamForm("text/event-stream; charset=utf-8", b"data: ", b"\n\n")
"""Server-sent events, as in OpenAI's API."""
NAMED_EVENTS = StreamForm("text/event-stream; charset=utf-8", b"event: error\ndata: ", b"\n\n")
"""Server-sent events with names, as in OpenAI's Responses API and in Anthropic's API."""
LINES = StreamForm("application/x-ndjson", b"", b"\n")
"""One JSON object per line, as in Ollama's API."""

SSE_DONE = b"data: [DONE]\n\n"

_LIMITS = BodyLimits()
_encoder = msgspec.json.Encoder()


class Body(Protocol):
    """A decoded request body: a msgspec struct with a check of its own. It may have `fields_elsewhere`: names of fields
    that belong to other bodies, each with advice.
    """

    def check(self) -> None:
        """Checks what the types of the fields do not express. Raises `RequestRefused` naming the field."""
        ...


AnyBody = TypeVar("AnyBody", bound=Body)


def decode(kind: type[AnyBody], body: bytes, limits: BodyLimits = _LIMITS) -> AnyBody:
    """Returns the checked body as a `kind`. Raises `RequestRefused` naming the field of the first mistake."""
    check_num_values(body, limits)
    try:
        body.decode()
        request = _decoder(kind).decode(body)
    except UnicodeDecodeError as error:
        refuse("malformed", bound="UTF-8", cause=f"byte {error.start} is {body[error.start]:#04x}")
    except msgspec.ValidationError as error:
        raise shape_error(error, kind) from error
    except msgspec.DecodeError as error:
        refuse("malformed", bound="JSON", cause=str(error))
    except RecursionError as error:
        raise RequestRefused(TOO_DEEP) from error
    check_lists(request, limits)
    request.check()
    return request


AnyQuery = TypeVar("AnyQuery", bound=msgspec.Struct)


def decode_query(kind: type[AnyQuery], query: dict[str, str]) -> AnyQuery:
    """Returns the checked query of a URL.

    Raises `RequestRefused` naming the field of a mistake; unknown fields are ignored.
    """
    try:
        return msgspec.convert(query, kind, strict=False)
    except msgspec.ValidationError as error:
        raise shape_error(error, kind) from error


@functools.cache
def _decoder(kind: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def encode(response: Any) -> bytes:
    """Returns a response body as JSON: a struct, or anything else that msgspec encodes."""
    return _encoder.encode(response)


def sse_event(chunk: msgspec.Struct) -> bytes:
    """Returns a chunk as one server-sent event."""
    return b"data: " + _encoder.encode(chunk) + b"\n\n"


def named_event(name: str, body: bytes) -> bytes:
    """Returns a JSON body as one server-sent event with a name."""
    return b"event: " + name.encode() + b"\ndata: " + body + b"\n\n"


def body_of_event(event: bytes) -> bytes:
    """Returns the JSON body of one server-sent event, whose other fields precede it."""
    return event.partition(b"data: ")[2].rstrip(b"\n")
