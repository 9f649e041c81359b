"""Names and web pages that may reach the server: the checks of Host, Origin and Sec-Fetch-Site, and CORS.

A browser sends requests for any page, also to loopback addresses and into the local network. The author of a page can
point the page's own name at such an address (DNS rebinding), and then the browser takes the page for one of this
server. Without an API key the server therefore answers only to names that nobody else can redirect: IP addresses,
loopback names, this machine's own name and `allowed_hosts`. Pages of other origins need `cors_origins`. Other clients
than browsers send only the Host header. `cluster/http/app.py` makes these checks before it looks for a route.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from urllib.parse import urlsplit

from manta.cluster.config import ServeConfig
from manta.cluster.errors import refuse

_NAME_IT = "name its origin in cors_origins"
ANY = "*"
PREFLIGHT_SECONDS = 600
"""Seconds for which a browser may remember the answer to a preflight."""
_LIMITS = [f"x-ratelimit-{name}-{what}" for what in ("requests", "tokens") for name in ("limit", "remaining", "reset")]
_EXPOSED = ", ".join(
    [
        *("x-request-id", "x-manta-not-enforced", "x-manta-ignored", "retry-after"),
        *("x-stream-id", "x-resumable-s", *_LIMITS),
    ]
).encode()
"""Headers of answers that a page's program may read."""

Headers = dict[str, str]
"""Headers of a request, by name in lower case."""


class Origins:
    """Checks requests against the configuration's `host`, `allowed_hosts`, `api_keys` and `cors_origins`."""

    def __init__(self, config: ServeConfig) -> None:
        self._allowed_hosts = frozenset(host.lower() for host in config.allowed_hosts)
        self._is_loopback = is_loopback(config.host)
        needs_no_name = bool(config.api_keys) and not (self._is_loopback or config.allowed_hosts)
        self._any_host = ANY in config.allowed_hosts or needs_no_name
        self._own_names = {config.host.lower()}
        if not (self._is_loopback or config.allowed_hosts):
            name = socket.gethostname().lower()
            self._own_names |= {name, f"{name.partition('.')[0]}.local"}
        self._origins = frozenset(origin.rstrip("/").lower() for origin in config.cors_origins)

    def check(self, headers: Headers) -> None:
        """Refuses with 403 for a Host that is not this server's, and for a page that may not use the server."""
        host = headers.get("host", "")
        if host and not self._answers_to(hostname(host)):
            cause = f"this server does not answer to the Host {host[:100]!a}"
            refuse("forbidden_origin", remedy="name it in allowed_hosts", cause=cause)
        origin = headers.get("origin")
        if origin is None:
            if headers.get("sec-fetch-site") == "cross-site" and ANY not in self._origins:
                refuse("forbidden_origin", remedy=_NAME_IT, cause="a page of another site may not use this server")
        elif not self._allows(origin) and urlsplit(origin).netloc.lower() != host.lower():
            cause = f"a page of {origin[:100]!a} may not use this server"
            refuse("forbidden_origin", remedy=_NAME_IT, cause=cause)

    def headers(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """Returns the CORS headers that every answer gets."""
        if not self._origins:
            return []
        origin = headers.get("origin", "")
        found = [] if ANY in self._origins else [(b"vary", b"origin")]
        if self._allows(origin):
            allowed = b"*" if ANY in self._origins else origin.encode("latin-1")
            found += [(b"access-control-allow-origin", allowed), (b"access-control-expose-headers", _EXPOSED)]
        return found

    def preflight(self, headers: Headers, methods: list[str]) -> list[tuple[bytes, bytes]]:
        """Returns the headers of the answer to a preflight; `methods` are those of the path."""
        listed = ", ".join(methods).encode()
        found = [(b"allow", listed)]
        if "access-control-request-method" not in headers or not self._allows(headers.get("origin", "")):
            return found
        names = re.findall(r"[\w-]+", headers.get("access-control-request-headers", ""), re.ASCII)
        found += [
            (b"access-control-allow-methods", listed),
            (b"access-control-allow-headers", ", ".join(names).encode()),
            (b"access-control-max-age", str(PREFLIGHT_SECONDS).encode()),
        ]
        if headers.get("access-control-request-private-network") == "true":
            found.append((b"access-control-allow-private-network", b"true"))
        return found

    def _answers_to(self, name: str) -> bool:
        if self._any_host or name in self._allowed_hosts or name in self._own_names or is_loopback(name):
            return True
        return not self._is_loopback and _is_address(name)

    def _allows(self, origin: str) -> bool:
        return bool(origin) and (ANY in self._origins or origin.lower() in self._origins)


def hostname(host: str) -> str:
    """Returns the name in a Host header, without the port and in lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")


def is_loopback(host: str) -> bool:
    """Returns whether a name or an address reaches only this machine from itself."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
