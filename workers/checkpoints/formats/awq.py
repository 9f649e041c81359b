"""Reads AWQ's layout (Lin et al., 2023), version `gemm`.

Source: https://github.com/casper-hansen/AutoAWQ, `modules/linear/gemm.py`.
"""

from __future__ import annotations

import torch

from manta.workers.checkpoints.formats.integers import in_groups, num_words, signed, unpack
from manta.workers.checkpoints.formats.stored_part import StoredPart
from manta.workers.kernels.quantized_weight import QuantizedWeight

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The place among a word's eight outputs of each of its 4-bit numbers, lowest bits first."""


def read_awq(part: StoredPart) -> QuantizedWeight:
    """Reads `qweight` int32 [in, words of all outputs], `qzeros` int32 [num_groups, words of all outputs] and `scales`
    [num_groups, out]. Symmetric weights may lack `qzeros`.
    """
    bits, out_features = part.format.bits, part.out_features
    words = num_words(out_features, bits)
    qweight = part.stored("qweight", (part.in_features, words), torch.int32)
    values = signed(unpack(qweight, bits, out_features, _ORDER).T.contiguous(), bits)
    scales = part.stored("scales", (part.num_groups, out_features), torch.float32)
    zero_points = None
    if part.has("qzeros") or not part.format.is_symmetric:
        qzeros = part.stored("qzeros", (part.num_groups, words), torch.int32)
        zero_points = signed(unpack(qzeros, bits, out_features, _ORDER).T, bits)
    return in_groups(part, values, scales.T, zero_points)
