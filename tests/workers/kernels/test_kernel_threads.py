"""The kernels' threads: one pool for all callers, none of whom waits for a thread that does not run."""

from __future__ import annotations

import concurrent.futures
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable

import pytest
import torch

from manta.workers.kernels import build, cpu_linear
from tests.workers.cpu_forms import threads

CALLS = 2000
LIMIT = 20.0
"""Times that the calls may take what one thread takes for them. If each waited for a thread of the idle class, they
would take a hundred times as long.
"""


@pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")
def test_callers_share_the_threads() -> None:
    """The same bits with one thread and many, from several callers at once."""
    linear = cpu_linear.pack(torch.randn(500, 320), None)
    assert linear is not None
    x = torch.randn(700, 320)
    with threads(1):
        expected = linear.forward(x)
    before = _thread_ids()
    for num_threads in (2, 5, 40):
        with threads(num_threads), concurrent.futures.ThreadPoolExecutor(3) as pool:
            for result in pool.map(linear.forward, [x] * 60):
                assert torch.equal(result, expected)
    assert len(_thread_ids() - before) < 2 * num_threads, "a caller has threads of its own"


@pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="gives a thread a core, which only Linux can")
@pytest.mark.prove
def test_no_call_waits_for_a_stopped_thread() -> None:
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
        assert apart.submit(_slowdown_beside_starved_threads).result() < LIMIT


def _slowdown_beside_starved_threads() -> float:
    """Seconds of `CALLS` over those of one thread alone.

    Meanwhile the kernels' other thread is of the idle class, on a core that another process keeps busy.
    """
    weight, x = torch.randn(512, 512), torch.randn(64, 512)
    library = build.load_library()
    assert library is not None
    library.manta_set_num_threads(2)
    before = _thread_ids()
    linear = cpu_linear.pack(weight, None)
    (other,) = _thread_ids() - before
    assert linear is not None
    expected = linear.forward(x)
    core = max(os.sched_getaffinity(0))
    busy = multiprocessing.get_context("spawn").Process(target=_keep_busy, args=(core,), daemon=True)
    busy.start()
    os.sched_setaffinity(other, {core})
    os.sched_setscheduler(other, os.SCHED_IDLE, os.sched_param(0))
    try:
        library.manta_set_num_threads(1)
        alone_s = _seconds(lambda: linear.forward(x), math.inf)
        library.manta_set_num_threads(2)
        assert torch.equal(linear.forward(x), expected)
        return _seconds(lambda: linear.forward(x), LIMIT * alone_s) / alone_s
    finally:
        busy.kill()


def _seconds(call: Callable[[], object], limit_s: float) -> float:
    """Of `CALLS`, or until they take longer than the limit."""
    started = time.monotonic()
    for _ in range(CALLS):
        call()
        if time.monotonic() - started > limit_s:
            break
    return time.monotonic() - started


def _keep_busy(core: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        pass


def _thread_ids() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")} if os.path.isdir("/proc/self/task") else set()
