"""What a GPU can do at most: the speed of a copy and the rate of a large product, measured here and now."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

LARGE = 8192
"""Side of the measured product."""
COPY_BYTES = 1 << 30


class Device(NamedTuple):
    """Measured here and now."""

    bytes_per_second: float
    """Rate of a copy, with read and written bytes counted."""
    operations_per_second: float
    """Rate of a bfloat16 product of two `LARGE` matrices."""


@functools.cache
def measure_device() -> Device:
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_seconds = device_seconds(lambda: target.copy_(source))
    left, right = torch.randn(2, LARGE, LARGE, device="cuda", dtype=torch.bfloat16)
    product_seconds = device_seconds(lambda: left @ right)
    return Device(2 * COPY_BYTES / copy_seconds, 2 * LARGE**3 / product_seconds)


def graph_seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Seconds of one of these calls: all are captured as one CUDA graph, so that their launches do not count."""
    stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return device_seconds(graph.replay) / len(calls)


def device_seconds(run: Callable[[], object], times: int = 20) -> float:
    """Median, by events on the device, after three runs that warm up."""
    for _ in range(3):
        run()
    seconds = []
    for _ in range(times):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return statistics.median(seconds)
