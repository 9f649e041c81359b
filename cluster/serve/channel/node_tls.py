"""The certificates by which nodes of a Ray cluster authenticate each other, for connections beside Ray's own.

A cluster whose nodes were started with `RAY_USE_TLS=1` names three PEM files in `RAY_TLS_SERVER_CERT`,
`RAY_TLS_SERVER_KEY` and `RAY_TLS_CA_CERT` (Ray's manual, "TLS authentication"). Both ends present a certificate signed
by that authority; the certificate of the listening end must name its address.
"""

from __future__ import annotations

import os
import ssl


def server_context() -> ssl.SSLContext | None:
    """Returns the context of the listening end; None if Ray runs without TLS. Raises `OSError` as `client_context`
    does.
    """
    return _context(ssl.Purpose.CLIENT_AUTH)


def client_context() -> ssl.SSLContext | None:
    """Returns the context of the connecting end; None if Ray runs without TLS.

    Raises `OSError` (of which `ssl.SSLError` is a subclass) if a file cannot be read or holds no certificate or key.
    """
    return _context(ssl.Purpose.SERVER_AUTH)


def _context(purpose: ssl.Purpose) -> ssl.SSLContext | None:
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    context = ssl.create_default_context(purpose, cafile=os.environ["RAY_TLS_CA_CERT"])
    context.load_cert_chain(os.environ["RAY_TLS_SERVER_CERT"], os.environ["RAY_TLS_SERVER_KEY"])
    context.verify_mode = ssl.CERT_REQUIRED
    return context
