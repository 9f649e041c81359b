"""JSON bodies to structs and back, and structs as server-sent events.

Decoding raises a `RequestRefused` that names the field of a mistake, for every type of body.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import msgspec

from manta.cluster.protocol.shape_errors import shape_error
from manta.cluster.serve_limits import BodyLimits


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


AnyQuery = TypeVar("AnyQuery", bound=msgspec.Struct)


def decode_query(kind: type[AnyQuery], query: dict[str, str]) -> AnyQuery:
    """Returns the checked query of a URL.

    Raises `RequestRefused` naming the field of a mistake; unknown fields are ignored.
    """
    try:
        return msgspec.convert(query, kind, strict=False)
    except msgspec.ValidationError as error:
        raise shape_error(error, kind) from error


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
