"""`multipart/form-data` as it comes: the content of its file is handed on piece by piece, its fields are kept.

The grammar is python-multipart's; here are the bounds, and which part is what.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from cluster.http.errors import refuse

MAX_FIELDS = 16
MAX_FIELD_BYTES = 1024
MAX_FORM_BYTES = 64 * 2**10
"""Of a body, less the content of its file."""
MAX_FILENAME_CHARACTERS = 255


class UploadForm(msgspec.Struct, kw_only=True):
    """The fields of `POST /v1/files`."""

    file: Annotated[str, Meta(extra_json_schema={"contentMediaType": "application/octet-stream"})]
    purpose: Literal["batch"]
    expires_after_anchor: Annotated[str | None, Meta(description="sent as expires_after[anchor]")] = None
    expires_after_seconds: Annotated[str | None, Meta(description="sent as expires_after[seconds]")] = None


class UploadParser:
    """`feed` takes the body, `finish` its end. Both raise `ApiError` 400 for what is no such form."""

    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            refuse("file", "the body is no multipart/form-data with a boundary; send the file as a form's field `file`")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        """None until the file's content begins."""
        self._headers: dict[str, bytes] = {}
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._field: tuple[str, bytearray] | None = None
        """The one that is coming; None while the file's content comes."""
        self._content = bytearray()
        self._has_ended = False
        self._parser = MultipartParser(
            options[b"boundary"],
            {
                "on_part_begin": self._begin_part,
                "on_header_field": lambda data, start, end: self._header_name.extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._header_value.extend(data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._take,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    def feed(self, piece: bytes) -> bytes:
        """What `piece` adds to the file's content."""
        try:
            self._parser.write(piece)
        except MultipartParseError as error:
            refuse("file", f"the form is malformed: {error}")
        content = bytes(self._content)
        self._content.clear()
        return content

    def finish(self) -> None:
        if not self._has_ended:
            refuse("file", "the form is malformed: it ends before its last boundary")
        if self.filename is None:
            refuse("file", "file is required: a field of the form with a file name and the file's content")

    def _begin_part(self) -> None:
        self._headers = {}

    def _end_header(self) -> None:
        self._headers[self._header_name.decode("latin-1").lower()] = bytes(self._header_value)
        self._header_name.clear()
        self._header_value.clear()

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._headers.get("content-disposition", b""))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if name != "file":
            if len(self.fields) >= MAX_FIELDS:
                refuse(None, f"the form has more than {MAX_FIELDS} fields")
            self._field = (name, bytearray())
            return
        if self.filename is not None:
            refuse("file", "the form has more than one file; upload one at a time")
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
            refuse(name[:100], f"{name[:100]} has more than {MAX_FIELD_BYTES} bytes")

    def _end_part(self) -> None:
        if self._field is not None:
            name, value = self._field
            self.fields[name] = value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._has_ended = True
