"""Quantised weights in the device's memory: their form, which kernels are compiled for, and their tensors.

`quantized_linear.py` multiplies by one of them, and `experts.py` by those of a layer, which have one form.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from manta.workers.kernels.quantized_weight import QuantizedWeight
from manta.workers.kernels.triton.grouped_sums import as_exponents, codebook_number, codes_of, pack_tiles, tile_of
from manta.workers.kernels.triton.library_products import FLOAT8_BLOCK
from manta.workers.kernels.triton.rounded_rows import RowRounding


class WeightForm(NamedTuple):
    """The form of a weight, for which kernels are compiled."""

    out_features: int
    rounding: RowRounding
    """The form of the rows, in the order of the weight's columns."""
    is_packed: bool
    """Whether the values are tiles of nibbles (`grouped_sums.pack_tiles`)."""
    codebook: int
    """The bytes that nibbles stand for (`grouped_sums.codebook_number`); 0 if they are the numbers themselves."""
    has_one_scale: bool
    has_offsets: bool
    scale_rows: int
    """Consecutive outputs that share their scales."""

    @property
    def tile(self) -> int:
        return tile_of(self.rounding.group)

    @property
    def scale_stride(self) -> int:
        """The scales of a group."""
        return self.out_features // self.scale_rows

    @property
    def constants(self) -> dict[str, int]:
        """The constant arguments of `grouped_sums.sum_groups` that a weight decides."""
        group, tile = self.rounding.group, self.tile
        return {
            "GROUP": group,
            "IS_EVEN": group % tile == 0 and self.rounding.in_features % group == 0,
            "IS_PACKED": self.is_packed,
            "CODEBOOK": self.codebook,
            "HAS_ONE_SCALE": self.has_one_scale,
            "SCALE_ROWS": self.scale_rows,
            "HAS_OFFSETS": self.has_offsets,
            "TILE": tile,
        }


class WeightTensors(NamedTuple):
    """The tensors of a weight; of the weights of a layer's experts, each has one dimension more, the expert's."""

    values: torch.Tensor
    """int8 or E4M3 [out_features, in_features], or of 4 bits int8 [num_tiles, out_features, tile]."""
    scales: torch.Tensor
    """[num_groups, out_features / scale_rows]: float32, float16, or the exponents of powers of two in uint8."""
    offsets: torch.Tensor | None
    """float32 or float16 [num_groups, out_features]"""
    order: torch.Tensor | None
    """int32 [in_features]: the input that each column multiplies; None for all in order."""
    bias: torch.Tensor | None
    """[out_features] in the dtype of the activations."""

    @property
    def num_bytes(self) -> int:
        """The bytes without the bias and the order."""
        return sum(each.nbytes for each in self[:3] if each is not None)


class DeviceWeight(NamedTuple):
    form: WeightForm
    tensors: WeightTensors

    @classmethod
    def of(cls, weight: QuantizedWeight, bias: torch.Tensor | None, device: torch.device) -> DeviceWeight:
        """Copies a weight to the device. The bias is there already."""
        out_features = weight.values.shape[0]
        rounding = RowRounding.of(weight)
        values, codebook = weight.values.contiguous(), 0
        is_packed = weight.least_bits == 4
        if is_packed:
            codes = values if weight.codebook is None else codes_of(values, weight.codebook)
            packed = pack_tiles(codes, rounding.group)
            is_packed = packed.numel() < values.numel()  # small groups would be padded to more
            values = packed if is_packed else values
            codebook = codebook_number(weight.codebook) if is_packed else 0
        scale_rows = _outputs_of_scale(weight)
        dtype = torch.float16 if weight.has_half_scales else torch.float32
        scales = weight.scales[::scale_rows].T.contiguous()
        exponents = None if weight.codebook is None else as_exponents(scales)
        form = WeightForm(
            out_features,
            rounding,
            is_packed,
            codebook,
            weight.scales.shape[1] == 1,
            weight.offsets is not None,
            scale_rows,
        )
        tensors = WeightTensors(
            values.to(device, copy=True),
            scales.to(device, dtype) if exponents is None else exponents.to(device),
            None if weight.offsets is None else weight.offsets.T.contiguous().to(device, dtype),
            None if weight.input_order is None else weight.input_order.to(device, torch.int32),
            bias,
        )
        return cls(form, tensors)


def _outputs_of_scale(weight: QuantizedWeight) -> int:
    """Returns how many consecutive outputs share their scales: `FLOAT8_BLOCK` in E4M3 of such blocks, else 1."""
    out_features, num_groups = weight.scales.shape
    if not weight.is_float8 or num_groups == 1 or out_features % FLOAT8_BLOCK:
        return 1
    blocks = weight.scales.view(-1, FLOAT8_BLOCK, num_groups)
    return FLOAT8_BLOCK if torch.equal(blocks, blocks[:, :1].expand_as(blocks)) else 1
