"""Routers of all models, and parts that torch computes without the option `exact`: thin ctypes calls into `exact.cpp`.

The results have the same bits in every form of the kernels and beside any other rows. They need the compiled kernels,
without which `exact` is refused (`workers/exact.py`).
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_int64, c_void_p

import torch

from manta.workers.kernels import build, cpu_recurrence
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.cpu_products import head_products


@functools.cache
def _library() -> ctypes.CDLL:
    library = build.load_library()
    assert library is not None, "exact is refused without compiled kernels"
    library.manta_log1p.argtypes = [c_void_p, c_void_p, c_int64]
    library.manta_log1p.restype = None
    return library


class ExactLinear:
    """`x @ weight.T + bias` in float32, for the weight [out_features, in_features] of a router."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        narrow = weight.bfloat16()
        is_narrow = torch.equal(narrow.to(weight.dtype), weight)
        self.weight = (narrow if is_narrow else weight).T.contiguous().unsqueeze(0)
        """[1, in_features, out_features], in bfloat16 if that loses nothing: a step of one row reads half as much"""
        self.bias = bias

    def forward(self, x: torch.Tensor, step: AttentionMetadata | None = None) -> torch.Tensor:
        products = head_products(x.unsqueeze(1), self.weight).squeeze(1)
        return products if self.bias is None else products + self.bias


def layer_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Computes `reference.layer_norm` of rows x [num_tokens, hidden]."""
    normed = cpu_recurrence.centred_heads(x.float().unsqueeze(1), eps).squeeze(1)
    return (normed * weight.float()).to(x.dtype)


def cap(x: torch.Tensor, limit: float) -> torch.Tensor:
    """Computes `reference.cap`, and rounds once."""
    return cpu_recurrence.cap(x.float(), limit).to(x.dtype) if limit else x


def log1p(x: torch.Tensor) -> torch.Tensor:
    """Returns `log(1 + x)` of float32 numbers x, at least 0, of any shape."""
    x = x.contiguous()
    output = torch.empty_like(x)
    _library().manta_log1p(x.data_ptr(), output.data_ptr(), x.numel())
    return output
