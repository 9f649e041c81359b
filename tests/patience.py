"""How long tests wait for something that must happen.

A busy machine makes it late, and no test fails for that. What must happen within a time that users rely on is measured
in `make prove`, or beside a reference action in the same test.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 600.0
"""Seconds after which a test holds that something will never happen."""


def wait_until(condition: Callable[[], bool], poll_s: float = 0.01) -> None:
    """Returns once `condition` is true. Raises `AssertionError` after `PATIENCE_S`."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "what must come did not come"
        time.sleep(poll_s)


async def until(condition: Callable[[], bool], poll_s: float = 0.01) -> None:
    """As `wait_until`, in an event loop."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "what must come did not come"
        await asyncio.sleep(poll_s)
