"""Products of heads on the CPU, each of which is one sum in the order of the inputs: a ctypes call into `exact.cpp`.

They need the compiled kernels. `cpu_recurrence.py` and `cpu_exact.py` call them.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_int, c_void_p

import torch

from manta.workers.kernels import build
from manta.workers.kernels.cpu_linear import DTYPES


@functools.cache
def _library() -> ctypes.CDLL:
    library = build.load_library()
    assert library is not None, "callers have looked for compiled kernels"
    library.manta_head_products.argtypes = [c_int, c_int, *[c_void_p] * 3, *[c_int] * 6]
    library.manta_head_products.restype = None
    return library


def head_products(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Computes `reference.head_products`. Each number is one float32 sum in the order of the inputs, whose terms are
    fused, and is rounded once to the dtype of x. The weight has that dtype, or is of bfloat16.
    """
    assert weight.dtype in (x.dtype, torch.bfloat16)
    x = x if x.stride(2) == 1 else x.contiguous()
    weight = weight.contiguous()
    num_tokens, num_heads, num_inputs = x.shape
    output = x.new_empty((num_tokens, num_heads, weight.shape[2]))
    _library().manta_head_products(
        DTYPES[x.dtype],
        DTYPES[weight.dtype],
        x.data_ptr(),
        weight.data_ptr(),
        output.data_ptr(),
        num_tokens,
        num_heads,
        num_inputs,
        weight.shape[2],
        x.stride(0),
        x.stride(1),
    )
    return output
