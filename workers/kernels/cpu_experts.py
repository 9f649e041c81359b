"""The experts of a layer on the CPU, in one call of `experts.cpp`, whatever the precision of their weights.

`fuse` returns None where there are no kernels, and `looped_experts.py` runs them one by one. Nothing is compiled at
import.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_int, c_void_p

import torch

from manta.workers.kernels import build
from manta.workers.kernels.cpu_linear import DTYPES, PackedLinear
from manta.workers.kernels.cpu_quantized_linear import PackedQuantizedLinear
from manta.workers.kernels.layout import check, structure
from manta.workers.kernels.weights import GatedMlpWeights

_Packed = PackedLinear | PackedQuantizedLinear
_Expert = structure("_Expert", "run_gated gated run_down down")


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = build.load_library()
    if library is not None:
        check("experts.cpp", library.manta_experts_layout, {"the size of Expert": ctypes.sizeof(_Expert)})
        library.manta_experts.argtypes = [c_int, c_void_p, c_int, *[c_void_p] * 4, *[c_int] * 5]
        library.manta_experts.restype = None
    return library


class FusedExperts:
    """Does the same as `LoopedExperts`, with the same bits."""

    def __init__(self, library: ctypes.CDLL, experts: Sequence[tuple[_Packed, _Packed]], scales_inputs: bool) -> None:
        """`experts` are the two linears of each."""
        self._scales_inputs = scales_inputs
        self._run = library.manta_experts
        self._kept = experts  # their memory is pointed to
        self._inner = experts[0][0].width
        self._experts = (_Expert * len(experts))()
        for to, (gated, down) in zip(self._experts, experts, strict=True):
            to.run_gated, to.gated, *_ = gated.native()
            to.run_down, to.down, *_ = down.native()

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        x, chosen, shares = x.contiguous(), chosen.contiguous(), shares.contiguous()
        y = torch.empty(x.shape, dtype=torch.float32)
        self._run(
            DTYPES[x.dtype],
            ctypes.addressof(self._experts),
            len(self._experts),
            x.data_ptr(),
            chosen.data_ptr(),
            shares.data_ptr(),
            y.data_ptr(),
            *chosen.shape,
            x.shape[1],
            self._inner,
            self._scales_inputs,
        )
        return y


def fuse(experts: Sequence[GatedMlpWeights], scales_inputs: bool = False) -> FusedExperts | None:
    """Returns the experts in one call; `scales_inputs` is that of `LoopedExperts`. Returns None if nothing can be
    compiled, or if a linear is none of the kernels'.
    """
    pairs = [(e.gated, e.down) for e in experts if isinstance(e.gated, _Packed) and isinstance(e.down, _Packed)]
    library = _library()
    return None if library is None or len(pairs) < len(experts) else FusedExperts(library, pairs, scales_inputs)
