"""Reads `multipart/form-data` (RFC 7578) as it arrives: passes file content on piece by piece, and keeps fields.

python-multipart parses the grammar. This module sets the bounds and tells the file from the fields.
"""

from __future__ import annotations

from typing import Annotated, Literal, NoReturn

import msgspec
from msgspec import Meta
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from manta.cluster.errors import refuse

MAX_PARTS = 16
"""Most parts of one form, including the file. OpenAI's upload has four."""
MAX_HEADER_BYTES = 4096
"""Most bytes of one part's headers together, names and values."""
MAX_FIELD_BYTES = 1024
"""Most bytes of one field's value."""
MAX_FORM_BYTES = 64 * 2**10
"""Most bytes of a body that are not the content of its file: boundaries, headers, fields and any preamble."""
MAX_FILENAME_CHARACTERS = 255
"""Length in characters at which a file name is cut."""


class UploadForm(msgspec.Struct, kw_only=True):
    """The fields of `POST /v1/files`."""

    file: Annotated[str, Meta(extra_json_schema={"contentMediaType": "application/octet-stream"})]
    purpose: Literal["batch"]
    expires_after_anchor: Annotated[str | None, Meta(description="sent as expires_after[anchor]")] = None
    expires_after_seconds: Annotated[str | None, Meta(description="sent as expires_after[seconds]")] = None


class UploadParser:
    """Parses a body that is passed to `feed`, and ended by `finish`. Both raise `RequestRefused` for a malformed body
    or one that exceeds a bound.
    """

    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            remedy = "send the file as a form's field `file`"
            refuse("malformed", "file", bound="multipart/form-data with a boundary", remedy=remedy)
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        """Name of the file; None until its content begins."""
        self._num_parts = 0
        self._num_form_bytes = 0
        """Bytes so far that are not the content of the file."""
        self._headers: dict[str, bytes] = {}
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._num_header_bytes = 0
        self._field: tuple[str, bytearray] | None = None
        """Name and value of the field that is being read; None while the file's content is read."""
        self._content = bytearray()
        self._has_ended = False
        self._parser = MultipartParser(
            options[b"boundary"],
            {
                "on_part_begin": self._begin_part,
                "on_header_field": lambda *span: self._extend_header(self._header_name, *span),
                "on_header_value": lambda *span: self._extend_header(self._header_value, *span),
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._take,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    def feed(self, piece: bytes) -> bytes:
        """Returns the bytes that `piece` adds to the file's content."""
        try:
            self._parser.write(piece)
        except MultipartParseError as error:
            refuse("malformed", "file", bound="multipart/form-data", cause=str(error))
        content = bytes(self._content)
        self._content.clear()
        self._num_form_bytes += len(piece) - len(content)
        if self._num_form_bytes > MAX_FORM_BYTES:
            _refuse_large(self._num_form_bytes, MAX_FORM_BYTES, "bytes of the form beside its content")
        return content

    def finish(self) -> None:
        if not self._has_ended:
            refuse("malformed", "file", bound="multipart/form-data", cause="it ends before its last boundary")
        if self.filename is None:
            refuse("missing", "file", remedy="send a field of the form with a file name and the file's content")

    def _begin_part(self) -> None:
        self._headers = {}
        self._num_header_bytes = 0
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            remedy = "send `file` and `purpose` only"
            refuse("over_limit", "", self._num_parts, MAX_PARTS, remedy, unit="parts of a form")

    def _extend_header(self, text: bytearray, data: bytes, start: int, end: int) -> None:
        text += data[start:end]
        self._num_header_bytes += end - start
        if self._num_header_bytes > MAX_HEADER_BYTES:
            _refuse_large(
                self._num_header_bytes, MAX_HEADER_BYTES, "bytes in a part's headers", "shorten the file name"
            )

    def _end_header(self) -> None:
        self._headers[self._header_name.decode("latin-1").lower()] = bytes(self._header_value)
        self._header_name.clear()
        self._header_value.clear()

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._headers.get("content-disposition", b""))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if name != "file":
            self._field = (name, bytearray())
            return
        if self.filename is not None:
            _refuse_large(2, 1, "files in its form", "upload one at a time")
        self._field = None
        given = options.get(b"filename", b"file").decode("utf-8", "replace")
        self.filename = given.replace("\\", "/").rpartition("/")[2][:MAX_FILENAME_CHARACTERS]

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self._content += data[start:end]
            return
        name, value = self._field
        value += data[start:end]
        if len(value) > MAX_FIELD_BYTES:
            refuse("over_limit", name[:100], len(value), MAX_FIELD_BYTES, "shorten it", unit="bytes")

    def _end_part(self) -> None:
        if self._field is not None:
            name, value = self._field
            self.fields[name] = value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._has_ended = True


def _refuse_large(value: int, limit: int, unit: str, remedy: str = "leave some out") -> NoReturn:
    refuse("over_limit", "file", value, limit, remedy, unit=unit)
