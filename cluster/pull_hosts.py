"""The option `pull_hosts`, the hosts from which operators may have models downloaded: what an entry may be, and which
URLs it allows.

The configuration checks entries without the modules that download.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Sequence


def origin_of(host: str) -> str:
    """Returns the origin of a host, or of a URL, as browsers write it: without a usual port, in lower case."""
    parts = urllib.parse.urlsplit((host if "://" in host else f"https://{host}").lower())
    usual = {"https": ":443", "http": ":80"}.get(parts.scheme, "")
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2].removesuffix(usual)}"


def check_host(host: str) -> None:
    """Raises `ValueError` for an entry of `pull_hosts` that is no host and no origin."""
    parts = urllib.parse.urlsplit(host if "://" in host else f"https://{host}")
    if parts.scheme not in ("https", "http") or not parts.hostname or parts.path or parts.query or "@" in parts.netloc:
        raise ValueError(
            f"pull_hosts: {host} is none of a host (huggingface.co), all hosts below a name (*.hf.co), and an origin "
            "(http://mirror.example:8080)"
        )


def is_allowed(url: str, hosts: Sequence[str]) -> bool:
    """Returns whether a URL is one of `hosts`: a name, which stands for HTTPS at its usual port, `*.NAME` for all names
    below it, or an origin (`http://mirror.example:8080`).
    """
    origin, name = origin_of(url), urllib.parse.urlsplit(url).hostname or ""
    for host in hosts:
        if host.startswith("*."):
            if origin == f"https://{name}" and name.endswith(host[1:].lower()):
                return True
        elif origin == origin_of(host):
            return True
    return False
