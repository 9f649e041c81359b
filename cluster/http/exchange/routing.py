"""Defines a route, and finds the route of a request. The routes themselves stand in `cluster/http/routes.py`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from cluster.http.exchange.codec import Body
from cluster.http.exchange.exchange import Exchange
from cluster.http.exchange.state import AppState
from cluster.protocol.api_errors import ApiError

Handler = Callable[[AppState, Exchange, Any], Awaitable[Any]]
"""Gets the decoded body, None if the route takes none. What it returns is sent as JSON; it returns None if it has sent
the answer itself.
"""


@dataclasses.dataclass(frozen=True)
class Route:
    """An endpoint: everything that the application and its OpenAPI document know about it."""

    method: str
    path: str
    """It may have a parameter, `{name}`, which takes the rest of a request's path less what follows the parameter."""
    handler: Handler
    summary: str
    _: dataclasses.KW_ONLY
    body: type[Body] | None = None
    """Decoded and checked before the handler is called."""
    answer: Any = None
    """The type of what is sent as JSON, if any is."""
    form: type | None = None
    """The fields of a `multipart/form-data` body, which the handler reads itself as it comes."""
    query: type | None = None
    """The fields that may follow the ? of the URL; the handler gets what it asks `decode_query` for."""
    media_type: str | None = None
    """A content type of the answer that is not JSON."""
    errors: tuple[int, ...] = ()
    """Statuses that its handler answers, in addition to those of every route."""
    error_body: Callable[[ApiError], bytes] = ApiError.body
    """Writes its errors, in a stream too."""
    public: bool = False
    """Answered without an API key: probes and scrapers have none."""
    logged: bool = False
    """A line in the request log for each request."""

    @property
    def parameter(self) -> str | None:
        """The name of the path's parameter."""
        found = re.search(r"/\{(\w+)\}", self.path)
        return None if found is None else found[1]


class Router:
    """Finds the route of a request by its path and method."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._exact: dict[str, dict[str, Route]] = {}
        self._with_parameter: dict[tuple[str, str], dict[str, Route]] = {}
        """The routes by the text before the parameter and after it, the longest text after it first."""
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
        """The route of `path`, and the value of its parameter; HEAD is GET without a body in the answer.

        Raises `ApiError` 404 or 405 if there is none, whose message has paths as clients know them: below `root_path`.
        """
        methods, value = self._methods(path, root_path)
        wanted = "GET" if method == "HEAD" else method
        if wanted not in methods:
            allowed = ", ".join(self.methods(path, root_path))
            raise ApiError(405, f"{root_path}{path} takes {allowed}, not {method}", code="method_not_allowed")
        return methods[wanted], value

    def methods(self, path: str, root_path: str = "") -> list[str]:
        """The methods that a path takes. Raises `ApiError` 404."""
        methods, _ = self._methods(path, root_path)
        return [*methods, *(["HEAD"] if "GET" in methods else []), "OPTIONS"]

    def _methods(self, path: str, root_path: str) -> tuple[dict[str, Route], str]:
        methods, value = self._exact.get(path), ""
        if methods is None:
            methods, value = self._find_with_parameter(path)
        if not methods:
            served = ", ".join(f"{method} {root_path}{each}" for method, each in self._served)
            message = f"there is nothing at {root_path}{path}; what is served: {served}"
            raise ApiError(404, message, code="unknown_url")
        return methods, value

    def _find_with_parameter(self, path: str) -> tuple[dict[str, Route], str]:
        for (prefix, suffix), methods in self._with_parameter.items():
            value = path.removeprefix(prefix).removesuffix(suffix)
            if value and path == f"{prefix}{value}{suffix}":
                return methods, value
        return {}, ""
