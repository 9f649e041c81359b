"""Work that grows with a request's body runs in another thread, so that the streams of others go on meanwhile.

The interpreter changes threads every few milliseconds, so a stream waits that long at most, or as long as one call of a
library: `cluster/protocol/body_size.py` bounds what such a call can get. Clients take turns.
"""

from __future__ import annotations

import asyncio
import collections
import contextvars
import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

MOST_BYTES_AT_ONCE = 2**15
"""Bytes of a longer body are worked on in the thread. Going there and back costs 0.1 ms, and a body of this size up to
some milliseconds.
"""
MOST_VALUES_AT_ONCE = 2000
"""Values of a body, as far as commas and colons tell them, above which it goes to the thread. The slowest code spends
about 5 us on each.
"""

Result = TypeVar("Result")


def is_small(body: bytes) -> bool:
    """Returns whether everything that is done with a body takes less than about 10 ms."""
    return len(body) <= MOST_BYTES_AT_ONCE and body.count(b",") + body.count(b":") <= MOST_VALUES_AT_ONCE


class Apart:
    """A thread that does one thing at a time. Clients with waiting calls take turns. The thread itself takes the next
    call: the event loop would need a turn between two calls of one client, and turns are long when many streams run.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._lock = threading.Lock()
        """Lock of `_waiting`, which both threads change."""
        self._waiting: dict[str, collections.deque[tuple[Callable[[], Any], Future[Any]]]] = {}
        """Calls that have not begun, by client; the client whose turn is next comes first."""

    async def run(self, client: str, function: Callable[..., Result], *arguments: object) -> Result:
        """Returns the result of the call, or raises what it raises. The call has the context of the caller."""
        call = functools.partial(contextvars.copy_context().run, function, *arguments)
        result: Future[Result] = Future()
        with self._lock:
            self._waiting.setdefault(client, collections.deque()).append((call, result))
        self._thread.submit(self._run_next)
        return await asyncio.wrap_future(result)

    def _run_next(self) -> None:
        """Runs the next call. The thread does this once for each call."""
        with self._lock:
            client = next(iter(self._waiting))
            calls = self._waiting.pop(client)
            call, result = calls.popleft()
            if calls:
                self._waiting[client] = calls
        if not result.set_running_or_notify_cancel():
            return
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)
