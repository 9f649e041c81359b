"""Defines a route. `cluster/http/routes.py` holds the routes, and `cluster/http/app.py` finds that of a request."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Awaitable, Callable
from typing import Any

from manta.cluster.http.access.request_admission import Body
from manta.cluster.http.exchange.exchange import Exchange
from manta.cluster.http.exchange.state import AppState
from manta.cluster.protocol.error_bodies import Writer, openai_body

Handler = Callable[[AppState, Exchange, Any], Awaitable[Any]]
"""Function that gets the decoded body (None if the route takes none). Its result is sent as JSON; it returns None if it
has sent the answer itself.
"""


@dataclasses.dataclass(frozen=True)
class Route:
    """An endpoint: everything that the application and its OpenAPI document know about it."""

    method: str
    path: str
    """Path of the endpoint. A parameter `{name}` matches the rest of a request's path, except for the text that follows
    the parameter.
    """
    handler: Handler
    summary: str
    _: dataclasses.KW_ONLY
    body: type[Body] | None = None
    """Type to which the body is decoded and checked before the handler is called."""
    answer: Any = None
    """Type of the JSON answer, if there is one."""
    form: type | None = None
    """Fields of a `multipart/form-data` body, which the handler itself reads as it arrives."""
    query: type | None = None
    """Fields of the URL's query; the handler reads them with `decode_query`."""
    media_type: str | None = None
    """Content type of an answer that is not JSON."""
    errors: tuple[int, ...] = ()
    """Statuses that the handler returns, in addition to those of every route."""
    error_body: Writer = openai_body
    """Function that writes an error, in a stream too."""
    public: bool = False
    """Whether it is answered without an API key, because probes and scrapers have none."""
    logged: bool = False
    """Whether each request writes a line to the request log."""

    @property
    def parameter(self) -> str | None:
        """Name of the path's parameter; None if it has none."""
        found = re.search(r"/\{(\w+)\}", self.path)
        return None if found is None else found[1]
