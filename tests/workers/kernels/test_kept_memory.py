"""Memory that the next step uses again, but never while somebody reads what is in it."""

from __future__ import annotations

import pytest
import torch

from manta.workers.kernels import cpu_linear
from manta.workers.kernels.kept_memory import SMALL_BYTES, KeptMemory

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
