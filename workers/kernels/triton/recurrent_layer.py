"""The Triton `RecurrentKernels`, gathered in one module."""

from __future__ import annotations

from manta.workers.kernels.triton.convolution import convolve
from manta.workers.kernels.triton.gates import gated_norm, sigmoid, softplus, unit_heads
from manta.workers.kernels.triton.recurrence import recur

__all__ = ["convolve", "gated_norm", "recur", "sigmoid", "softplus", "unit_heads"]
