"""Work that grows with a request's body runs in another thread, so that the streams of others go on meanwhile.

The interpreter changes threads every few milliseconds, so a stream waits that long at most, or as long as one call of a
library: `cluster/protocol/body_size.py` bounds what such a call can get. Clients take turns.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

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
    """A thread that does one thing at a time. A client's next call waits for its last one, so that others' calls come
    between them.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._turns: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        """Locks of the clients with calls."""

    async def run(self, client: str, function: Callable[..., Result], *arguments: object) -> Result:
        """Returns the result of the call, or raises what it raises. The call has the context of the caller."""
        call = functools.partial(contextvars.copy_context().run, function, *arguments)
        async with self._turns.setdefault(client, asyncio.Lock()):
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
