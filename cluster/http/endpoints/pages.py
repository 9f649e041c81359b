"""`GET /` and `GET /docs`: what a browser, or a client of the bare address, sees first.

A browser gets the playground at `/`. The rest is derived from the route table and the OpenAPI document, and loads
nothing from elsewhere. Links and paths include the application's prefix if a proxy in front serves it below one.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Any

import msgspec

from manta.cluster.http.endpoints.playground import send_playground
from manta.cluster.http.exchange.example import curl
from manta.cluster.http.exchange.exchange import Exchange
from manta.cluster.http.exchange.state import AppState
from manta.cluster.version import version

_STYLE = "body{font:16px/1.5 sans-serif;max-width:50em;margin:2em auto;padding:0 1em}pre{overflow:auto}"


class Home(msgspec.Struct, kw_only=True):
    """The answer of `GET /`: the model that is served, and where to read on."""

    name: str = "Manta"
    version: str
    model: str | None
    """Name of the served model, or of the first of several; None if the server requires keys, because this page
    requires none.
    """
    endpoints: list[str]
    example: str
    docs: str
    openapi: str


async def home(state: AppState, exchange: Exchange, _: None) -> Home | None:
    """Returns JSON, or sends the playground to a client that accepts HTML."""
    if "text/html" not in exchange.headers.get("accept", ""):
        return _home(state, exchange)
    await send_playground(exchange)
    return None


async def docs(state: AppState, exchange: Exchange, _: None) -> None:
    body = "".join(_operations(state.server.document, exchange.incoming.root_path))
    openapi = html.escape(f"{exchange.incoming.root_path}/openapi.json")
    await _send_page(exchange, "Manta's endpoints", f'{body}<p>All of it: <a href="{openapi}">{openapi}</a></p>')


def _home(state: AppState, exchange: Exchange) -> Home:
    needs_key = bool(state.config.api_keys)
    served = (each for each in state.models if each.condition is None or each.condition.stage != "failed")
    first = next(served, None)
    name = None if needs_key or first is None else first.model_name
    host, root = exchange.headers.get("host", ""), exchange.incoming.root_path
    url = f"{state.config.scheme}://{host or f'{state.config.host}:{state.config.port}'}{root}"
    known = None if first is None else first.known_model
    pooling = None if known is None else known.pooling
    return Home(
        version=version(),
        model=name,
        endpoints=[
            f"{method.upper()} {root}{path}"
            for path, methods in state.server.document["paths"].items()
            for method in methods
        ],
        example=curl(
            url,
            name or "YOUR-MODEL",
            chats=first is None or first.may_chat,
            needs_key=needs_key,
            pooling=pooling,
        ),
        docs=f"{root}/docs",
        openapi=f"{root}/openapi.json",
    )


def _operations(document: dict[str, Any], root: str) -> Iterator[str]:
    """Yields a heading for each endpoint, and the fields of its body."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"<h3>{method.upper()} {html.escape(root + path)}</h3><p>{html.escape(operation['summary'])}</p>"
            if "requestBody" in operation:
                (content,) = operation["requestBody"]["content"].values()
                schema = content["schema"]
                yield f"<pre>{html.escape(_fields(schema, document['components']['schemas']))}</pre>"


def _fields(schema: dict[str, Any], components: dict[str, Any]) -> str:
    """Returns a line for each field of an object, or of the objects in a list: its name, its type, and whether it is
    required.
    """
    if schema.get("type") == "array":
        return f"a list, each with\n{_fields(schema['items'], components)}"
    body = components[schema["$ref"].rpartition("/")[2]]
    required = set(body.get("required", ()))
    lines = (
        f"{name}: {_type(field)}{' (required)' if name in required else ''}"
        for name, field in body["properties"].items()
    )
    return "\n".join(lines)


def _type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(map(repr, schema["enum"]))
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if schema.get("type") == "array" and isinstance(schema.get("items"), dict):
        return f"list of {_type(schema['items'])}"
    return str(schema.get("type", "anything"))


async def _send_page(exchange: Exchange, title: str, body: str) -> None:
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<h1>{title}</h1>{body}</html>"
    )
    await exchange.reply.send_body(page.encode(), "text/html; charset=utf-8")
