"""A decoder layer's kernels on the CPU: thin ctypes calls into `cpu.cpp`, or the torch reference without a compiler.

Same functions and meanings as `workers/kernels/reference.py`; float32 and bfloat16, weights in the dtype of the
activations, caches in it too or rounded. Nothing is compiled or loaded before the first call.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_float, c_int, c_int64, c_void_p

import torch

from manta.workers.kernels import build, cpu_experts, cpu_gates, cpu_recurrence, kv_cache, layout, reference
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.cpu_linear import DTYPES
from manta.workers.kernels.protocol import RecurrentKernels
from manta.workers.kernels.shared_prefixes import MAX_QUERY_LEN, PREFIX_MULTIPLE
from manta.workers.models.model_config import HeadShape

NO_WINDOW = 2**31 - 1
CACHE_DTYPES = {**DTYPES, kv_cache.ROUNDED["int8"]: 2, kv_cache.ROUNDED["int4"]: 3}
"""Numbers that the C++ has for a cache's dtype."""
HEAD_DIM_MULTIPLE = 16
"""Head sizes the C++ attention takes; the reference serves others."""

recurrent: RecurrentKernels = cpu_recurrence
route = cpu_experts.route
layer_norm = reference.layer_norm
cap = reference.cap
log1p = reference.log1p
head_products = reference.head_products


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = build.load_library()
    if library is None:
        return None
    shared = {
        "HEAD_DIM_MULTIPLE": HEAD_DIM_MULTIPLE,
        "NO_WINDOW": NO_WINDOW,
        "PREFIX_MULTIPLE": PREFIX_MULTIPLE,
        "MAX_QUERY_LEN": MAX_QUERY_LEN,
    }
    layout.check("the attention kernel", library.manta_attention_layout, shared)
    signatures = {
        "manta_rms_norm": [c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int, c_float],
        "manta_rope_and_cache": [c_int, c_int, *[c_void_p] * 8, c_int, c_int, c_int64, *[c_int] * 3, c_float],
        "manta_paged_attention": [
            c_int,
            c_int,
            c_void_p,
            c_int64,
            *[c_void_p] * 9,
            *[c_int] * 4,
            c_int64,
            *[c_int] * 4,
            c_float,
            c_float,
            c_void_p,
            c_int,
        ],
    }
    for name, argtypes in signatures.items():
        function = getattr(library, name)
        function.argtypes = argtypes
        function.restype = None
    return library


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    library = _library()
    if library is None:
        return reference.rms_norm(x, weight, eps)
    x = x.contiguous()
    output = torch.empty_like(x)
    hidden = weight.shape[0]
    library.manta_rms_norm(
        DTYPES[x.dtype], x.data_ptr(), None, weight.data_ptr(), output.data_ptr(), x.numel() // hidden, hidden, eps
    )
    return output


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    library = _library()
    if library is None or not residual.is_contiguous():
        return reference.add_rms_norm(x, residual, weight, eps)
    x = x.contiguous()
    output = torch.empty_like(x)
    rows, hidden = x.shape
    library.manta_rms_norm(
        DTYPES[x.dtype], x.data_ptr(), residual.data_ptr(), weight.data_ptr(), output.data_ptr(), rows, hidden, eps
    )
    return output


gate = cpu_gates.gate
silu_and_mul = functools.partial(gate, "silu")


def rope_and_cache(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    metadata: AttentionMetadata,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    heads: HeadShape,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    library = _library()
    is_refused = k_cache.dtype in kv_cache.ROUNDED.values() and heads.head_dim % HEAD_DIM_MULTIPLE
    if library is None or is_refused or not qkv.is_contiguous():
        reference.rope_and_cache(qkv, cos_sin, metadata, k_cache, v_cache, heads, q_norm_weight, k_norm_weight, eps)
        return
    library.manta_rope_and_cache(
        DTYPES[qkv.dtype],
        CACHE_DTYPES[k_cache.dtype],
        qkv.data_ptr(),
        cos_sin.data_ptr(),
        metadata.positions.data_ptr(),
        metadata.slot_mapping.data_ptr(),
        k_cache.data_ptr(),
        None if heads.keys_are_values else v_cache.data_ptr(),
        None if q_norm_weight is None else q_norm_weight.data_ptr(),
        None if k_norm_weight is None else k_norm_weight.data_ptr(),
        qkv.shape[0],
        metadata.block_size,
        k_cache.stride(0),
        heads.num_heads,
        heads.num_kv_heads,
        heads.head_dim,
        eps,
    )


def paged_attention(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: AttentionMetadata,
    heads: HeadShape,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
    exact: bool = False,
) -> torch.Tensor:
    """Attention over the paged cache, as in `reference.py`. If `exact`, the compiled kernels give the same bits on
    every processor: they widen keys and values to float32 where they would multiply bfloat16 by instructions for it.
    """
    library = _library()
    if library is None or heads.head_dim % HEAD_DIM_MULTIPLE:
        return reference.paged_attention(qkv, k_cache, v_cache, metadata, heads, sliding_window, sinks)
    num_tokens, stride = qkv.shape[0], qkv.stride(0)
    output = qkv.new_empty((num_tokens, heads.num_heads * heads.head_dim))
    num_sequences, max_blocks = metadata.block_tables.shape
    groups = metadata.shared_prefixes if sliding_window is None else None
    library.manta_paged_attention(
        DTYPES[qkv.dtype],
        CACHE_DTYPES[k_cache.dtype],
        qkv.data_ptr(),
        stride,
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        output.data_ptr(),
        metadata.query_start.data_ptr(),
        metadata.context_lens.data_ptr(),
        metadata.block_tables.data_ptr(),
        None if groups is None else groups.group_start.data_ptr(),
        None if groups is None else groups.members.data_ptr(),
        None if groups is None else groups.prefix_lens.data_ptr(),
        num_sequences,
        0 if groups is None else groups.num_groups,
        max_blocks,
        metadata.block_size,
        k_cache.stride(0),
        heads.num_heads,
        heads.num_kv_heads,
        heads.head_dim,
        NO_WINDOW if sliding_window is None else sliding_window,
        heads.scale,
        heads.logit_cap,
        None if sinks is None else sinks.data_ptr(),
        exact,
    )
    return output
