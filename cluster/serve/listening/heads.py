"""Checks a request's head for the demands of RFC 9112 beyond syntax, which the parser checks.

A proxy in front that reads a head in another way would send two requests where this server sees one, or check one Host
while this server checks another. `cluster/serve/listening/listener.py` refuses such a head.
"""

from __future__ import annotations

import re

VERSIONS = ("1.0", "1.1")
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[\w.~%!$&'()*+,;=-]*)(:[0-9]*)?", re.ASCII)
"""A name or an address, and a port (RFC 9110, section 7.2)."""
_SHOWN_CHARACTERS = 80

Headers = list[tuple[bytes, bytes]]
"""Names in lower case, and values."""


def head_fault(http_version: str, headers: Headers) -> tuple[int, str] | None:
    """Returns status and message of the refusal of a head; None if it may go on."""
    if http_version not in VERSIONS:
        return 505, f"HTTP/{http_version} is not served; use HTTP/1.1"
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and http_version == "1.1"):
        return 400, f"the request has {len(hosts)} Host headers and must have exactly one"
    if hosts and not _HOST.fullmatch(hosts[0]):
        return 400, f"Host is {_shown(hosts[0])} and must be a name or an address, and perhaps a port"
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and http_version == "1.0":
        return 400, "an HTTP/1.0 request has no Transfer-Encoding; send Content-Length, or use HTTP/1.1"
    if codings and codings != [b"chunked"]:
        return 501, f"Transfer-Encoding is {_shown(b', '.join(codings))} and only 'chunked' is served"
    return None


def _shown(value: bytes) -> str:
    return ascii(value[:_SHOWN_CHARACTERS].decode("latin-1"))
