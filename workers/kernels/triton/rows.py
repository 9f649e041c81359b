"""Triton kernels that treat each row separately: RMSNorm, alone and with the residual, and SiLU-and-mul.

`workers/kernels/reference.py` defines the results. The decoder calls them through `workers/kernels/triton/layers.py`.
Products and sums are not fused, so that `rounded_rows.py` gets the same bits in passes of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from manta.workers.kernels.triton.launch import padded_size

_SILU_COLUMNS = 1024
"""Number of columns of one program."""


def num_warps(columns: int) -> int:
    """Returns the number of warps for about 16 elements of each thread."""
    return min(16, max(1, columns // 512))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.contiguous()
    hidden = weight.shape[0]
    output = torch.empty_like(x)
    columns = padded_size(hidden)
    _rms_norm[(x.numel() // hidden,)](
        x, x, weight, output, hidden, hidden, eps, ADD=False, COLUMNS=columns,
        num_warps=num_warps(columns), enable_fp_fusion=False,
    )  # fmt: skip
    return output


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.contiguous()
    rows, hidden = x.shape
    output = torch.empty_like(x)
    columns = padded_size(hidden)
    _rms_norm[(rows,)](
        x, residual, weight, output, hidden, residual.stride(0), eps, ADD=True, COLUMNS=columns,
        num_warps=num_warps(columns), enable_fp_fusion=False,
    )  # fmt: skip
    return output


@triton.jit
def _rms_norm(
    x, residual, weight, output, hidden, residual_stride, eps, ADD: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Normalises one row in each program."""
    row = tl.program_id(0).to(tl.int64)
    scaled = norm_row(x, residual, weight, row, hidden, residual_stride, eps, ADD, COLUMNS)
    column = tl.arange(0, COLUMNS)
    tl.store(output + row * hidden + column, scaled.to(output.dtype.element_ty), mask=column < hidden)


@triton.jit
def norm_row(
    x, residual, weight, row, hidden, residual_stride, eps, ADD: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Returns the norm of a row in float32, with zeros from `hidden` on. With `ADD`, x is added to the residual in
    place, and the sum is rounded before its norm.
    """
    column = tl.arange(0, COLUMNS)
    mask = column < hidden
    values = tl.load(x + row * hidden + column, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        place = residual + row * residual_stride + column
        rounded = (values + tl.load(place, mask=mask, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(place, rounded, mask=mask)
        values = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / hidden + eps)
    return values * scale * tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate_up = gate_up.contiguous()
    rows, width = gate_up.shape
    intermediate = width // 2
    output = gate_up.new_empty((rows, intermediate))
    columns = min(_SILU_COLUMNS, padded_size(intermediate))
    grid = (rows, triton.cdiv(intermediate, columns))
    warps = min(4, num_warps(columns))
    _silu_and_mul[grid](gate_up, output, intermediate, COLUMNS=columns, num_warps=warps, enable_fp_fusion=False)
    return output


@triton.jit
def _silu_and_mul(gate_up, output, intermediate, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < intermediate
    gate = tl.load(gate_up + row * 2 * intermediate + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * intermediate + intermediate + column, mask=mask, other=0.0).to(tl.float32)
    gated = times_silu(gate, up)
    tl.store(output + row * intermediate + column, gated.to(output.dtype.element_ty), mask=mask)


@triton.jit
def times_silu(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up
