"""Reads one expert of gpt-oss's tensors in MXFP4 (OCP's Microscaling Formats 1.0)."""

from __future__ import annotations

import torch

from manta.workers.checkpoints.formats.compressed_tensors import mxfp4_weight
from manta.workers.checkpoints.formats.stored_part import StoredPart
from manta.workers.kernels.quantized_weight import QuantizedWeight

BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of the tensors of a layer's experts."""
_GROUP = 32
"""Inputs that share a scale."""


def read_mxfp4_experts(part: StoredPart) -> QuantizedWeight:
    """Reads `NAME_blocks` uint8 [num_experts, stored rows, groups, 16], two numbers a byte, and `NAME_scales` uint8
    [num_experts, stored rows, groups].
    """
    place = part.expert
    assert place is not None
    shape = (place.num_experts, part.out_features * place.step, part.in_features // _GROUP)
    blocks = part.tensors.view(f"{part.name}{BLOCKS}", (*shape, _GROUP // 2), torch.uint8)
    scales = part.tensors.view(f"{part.name}{SCALES}", shape, torch.uint8)
    packed, exponents = (place.rows_of(tensor[place.expert]) for tensor in (blocks, scales))
    return mxfp4_weight(part, packed.flatten(1), exponents)
