"""A test may be a coroutine function: `async_test` runs it in an event loop of its own."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

Arguments = ParamSpec("Arguments")


def async_test(test: Callable[Arguments, Coroutine[Any, Any, None]]) -> Callable[Arguments, None]:
    """Returns a plain test that runs the coroutine to its end with `asyncio.run`.

    It keeps the signature, so that pytest finds its fixtures and parameters. Marks stand above this decorator.
    """

    @functools.wraps(test)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run
