"""Reads GPTQ's layout (Frantar et al., 2022) as AutoGPTQ and GPTQModel store it, with or without act-order.

Source: https://github.com/ModelCloud/GPTQModel, `nn_modules/qlinear/`.
"""

from __future__ import annotations

import torch

from manta.workers.checkpoints.formats.integers import group_index, in_groups, num_words, signed, unpack
from manta.workers.checkpoints.formats.stored_part import StoredPart
from manta.workers.kernels.quantized_weight import QuantizedWeight


def read_gptq(part: StoredPart) -> QuantizedWeight:
    """Reads `qweight` int32 [words of all inputs, out], `qzeros` int32 [num_groups, words of all outputs], `scales`
    [num_groups, out], and `g_idx` int32 [in], the group of each input.
    """
    bits, out_features, in_features = part.format.bits, part.out_features, part.in_features
    qweight = part.stored("qweight", (num_words(in_features, bits), out_features), torch.int32)
    qzeros = part.stored("qzeros", (part.num_groups, num_words(out_features, bits)), torch.int32)
    scales = part.stored("scales", (part.num_groups, out_features), torch.float32)
    values = signed(unpack(qweight.T, bits, in_features), bits)
    zero_points = signed(unpack(_shifted(qzeros, part), bits, out_features).T, bits)
    return in_groups(part, values, scales.T, _unless_zero(zero_points, part), group_index(part, "g_idx"))


def _shifted(qzeros: torch.Tensor, part: StoredPart) -> torch.Tensor:
    """Adds what the format subtracted from each zero point. Its tools subtract from whole words, with borrows between
    numbers, so this adds to whole words.
    """
    bits = part.format.bits
    ones = sum(1 << place for place in range(0, 32, bits))
    return (qzeros.long() + part.format.zero_point_shift * ones).to(torch.int32)


def _unless_zero(zero_points: torch.Tensor, part: StoredPart) -> torch.Tensor | None:
    """Returns None if all zero points are zero, as in a symmetric weight."""
    if zero_points.is_meta:
        return None if part.format.is_symmetric else zero_points
    return zero_points if zero_points.any() else None
