"""Memory that the next step uses again, but never while somebody reads what is in it."""

from __future__ import annotations

import pathlib
import sys

import pytest
import torch

from manta.workers.kernels import cpu_linear, cpu_quantized_linear
from manta.workers.kernels.kept_memory import SMALL_BYTES, KeptMemory
from manta.workers.kernels.rounding import round_weight

ROWS = SMALL_BYTES // 4 // 1024


def test_memory_is_reused_when_all_views_are_gone() -> None:
    memory = KeptMemory()
    first = memory.empty((ROWS, 1024), torch.float32)
    address, row = first.data_ptr(), first[3]
    del first
    while_read = memory.empty((ROWS, 1024), torch.float32)
    assert while_read.data_ptr() != address, "a view is read still"
    del row, while_read
    assert memory.empty((2 * ROWS, 1024), torch.bfloat16).data_ptr() == address
    larger = memory.empty((2 * ROWS, 1024), torch.float32)
    assert larger.shape == (2 * ROWS, 1024)
    larger.fill_(1.0)


def test_a_linear_keeps_its_earlier_results() -> None:
    linear = cpu_linear.pack(torch.randn(1024, 64), None)
    if linear is None:
        pytest.skip("no C++ compiler")
    inputs = [torch.randn(ROWS, 64) for _ in range(3)]
    alone = [linear.forward(x).clone() for x in inputs]
    together = [linear.forward(x) for x in inputs]
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux for the memory in use")
def test_a_small_call_gives_back_what_a_large_one_needed() -> None:
    """A prefill of many tokens leaves no memory to the steps after it."""
    in_features, num_rows = 128, 300_000
    linear = cpu_quantized_linear.pack(round_weight(torch.randn(32, in_features), 8), None, torch.bfloat16)
    if linear is None:
        pytest.skip("no C++ compiler")
    x = torch.zeros(num_rows, in_features, dtype=torch.bfloat16)
    y = linear.forward(x)
    with_scratch = _resident_bytes()
    linear.forward(x[:1])
    assert with_scratch - _resident_bytes() > 0.8 * num_rows * in_features
    assert y.shape == (num_rows, 32)


def _resident_bytes() -> int:
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096
