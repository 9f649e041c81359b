"""The Triton `Kernels` of a decoder layer, gathered in one module."""

from __future__ import annotations

from manta.workers.kernels.protocol import RecurrentKernels
from manta.workers.kernels.reference import cap, gate, head_products, layer_norm, log1p
from manta.workers.kernels.triton import recurrent_layer
from manta.workers.kernels.triton.attention import paged_attention
from manta.workers.kernels.triton.rope import rope_and_cache
from manta.workers.kernels.triton.router import route
from manta.workers.kernels.triton.rows import add_rms_norm, rms_norm, silu_and_mul

__all__ = [
    "add_rms_norm",
    "cap",
    "gate",
    "head_products",
    "layer_norm",
    "log1p",
    "paged_attention",
    "recurrent",
    "rms_norm",
    "rope_and_cache",
    "route",
    "silu_and_mul",
]

recurrent: RecurrentKernels = recurrent_layer
