"""Reads experts of DeepSeek-V4 in MXFP4 (OCP's Microscaling Formats 1.0), each a weight of its own."""

from __future__ import annotations

import torch

from manta.workers.checkpoints.formats.compressed_tensors import mxfp4_weight
from manta.workers.checkpoints.formats.stored_part import StoredPart
from manta.workers.kernels.quantized_weight import QuantizedWeight
from manta.workers.models.model_config import WeightFormat

DEEPSEEK_FP4 = WeightFormat(reader="deepseek_fp4", bits=4, group_size=32)
"""The format of a weight of the kind `PAIRS` in a checkpoint of E4M3 numbers."""
PAIRS = "I8"
"""The kind of tensors that hold two numbers a byte."""


def read_deepseek_fp4(part: StoredPart) -> QuantizedWeight:
    """Reads `weight` int8 [out, in / 2], two E2M1 numbers a byte, the first in the low bits, and `weight_scale_inv`
    E8M0 [out, in / 32].
    """
    packed = part.stored("weight", (part.out_features, part.in_features // 2), torch.int8)
    exponents = part.stored("weight_scale_inv", (part.out_features, part.num_groups), torch.uint8)
    return mxfp4_weight(part, packed.view(torch.uint8), exponents)
