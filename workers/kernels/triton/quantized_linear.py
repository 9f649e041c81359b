"""Quantised linears on a GPU: rounded activations times weights of int8, of 4 bits or of E4M3, in groups.

The results of integers are those of `workers/kernels/quantized_reference.py`, bit for bit, as on a CPU. Sums within a
group are integers and exact, groups are added in order, and every float operation is rounded by itself. So they depend
neither on the sizes of the blocks nor on the other rows. Sums of E4M3 are floats, whose order a GPU chooses.
`workers/platforms/cuda.py` makes these linears.

`rounded_rows.py` rounds the activations. In the kernel here, each program computes a block of outputs for a block of
rows and reads each weight once; consecutive programs share the weights of a block of outputs. Many rows are multiplied
by cuBLAS instead where `library_products.py` says so.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.linears import GatedLinear
from manta.workers.kernels.quantized_weight import QuantizedWeight
from manta.workers.kernels.triton.device_weight import DeviceWeight
from manta.workers.kernels.triton.grouped_sums import (
    gated_columns,
    most_outputs,
    split_gates,
    sum_groups,
    times_sigmoid,
)
from manta.workers.kernels.triton.launch import num_processors
from manta.workers.kernels.triton.library_products import choose_product
from manta.workers.kernels.triton.rounded_rows import RoundedRows, RowRounding, round_rows
from manta.workers.kernels.triton.rows import silu_and_mul
from manta.workers.kernels.weights import Linear

_BLOCK_ROWS = (8, 16, 32, 64, 128)
_BLOCK_OUTPUTS = (128, 64, 32, 16)
_BYTES_AHEAD = 16 << 10
"""Bytes of rows and weights that a program has on their way to hide the latency of memory (an estimate: no GPU has run
this yet).
"""


class TritonQuantizedLinear:
    """`x @ weight.T + bias` for x [..., in_features] in float32, bfloat16 or float16.

    With `gated`, the result is `silu` of the first half of the outputs times the second half. The device holds a weight
    of 4 bits in half a byte, and one of a codebook as codes of 4 bits, unless its groups are very small.
    """

    def __init__(self, weight: DeviceWeight, gated: bool = False) -> None:
        self.weight = weight
        self.gated = gated
        self.out_features, self.in_features = weight.form.out_features, weight.form.rounding.in_features
        self._num_processors = num_processors(weight.tensors.values.device)
        self.library = choose_product(weight.tensors.values, weight.tensors.scales, weight.tensors.bias)
        """The product of cuBLAS for many rows; None if there is none."""

    @classmethod
    def of(
        cls, weight: QuantizedWeight, bias: torch.Tensor | None, device: torch.device, gated: bool = False
    ) -> TritonQuantizedLinear:
        """Copies a weight to the device. The bias is there already."""
        return cls(DeviceWeight.of(weight, bias, device), gated)

    def with_gate_apart(self) -> Linear:
        """Returns the same function as a linear and its gate, which is rounded in between; itself if it has none."""
        return GatedLinear(TritonQuantizedLinear(self.weight), silu_and_mul) if self.gated else self

    @property
    def rounding(self) -> RowRounding:
        """The form of the rows that `multiply` takes, in the order of the weight's columns."""
        return self.weight.form.rounding

    @property
    def has_order(self) -> bool:
        return self.weight.tensors.order is not None

    def forward(self, x: torch.Tensor, step: AttentionMetadata | None = None) -> torch.Tensor:
        rows = round_rows(x.reshape(-1, self.in_features), self.rounding, self.weight.tensors.order)
        y = self.multiply(rows)
        return y.view(*x.shape[:-1], y.shape[-1])

    def multiply(self, rows: RoundedRows) -> torch.Tensor:
        """Returns the outputs [num_rows, width] of rows that were rounded by `rounding`."""
        if self.library is not None and self.library.takes(rows):
            product = self.library.multiply(rows)
            return silu_and_mul(product) if self.gated else product
        return self.multiply_by_triton(rows)

    def multiply_and_round(self, rows: RoundedRows, rounding: RowRounding) -> RoundedRows:
        """Returns the outputs of `multiply` rounded for the next linear."""
        if self.gated and self.library is not None and self.library.takes(rows):
            return round_rows(self.library.multiply(rows), rounding, is_gated=True)
        return round_rows(self.multiply(rows), rounding)

    def multiply_by_triton(self, rows: RoundedRows) -> torch.Tensor:
        """Returns what `multiply` does, whatever a library could multiply."""
        num_rows, (form, tensors) = rows.num_rows, self.weight
        width = self.out_features // 2 if self.gated else self.out_features
        y = torch.empty((num_rows, width), dtype=rows.dtype, device=rows.values.device)
        block_rows = next((size for size in _BLOCK_ROWS if size >= num_rows), _BLOCK_ROWS[-1])
        most = most_outputs(block_rows, self.gated)
        block_outputs = self._block_outputs(triton.cdiv(num_rows, block_rows), width, most)
        tile_bytes = form.tile * (block_rows + block_outputs)
        _multiply[(triton.cdiv(num_rows, block_rows), triton.cdiv(width, block_outputs))](
            # Arguments that a form of the kernel does not read still need a pointer
            rows.values, rows.scales, rows.shifts, tensors.values, tensors.scales,
            tensors.scales if tensors.offsets is None else tensors.offsets,
            tensors.scales if tensors.bias is None else tensors.bias, y,
            num_rows, rows.scales.shape[1], width, self.out_features, form.scale_stride, self.in_features,
            self.rounding.num_groups,
            **form.constants, HAS_BIAS=tensors.bias is not None, IS_GATED=self.gated,
            ROWS=block_rows, OUTPUTS=block_outputs,
            num_warps=8 if block_rows * block_outputs * (1 + self.gated) >= 64 * 128 else 4,
            num_stages=min(8, max(3, _BYTES_AHEAD // tile_bytes)), enable_fp_fusion=False,
        )  # fmt: skip
        return y

    def _block_outputs(self, row_blocks: int, width: int, most: int) -> int:
        """Returns the largest block of at most so many outputs with which every processor of the device has a
        program.
        """
        for size in _BLOCK_OUTPUTS:
            if size <= most and row_blocks * triton.cdiv(width, size) >= self._num_processors:
                return size
        return _BLOCK_OUTPUTS[-1]


@triton.jit
def _multiply(
    values, scales, shifts, weights, weight_scales, offsets, bias, y,
    num_rows, padded_rows, width, out_features, scale_stride, in_features, num_groups,
    GROUP: tl.constexpr, IS_EVEN: tl.constexpr, IS_PACKED: tl.constexpr, CODEBOOK: tl.constexpr,
    HAS_ONE_SCALE: tl.constexpr, SCALE_ROWS: tl.constexpr, HAS_OFFSETS: tl.constexpr, TILE: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Computes the outputs `OUTPUTS` of `ROWS` rows, and with `IS_GATED` the gates and what they let through."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    is_row, is_output = row < num_rows, column < width
    if IS_GATED:
        both, is_both = gated_columns(width, OUTPUTS)
        sums = sum_groups(
            values, scales, shifts, weights, weight_scales, offsets, bias, row, both, is_row, is_both,
            padded_rows, out_features, scale_stride, in_features, num_groups, GROUP, IS_EVEN, IS_PACKED, CODEBOOK,
            HAS_ONE_SCALE, SCALE_ROWS, HAS_OFFSETS, HAS_BIAS, ROWS, 2 * OUTPUTS, TILE,
        )  # fmt: skip
        gates, up = split_gates(sums, ROWS, OUTPUTS)
        result = times_sigmoid(gates) * up
    else:
        result = sum_groups(
            values, scales, shifts, weights, weight_scales, offsets, bias, row, column, is_row, is_output,
            padded_rows, out_features, scale_stride, in_features, num_groups, GROUP, IS_EVEN, IS_PACKED, CODEBOOK,
            HAS_ONE_SCALE, SCALE_ROWS, HAS_OFFSETS, HAS_BIAS, ROWS, OUTPUTS, TILE,
        )  # fmt: skip
    place = y + row[:, None] * width + column[None, :]
    tl.store(place, result.to(y.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])
