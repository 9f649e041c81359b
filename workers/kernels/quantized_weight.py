"""Weights of 8 or 4 bits in groups: the one form in which quantised checkpoints reach a platform.

Readers of formats (`workers/checkpoints/`) produce it, whatever the file stores; platforms multiply by it, or multiply
by its `dequantized` weight where they have no kernel for it. Only a platform that `keeps_float8` gets one of E4M3.
"""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(slots=True, frozen=True)
class QuantizedWeight:
    """Stands for the weight `scales * values + offsets` [out_features, in_features], each group of inputs with a scale
    and an offset of its own.
    """

    values: torch.Tensor
    """int8 [out_features, in_features], within the range of `bits`, or E4M3 (float8_e4m3fn) with 8 bits. It may be
    memory that is overwritten once the linear is made.
    """
    scales: torch.Tensor
    """float32 [out_features, num_groups], where in_features = num_groups * group_size."""
    bits: int = 8
    """8: values are -128 to 127. 4: values are -8 to 7, and a kernel may keep two in a byte."""
    offsets: torch.Tensor | None = None
    """float32 [out_features, num_groups]: minus the scale times the zero point, or GGUF's minimum. None: all zero."""
    input_order: torch.Tensor | None = None
    """int64 [in_features], a permutation: column i multiplies input `input_order[i]` (GPTQ's act-order). None: in
    order.
    """
    has_half_scales: bool = False
    """Whether scales and offsets are exact in float16, so that a kernel may keep each in two bytes."""
    has_int8_activations: bool = False
    """Whether the checkpoint was made for activations that are rounded to int8, with one scale for each row (W8A8)."""

    codebook: tuple[int, ...] | None = None
    """The 16 numbers from -128 to 127 that `values` consist of, so that a kernel may keep codes of 4 bits; `bits` is 8
    for kernels that do not. None: any number of `bits` bits.
    """

    @property
    def least_bits(self) -> int:
        """The fewest bits in which a kernel may keep a value."""
        return self.bits if self.codebook is None else (len(self.codebook) - 1).bit_length()

    @property
    def is_float8(self) -> bool:
        return self.values.dtype == torch.float8_e4m3fn

    @property
    def group_size(self) -> int:
        return self.values.shape[1] // self.scales.shape[1]

    def in_groups_of(self, size: int) -> QuantizedWeight:
        """Returns the same weight with groups of `size` inputs, a divisor of the present size."""
        repeats = self.group_size // size
        if repeats == 1:
            return self
        scales = self.scales.repeat_interleave(repeats, dim=1)
        offsets = None if self.offsets is None else self.offsets.repeat_interleave(repeats, dim=1)
        return dataclasses.replace(self, scales=scales, offsets=offsets)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the weight [out_features, in_features] with its columns in the order of the inputs, rounded once to
        `dtype`.
        """
        grouped = self.values.view(*self.scales.shape, self.group_size).float() * self.scales[..., None]
        if self.offsets is not None:
            grouped += self.offsets[..., None]
        weight = grouped.view(self.values.shape).to(dtype)
        if self.input_order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.input_order.to(weight.device), weight)
