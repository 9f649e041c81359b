"""One call for many who ask at the same time, such as all requests of an ingress that has just started."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


class SharedCall:
    """Makes calls of `function`. Whoever asks gets the end of a call that has begun since, and shares it with all who
    have asked meanwhile. At most one call runs at a time.
    """

    def __init__(self, function: Callable[[], Awaitable[None]]) -> None:
        self._function = function
        self._running: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None
        """The call that will begin when the running one has ended; None if nobody has asked for it."""

    async def __call__(self) -> None:
        """Raises what the call raises."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._call_after(self._running))
        await asyncio.shield(self._next)  # it goes on for others when one leaves

    async def _call_after(self, running: asyncio.Task[None] | None) -> None:
        if running is not None:
            await asyncio.wait([running])
        self._running, self._next = self._next, None
        await self._function()
