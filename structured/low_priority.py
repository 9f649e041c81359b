"""Threads of low priority, for work that must not delay the steps of this machine's engines.

On Linux each thread has a niceness of its own, which those that it starts inherit. Only root may lower a niceness again
(sched(7)), so a process that has to compute later does its other work in threads that end.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

NICENESS = 10
"""Added to a thread's niceness: a tenth of the weight of a thread that computes a step. With 19, work waits for seconds
beside other programs.
"""


def lower_priority() -> None:
    """Lowers the priority of the calling thread and of those that it starts. Does nothing where a thread has no
    priority of its own.
    """
    if sys.platform == "linux":
        os.nice(NICENESS)  # relative, because Ray may have started this process at a higher niceness already


def call_aside(function: Callable[[], Result]) -> Result:
    """Calls a function in a thread of low priority and returns its result, or raises what it raises. Threads that it
    starts keep the low priority.
    """
    with ThreadPoolExecutor(1, "manta-aside", lower_priority) as thread:
        return thread.submit(function).result()
