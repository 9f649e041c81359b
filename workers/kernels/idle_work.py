"""Work that begins when a model is loaded and that nobody waits for, in a thread of low priority."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

from manta.structured.low_priority import lower_priority
from manta.structured.visible_logs import logger_of

logger = logger_of(__name__)

DELAY_S = 1.0
"""Seconds before the work begins, so that it does not slow down the first tokens for requests that wait already."""
THREAD = "manta-idle-work"
_END_S = 2.0
"""Seconds for which a process that ends waits until the work has stopped."""


def begin(work: Callable[[Callable[[], bool]], None], failure: str, delay_s: float = DELAY_S) -> None:
    """Calls `work` in a thread, `delay_s` from now. Its argument is a function that returns whether the process ends:
    `work` then returns soon. An error is logged after the text `failure`.
    """
    over = threading.Event()

    def stop() -> None:
        over.set()
        thread.join(_END_S)

    def run() -> None:
        lower_priority()
        try:
            if not over.wait(delay_s):
                work(over.is_set)
        except (OSError, RuntimeError, MemoryError) as error:
            logger.warning("%s: %s", failure, error)
        finally:
            atexit.unregister(stop)

    thread = threading.Thread(target=run, name=THREAD, daemon=True)
    atexit.register(stop)
    thread.start()
