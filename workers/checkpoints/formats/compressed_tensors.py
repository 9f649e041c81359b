"""Reads compressed-tensors' formats of integers and of 4-bit floating-point numbers.

Layouts: https://github.com/vllm-project/compressed-tensors, `compressors/`, and OCP's Microscaling Formats 1.0.
"""

from __future__ import annotations

import dataclasses

import torch

from manta.workers.checkpoints.formats.integers import group_index, in_groups, num_words, signed, unpack
from manta.workers.checkpoints.formats.stored_part import StoredPart
from manta.workers.kernels.quantized_weight import QuantizedWeight

_ACTIVATION_TENSORS = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point")
_NUMBERS_AT_A_TIME = 1 << 18
"""Numbers that are unpacked at a time, each of which takes five bytes meanwhile."""
FP4_CODEBOOK = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice each E2M1 number, by its four bits."""


def read_int(part: StoredPart) -> QuantizedWeight:
    """Reads `weight` int8 [out, in], `weight_scale`, and `weight_zero_point` int8 if it is asymmetric."""
    values = part.stored("weight", (part.out_features, part.in_features), torch.int8)
    zero_points = part.grouped("weight_zero_point", torch.int8) if part.has("weight_zero_point") else None
    part.skip(*_ACTIVATION_TENSORS)
    return in_groups(part, values, part.grouped("weight_scale"), zero_points, group_index(part, "weight_g_idx"))


def read_packed(part: StoredPart) -> QuantizedWeight:
    """Reads `weight_packed` int32 [out, words of a row], `weight_scale`, and `weight_zero_point` int32 [words of all
    outputs, num_groups] if it is asymmetric.
    """
    bits, out_features, in_features = part.format.bits, part.out_features, part.in_features
    words = part.stored("weight_packed", (out_features, num_words(in_features, bits)), torch.int32)
    values = signed(unpack(words, bits, in_features), bits)
    zero_points = None
    if part.has("weight_zero_point"):
        shape = (num_words(out_features, bits), part.num_groups)
        packed = part.stored("weight_zero_point", shape, torch.int32)
        zero_points = signed(unpack(packed.T, bits, out_features).T, bits)
    part.skip("weight_shape", *_ACTIVATION_TENSORS)
    return in_groups(part, values, part.grouped("weight_scale"), zero_points, group_index(part, "weight_g_idx"))


def read_mxfp4(part: StoredPart) -> QuantizedWeight:
    """Reads `weight_packed` uint8 [out, in / 2], two E2M1 numbers a byte, and `weight_scale` uint8, powers of two with
    bias 127.

    Twice an E2M1 number is an integer, so int8 holds the weight exactly.
    """
    packed = part.stored("weight_packed", (part.out_features, part.in_features // 2), torch.uint8)
    exponents = part.stored("weight_scale", (part.out_features, part.num_groups), torch.uint8)
    part.skip(*_ACTIVATION_TENSORS)
    return mxfp4_weight(part, packed, exponents)


def mxfp4_weight(part: StoredPart, packed: torch.Tensor, exponents: torch.Tensor) -> QuantizedWeight:
    """Returns the weight of `packed` numbers uint8 [out, in / 2] and `exponents` uint8 [out, num_groups]."""
    table = torch.tensor(FP4_CODEBOOK, dtype=torch.int8)
    rows, num_bytes = packed.shape
    values = torch.empty(rows, 2 * num_bytes, dtype=torch.int8, device=packed.device)
    step = rows if packed.is_meta else max(1, _NUMBERS_AT_A_TIME // (2 * num_bytes))
    for start in range(0, 0 if packed.is_meta else rows, step):
        pairs = packed[start : start + step]
        values[start : start + step] = table[torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1).int()]
    weight = in_groups(part, values, torch.exp2(exponents.float() - 128), None)
    return dataclasses.replace(weight, bits=8, codebook=FP4_CODEBOOK)
