"""The Triton `RecurrentKernels`, gathered in one module."""

from __future__ import annotations

from manta.workers.kernels.recurrent_layer import (
    cap,
    centred_heads,
    delta_step,
    exp,
    head_products,
    row_norm,
    running_max,
    silu,
    sqrt,
    sums_of_squares,
)
from manta.workers.kernels.triton.convolution import convolve
from manta.workers.kernels.triton.gates import gated_norm, sigmoid, softplus, unit_heads
from manta.workers.kernels.triton.recurrence import recur

__all__ = [
    "cap",
    "centred_heads",
    "convolve",
    "delta_step",
    "exp",
    "gated_norm",
    "head_products",
    "recur",
    "row_norm",
    "running_max",
    "sigmoid",
    "silu",
    "softplus",
    "sqrt",
    "sums_of_squares",
    "unit_heads",
]
