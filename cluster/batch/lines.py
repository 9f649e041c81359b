"""The lines of a batch in OpenAI's batch format: one request per line in, one answer per line out.

Source: https://platform.openai.com/docs/api-reference/batch (request input and output objects). Knows neither files nor
engines.
"""

from __future__ import annotations

import re
import zlib
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from manta.cluster.protocol.batches_api import URLS, BatchError

SORTED_BYTES = 4096
"""Bytes at the beginning of a body by which lines are sorted, so that lines with a common prefix run together."""

RESULT_START = b'{"id":"batch_req_'
"""Bytes with which every line of the output begins."""

_ID = re.compile(r"batch_req_([0-9]{1,18})_([0-9a-f]{8})")


class BadLine(ValueError):
    """A line that is no batch request. The message says why."""

    def __init__(self, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.custom_id = custom_id


class BatchRequest(msgspec.Struct):
    """One line of the input."""

    custom_id: str
    """The caller's name for the line, which comes back with the answer."""
    url: str
    body: msgspec.Raw
    method: str = "POST"

    @property
    def sort_key(self) -> tuple[str, bytes]:
        """Sort key that puts lines with a common prefix together, so that the prefix is computed once."""
        return self.url, bytes(self.body)[:SORTED_BYTES]


class BatchResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw
    ignored: list[str] | UnsetType = UNSET
    """Fields of the request's body that had no effect, if there are any."""
    not_enforced: list[str] | UnsetType = UNSET
    """Demands of the body's constraint that the answer may break, if there are any."""


class BatchResult(msgspec.Struct):
    """One line of the output. `response` is the endpoint's answer, which may be an error; `error` says why there is
    none.
    """

    id: str
    custom_id: str | None
    response: BatchResponse | None = None
    error: BatchError | None = None


class LineKey(NamedTuple):
    """The line of the input that a result belongs to. The result's id contains it, so that the output alone tells which
    lines of which input are done.
    """

    number: int
    """Index of the line, from 0."""
    checksum: int
    """CRC-32 of the line, never 0."""

    @classmethod
    def of(cls, number: int, line: bytes) -> LineKey:
        return cls(number, zlib.crc32(line.strip()) or 1)

    @classmethod
    def from_id(cls, name: str) -> LineKey | None:
        """Returns the key in a result's id; None if the id is not one of ours."""
        found = _ID.fullmatch(name)
        return None if found is None else cls(int(found[1]), int(found[2], 16))

    @property
    def id(self) -> str:
        return f"batch_req_{self.number}_{self.checksum:08x}"


_decoder = msgspec.json.Decoder(BatchRequest)
_encoder = msgspec.json.Encoder()


class _Named(msgspec.Struct):
    custom_id: Any = None


def parse(line: bytes) -> BatchRequest:
    """Returns the request on a line. Raises `BadLine` if it is no batch request. The endpoint checks the body."""
    try:
        request = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadLine(f"the line is no batch request: {error}", custom_id_of(line)) from error
    if request.method != "POST":
        raise BadLine(f"method {request.method!r} is not served in a batch; POST is", request.custom_id)
    if request.url not in URLS:
        raise BadLine(f"url {request.url!r} is not served in a batch; {' and '.join(URLS)} are", request.custom_id)
    return request


def custom_id_of(line: bytes) -> str | None:
    """Returns the `custom_id` of a line that may be no request; None if it has none."""
    try:
        found = msgspec.json.decode(line, type=_Named).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def encode(result: BatchResult) -> bytes:
    """Returns a result as a line of JSON, with its newline."""
    return _encoder.encode(result) + b"\n"


def result_head(key: LineKey) -> bytes:
    """Returns the bytes with which the result of a line begins in the output."""
    return f'{{"id":"{key.id}","custom_id":'.encode()


class _Identified(msgspec.Struct):
    id: str


_identified = msgspec.json.Decoder(_Identified)


def key_of(result: bytes) -> LineKey | None:
    """Returns the line that an encoded result belongs to; None if it is no result of ours."""
    try:
        return LineKey.from_id(_identified.decode(result).id)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def refused(key: LineKey, error: BadLine) -> BatchResult:
    return BatchResult(key.id, error.custom_id, error=BatchError("invalid_line", str(error)))
