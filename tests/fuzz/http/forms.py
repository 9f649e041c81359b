"""Uploads: multipart forms, right and wrong in every part that RFC 7578 gives them."""

from __future__ import annotations

import random
from typing import NamedTuple

BOUNDARIES = ("b", "-" * 27 + "9051914041544843365972754266", "a b", "'()+_,-./:=?", "x" * 70, "\u00e9", "")
FILENAMES = ("in.jsonl", "C:\\a\\b.jsonl", "../../etc/passwd", "\u00fc\u4e16.jsonl", 'a\\"b', "x" * 3000, "", "\r\n")
NAMES = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]", "", "x" * 500, "file\x00")
VALUES = (b"batch", b"vision", b"", b"x" * 2000, b"3600", b"-1", b"\xff\xfe", b"1e400", b"created_at")
CONTENTS = (
    b"",
    b"{}\n",
    b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {}}\n',
    b"\r\n--" * 3000,
    b"\r" * 20_000,
    bytes(range(256)) * 200,
)
HEADERS = (
    b"x: y",
    b"x-long: " + b"z" * 5000,
    b"content-type: text/plain",
    b"content-disposition: form-data",
    b": ",
    b"a",
)


class Form(NamedTuple):
    content_type: str
    body: bytes
    content: bytes | None
    """Content to be stored if the upload is taken; None if the form may or must be refused."""


def good(generator: random.Random) -> Form:
    """Returns an upload that the server takes unless its owner has too much."""
    content = generator.choice(CONTENTS)
    parts = [_part("purpose", b"batch"), _part("file", content, generator.choice(FILENAMES[:4]))]
    generator.shuffle(parts)
    return Form("multipart/form-data; boundary=fuzz", _joined(b"fuzz", parts) + b"--fuzz--\r\n", content)


def drawn(generator: random.Random) -> Form:
    """Returns a form that is right in some parts and wrong in others."""
    boundary = generator.choice(BOUNDARIES)
    parts = []
    for _ in range(generator.choice((0, 1, 2, 2, 3, 20, 200))):
        name = generator.choice(NAMES)
        is_file = name == "file" or generator.random() < 0.2
        value = generator.choice(CONTENTS if is_file else VALUES)
        extra = [generator.choice(HEADERS) for _ in range(generator.choice((0, 0, 1, 3, 100)))]
        parts.append(_part(name, value, generator.choice(FILENAMES) if is_file else None, extra))
    ending = generator.choice((b"--%b--\r\n", b"--%b--\r\n", b"--%b", b"", b"\r\n--other--"))
    body = _joined(boundary.encode(), parts) + (ending.replace(b"%b", boundary.encode()))
    if generator.random() < 0.3:
        cut = generator.randrange(len(body) + 1)
        body = body[:cut] + generator.randbytes(generator.choice((0, 1, 50))) + body[cut + generator.choice((0, 3)) :]
    quoted = f'"{boundary}"' if generator.random() < 0.5 else boundary
    kind = generator.choice(("multipart/form-data", "multipart/form-data", "multipart/mixed", "application/json"))
    return Form(f"{kind}; boundary={quoted}", body, None)


def _part(name: str, value: bytes, filename: str | None = None, extra: list[bytes] | None = None) -> bytes:
    disposition = f'content-disposition: form-data; name="{name}"'
    if filename is not None:
        disposition += f'; filename="{filename}"'
    return b"\r\n".join([disposition.encode(), *(extra or []), b"", value])


def _joined(boundary: bytes, parts: list[bytes]) -> bytes:
    return b"".join(b"--" + boundary + b"\r\n" + part + b"\r\n" for part in parts)
