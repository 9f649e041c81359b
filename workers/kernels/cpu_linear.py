"""Packed bfloat16 linears on CPUs with AVX-512 BF16 or AMX: thin ctypes calls into `linear.cpp`.

Only `workers/layers.py` calls it, and takes oneDNN where `pack` returns None. Nothing is compiled at import.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from ctypes import c_int, c_void_p

import torch

from workers.kernels import build

PANEL = 64
"""Outputs are packed in panels of this many."""
STEP = 32
"""in_features must be a multiple of it."""
GATES = 16
"""Gates that lie together, before what they let through."""


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = build.load_library("linear")
    if library is None or not library.manta_linear_supported():
        return None
    library.manta_pack_linear.argtypes = [c_void_p, c_void_p, c_int, c_int, c_int]
    library.manta_linear.argtypes = [*[c_void_p] * 4, *[c_int] * 4]
    library.manta_pack_linear.restype = library.manta_linear.restype = None
    return library


def pack(
    weight: torch.Tensor, bias: torch.Tensor | None, gated: bool = False
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """`x @ weight.T + bias` for bfloat16 x [..., in_features], accumulated in float32; keeps a packed copy of `weight`.

    With `gated`, `silu` of the first half of that times the second, rounded once. None where the processor, the dtype
    or a size does not allow it.
    """
    out_features, in_features = weight.shape
    if weight.dtype != torch.bfloat16 or in_features % STEP or (library := _library()) is None:
        return None
    if gated and out_features % (2 * GATES):
        return None
    packed = torch.empty(-(-out_features // PANEL) * PANEL * in_features, dtype=torch.bfloat16)
    weight = weight.contiguous()
    library.manta_pack_linear(weight.data_ptr(), packed.data_ptr(), out_features, in_features, gated)
    if bias is not None:
        bias = bias.view(2, -1, GATES).transpose(0, 1).reshape(-1) if gated else bias.contiguous()
    width = out_features // 2 if gated else out_features
    run = library.manta_linear

    def linear(x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        y = x.new_empty((*x.shape[:-1], width))
        run(
            x.data_ptr(),
            packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            x.numel() // in_features,
            in_features,
            out_features,
            gated,
        )
        return y

    return linear
