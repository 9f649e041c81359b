"""Memory for the large tensors of a step that the next step uses again.

What malloc asks the system for anew is zeroed page by page: 256 rows of 152k logits are 19,000 page faults a step. Used
by the kernels of the CPU.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

SMALL_BYTES = 1 << 20
"""Smaller tensors are left to malloc, which reuses their pages."""


class KeptMemory:
    """Memory of one tensor at a time. While that tensor lives, the next one gets memory of its own."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._in_use: weakref.ref[Any] | None = None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Not initialised. Its pages are huge where the system grants them, as numpy asks for that."""
        size = math.prod(shape) * dtype.itemsize
        if size < SMALL_BYTES or (self._in_use is not None and self._in_use() is not None):
            return torch.empty(shape, dtype=dtype)
        if self._memory.nbytes < size:
            self._memory = np.empty(0, np.uint8)  # before there are two
            self._memory = np.empty(size, np.uint8)
        part = self._memory[:size]
        self._in_use = weakref.ref(part)  # the tensor's storage holds it, whatever views there are
        return torch.from_numpy(part).view(dtype).view(*shape)
