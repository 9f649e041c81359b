"""The processor time of an event loop's thread in each turn: what it did while every stream had to wait.

It does not depend on what else the machine does, as the time on the wall would.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from tests import garbage
from tests.patience import PATIENCE_S

Served = TypeVar("Served")
Result = TypeVar("Result")


class TurnClock(selectors.DefaultSelector):
    """The selector of one event loop, which a turn calls once."""

    def __init__(self) -> None:
        super().__init__()
        self.longest_s = 0.0
        """Processor seconds of the longest turn since the last `reset`."""
        self._begun = 0.0

    def reset(self) -> None:
        self.longest_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.longest_s = max(self.longest_s, time.thread_time() - self._begun)
        found = super().select(timeout)
        self._begun = time.thread_time()
        return found


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.clock = TurnClock()
        self._loop = asyncio.SelectorEventLoop(self.clock)
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE_S)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextlib.contextmanager
def timed(serve: Callable[[], AbstractAsyncContextManager[Served]]) -> Iterator[tuple[Served, TurnClock]]:
    """Yields what `serve` yields in an event loop of its own, and that loop's clock. What this process already holds is
    no garbage to look for meanwhile, as it would not be there in a server's process.
    """
    garbage.leave_alone()
    thread = LoopThread()
    context = serve()
    try:
        yield thread.run(context.__aenter__()), thread.clock
        thread.run(context.__aexit__(None, None, None))
    finally:
        thread.stop()
