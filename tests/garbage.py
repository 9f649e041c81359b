"""Cheap collections of garbage in a process that holds all modules of the suite."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """Collects garbage. What is made in this context, and what the process held before, stays: no later collection
    looks at it. With the modules of transformers and of all tests each would take most of a second.
    """
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def leave_alone() -> None:
    """Collects garbage, and keeps what is left, which stays, out of later collections."""
    with lasting():
        pass
