"""`GET /` for browsers and `GET /playground/{asset}`: a page on which to talk to the model.

The page is the files of `cluster/http/playground/`, sent as they are: there is no build step, and the page loads
nothing from elsewhere. Its modules call the endpoints that every client calls.
"""

from __future__ import annotations

import functools
import hashlib
import html
import pathlib
from typing import NamedTuple

from manta.cluster.errors import refuse
from manta.cluster.http.exchange.exchange import Exchange
from manta.cluster.http.exchange.state import AppState
from manta.cluster.version import version

_FOLDER = pathlib.Path(__file__).parents[1] / "playground"
_CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
PAGE = "index.html"
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""The page's scripts, styles and requests are this server's only. Text cannot become HTML or a script."""


class Asset(NamedTuple):
    body: bytes
    content_type: str
    tag: str
    """Value of the ETag: it changes with the body."""


async def asset(state: AppState, exchange: Exchange, _: None) -> None:
    name = exchange.incoming.path_parameter
    if name == PAGE or name not in _names():
        refuse("unknown_file", "", name, remedy=f"it begins at {exchange.incoming.root_path}/")
    await _send(exchange, _read(name, exchange.incoming.root_path))


async def send_playground(exchange: Exchange) -> None:
    await _send(exchange, _read(PAGE, exchange.incoming.root_path))


@functools.cache
def _names() -> frozenset[str]:
    return frozenset(path.name for path in _FOLDER.iterdir() if path.suffix in _CONTENT_TYPES)


@functools.lru_cache(maxsize=64)
def _read(name: str, root: str) -> Asset:
    """Returns a file. `root` is the prefix below which the application is served; the page's links begin with it."""
    path = _FOLDER / name
    body = path.read_bytes()
    if name == PAGE:
        text = body.decode().replace("{root}", html.escape(root)).replace("{version}", html.escape(version()))
        body = text.encode()
    return Asset(body, _CONTENT_TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')


async def _send(exchange: Exchange, asset: Asset) -> None:
    """Sends a file, or 304 if the browser has it. Browsers ask each time, so that an update shows at once."""
    headers = [
        (b"etag", asset.tag.encode()),
        (b"cache-control", b"no-cache"),
        (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"vary", b"accept"),
    ]
    if asset.tag in exchange.headers.get("if-none-match", ""):
        await exchange.reply.send_empty(headers, 304)
    else:
        await exchange.reply.send_body(asset.body, asset.content_type, headers=headers)
