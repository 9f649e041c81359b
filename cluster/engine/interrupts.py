"""Delays Ctrl-C to the end of a step, so that an engine on the main thread is never left in the middle of one.

`cluster/llm.py` and `cluster/engine/beam_search.py` use it around every change of the engine. After a Ctrl-C they find
the engine in a consistent state, and can abort the requests that they added.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


class _Deferral:
    """Holds a Ctrl-C back from `handler` while it is installed. A second Ctrl-C reaches `handler` at once, in case a
    step hangs.
    """

    def __init__(self, handler: Callable[..., Any]) -> None:
        self._handler = handler
        self._asked: tuple[int, FrameType | None] | None = None

    def note(self, number: int, frame: FrameType | None) -> None:
        if self._asked is not None:
            self._handler(number, frame)
        self._asked = number, frame

    def deliver(self) -> None:
        """Calls `handler` if Ctrl-C has come; by default it raises `KeyboardInterrupt`."""
        if self._asked is not None:
            asked, self._asked = self._asked, None
            self._handler(*asked)


_installed: _Deferral | None = None


@contextlib.contextmanager
def uninterrupted_steps() -> Iterator[Callable[[], None]]:
    """Yields a function for a loop to call: Ctrl-C takes effect in that call, and when the block ends.

    Blocks of `uninterrupted` inside cost nothing, whereas installing a handler takes 15 us and a step of a small model
    500 us. Only the main thread receives Ctrl-C, so the block does nothing on other threads.
    """
    global _installed
    is_free = _installed is None and threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if is_free else None
    if not callable(handler):
        yield lambda: None
        return
    _installed = deferral = _Deferral(handler)
    signal.signal(signal.SIGINT, deferral.note)
    try:
        yield deferral.deliver
    finally:
        signal.signal(signal.SIGINT, handler)
        _installed = None
        deferral.deliver()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delays Ctrl-C to the end of the block; a second Ctrl-C takes effect at once."""
    with uninterrupted_steps():
        yield
