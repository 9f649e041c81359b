"""Ctrl-C between steps: an engine that is used by the main thread is never left with half a step.

Used by `cluster/llm.py` and `cluster/engine/beam_search.py` around whatever changes the engine. What ends after it
finds the engine whole, and can abort what it began.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


class _Deferral:
    """Takes Ctrl-C for `handler` while it is installed; a second one goes to it at once, for a step that hangs."""

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
    """For a loop: Ctrl-C takes effect where the loop calls what it is given, and when the block ends.

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
