"""Ctrl-C takes effect between steps, so that an engine that the main thread uses is never left with half a step.

`cluster/llm.py` and `cluster/engine/beam_search.py` use it around all that changes the engine. After a Ctrl-C they find
the engine whole, and can abort the requests that they began.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


class _Deferral:
    """Keeps a Ctrl-C for `handler` while it is installed. A second one goes to `handler` at once, in case a step
    hangs.
    """

    def __init__(self, handler: Callable[..., Any]) -> None:
        self._handler = handler
        self._asked: tuple[int, FrameType | None] | None = None

    def note(self, number: int, frame: FrameType | None) -> None:
        if self._asked is not None:
            self._handler(number, frame)
        self._asked = number, frame

    def deliver(self) -> None:
        """Raises `KeyboardInterrupt`, as a rule, if Ctrl-C has come."""
        if self._asked is not None:
            asked, self._asked = self._asked, None
            self._handler(*asked)


_installed: _Deferral | None = None


@contextlib.contextmanager
def uninterrupted_steps() -> Iterator[Callable[[], None]]:
    """For a loop: Ctrl-C takes effect when the loop calls the function that it is given, and when the block ends.

    Blocks of `uninterrupted` inside cost nothing: to install a handler takes 15 us, and a step of a small model 500.
    Only the main thread is interrupted, so other threads need nothing.
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
    """Ctrl-C takes effect when the block ends; a second one at once."""
    with uninterrupted_steps():
        yield
