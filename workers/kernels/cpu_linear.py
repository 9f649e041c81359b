"""Packed bfloat16 linears on CPUs with AVX-512 BF16 or AMX: thin ctypes calls into `linear.cpp`.

Only `workers/layers.py` calls it, and takes oneDNN where `pack` returns None. Nothing is compiled at import.
"""

from __future__ import annotations

import ctypes
import functools
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


class PackedLinear:
    """`x @ weight.T + bias` for bfloat16 x [..., in_features], accumulated in float32.

    With `gated`, `silu` of the first half of that times the second, rounded once.
    """

    __slots__ = ("bias", "gated", "in_features", "out_features", "packed", "run", "width")

    def __init__(
        self, library: ctypes.CDLL, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool = False
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.width = self.out_features // 2 if gated else self.out_features
        self.gated = gated
        self.run = library.manta_linear
        panels = -(-self.out_features // PANEL)
        self.packed = torch.empty(panels * PANEL * self.in_features, dtype=torch.bfloat16)
        weight = weight.contiguous()
        library.manta_pack_linear(weight.data_ptr(), self.packed.data_ptr(), self.out_features, self.in_features, gated)
        self.bias = bias
        if bias is not None:
            self.bias = bias.view(2, -1, GATES).transpose(0, 1).reshape(-1) if gated else bias.contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        y = x.new_empty((*x.shape[:-1], self.width))
        self.run(
            x.data_ptr(),
            self.packed.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            y.data_ptr(),
            x.numel() // self.in_features,
            self.in_features,
            self.out_features,
            self.gated,
        )
        return y


def pack(weight: torch.Tensor, bias: torch.Tensor | None, gated: bool = False) -> PackedLinear | None:
    """With a packed copy of `weight`; None where the processor, the dtype or a size does not allow it."""
    out_features, in_features = weight.shape
    if weight.dtype != torch.bfloat16 or in_features % STEP or (library := _library()) is None:
        return None
    if gated and out_features % (2 * GATES):
        return None
    return PackedLinear(library, weight, bias, gated)
