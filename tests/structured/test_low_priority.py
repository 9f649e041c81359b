"""Work in threads of low priority."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from manta.structured.low_priority import NICENESS, call_aside


def niceness() -> int:
    """Returns that of the calling thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux a thread has a priority of its own")
def test_what_is_called_aside_has_a_low_priority_and_its_caller_keeps_its_own() -> None:
    before = niceness()
    assert call_aside(niceness) == min(19, before + NICENESS)
    assert niceness() == before


def test_what_is_called_aside_raises_where_it_was_called() -> None:
    with pytest.raises(ZeroDivisionError):
        call_aside(lambda: 1 // 0)
