"""Ctrl-C between steps: an engine that is used by the main thread is never left with half a step.

Used by `cluster/llm.py` and `cluster/engine/beam_search.py` around whatever changes the engine. What ends after it
finds the engine whole, and can abort what it began.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C takes effect when the block ends; a second one at once, for a step that hangs.

    Only the main thread is interrupted, so other threads need nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    asked: list[tuple] = []

    def note(*signal_and_frame) -> None:
        if asked:
            handler(*signal_and_frame)
        asked.append(signal_and_frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if asked:
            handler(*asked[0])
