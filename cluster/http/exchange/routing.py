"""Defines a route, and finds the route of a request. `cluster/http/routes.py` holds the routes themselves."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from manta.cluster.errors import refuse
from manta.cluster.http.exchange.codec import Body
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


class Router:
    """Finds the route of a request by its path and method."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._exact: dict[str, dict[str, Route]] = {}
        self._with_parameter: dict[tuple[str, str], dict[str, Route]] = {}
        """Routes by the text before and after the parameter, longest text after it first."""
        routes = tuple(routes)
        self._served = [(route.method, route.path) for route in routes]
        for route in routes:
            if route.parameter is None:
                self._exact.setdefault(route.path, {})[route.method] = route
            else:
                prefix, _, rest = route.path.partition("{")
                self._with_parameter.setdefault((prefix, rest.partition("}")[2]), {})[route.method] = route
        self._with_parameter = dict(sorted(self._with_parameter.items(), key=lambda each: -len(each[0][1])))

    def find(self, method: str, path: str, root_path: str = "") -> tuple[Route, str]:
        """Returns the route of `path` and the value of its parameter. HEAD is GET without a body in the answer.

        Refuses with 404 or 405 if there is none. The refusal has paths as clients know them, below `root_path`.
        """
        methods, value = self._methods(path, root_path)
        wanted = "GET" if method == "HEAD" else method
        if wanted not in methods:
            allowed = ", ".join(self.methods(path, root_path))
            refuse("wrong_method", "", method, allowed, place=f"{root_path}{path}")
        return methods[wanted], value

    def methods(self, path: str, root_path: str = "") -> list[str]:
        """Returns the methods that a path takes. Raises `ServingError` 404 if there is no such path."""
        methods, _ = self._methods(path, root_path)
        return [*methods, *(["HEAD"] if "GET" in methods else []), "OPTIONS"]

    def _methods(self, path: str, root_path: str) -> tuple[dict[str, Route], str]:
        methods, value = self._exact.get(path), ""
        if methods is None:
            methods, value = self._find_with_parameter(path)
        if not methods:
            served = tuple(f"{method} {root_path}{each}" for method, each in self._served)
            refuse("unknown_url", bound=served, place=f"{root_path}{path}")
        return methods, value

    def _find_with_parameter(self, path: str) -> tuple[dict[str, Route], str]:
        for (prefix, suffix), methods in self._with_parameter.items():
            value = path.removeprefix(prefix).removesuffix(suffix)
            if value and path == f"{prefix}{value}{suffix}":
                return methods, value
        return {}, ""
