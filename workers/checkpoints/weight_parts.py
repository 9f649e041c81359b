"""Cuts whole weights into the shares of ranks, and stacks the parts of one linear. Weights are plain or integers in
groups.

Both operations are exact: a share's end cuts its group, and the scale is repeated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from manta.workers.kernels.quantized_weight import QuantizedWeight
from manta.workers.models.model_config import ModelError


def take_rows(weight: QuantizedWeight | torch.Tensor, start: int, stop: int) -> QuantizedWeight | torch.Tensor:
    """Returns rows `start` to `stop` of a weight, one for each output feature. Rows past its end are zeros."""
    if isinstance(weight, torch.Tensor):
        return _rows(weight, start, stop)
    return dataclasses.replace(
        weight,
        values=_rows(weight.values, start, stop),
        scales=_rows(weight.scales, start, stop),
        offsets=None if weight.offsets is None else _rows(weight.offsets, start, stop),
    )


def _rows(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    rows = tensor[start:stop]
    return rows if len(rows) == stop - start else F.pad(rows, (0, 0, 0, stop - start - len(rows)))


def take_inputs(
    name: str, weight: QuantizedWeight | torch.Tensor, start: int, stop: int
) -> QuantizedWeight | torch.Tensor:
    """Returns inputs `start` to `stop`. Raises `ModelError` for a weight with act-order."""
    if isinstance(weight, torch.Tensor):
        return weight[:, start:stop]
    if weight.input_order is not None:
        raise ModelError(
            f"the inputs of {name} are in the order of act-order (desc_act), which ranks cannot divide; "
            "set tensor_parallel_size to 1"
        )
    fine = in_groups_of(weight, math.gcd(weight.group_size, start, stop))
    groups = slice(start // fine.group_size, stop // fine.group_size)
    return dataclasses.replace(
        fine,
        values=fine.values[:, start:stop].contiguous(),
        scales=fine.scales[:, groups].contiguous(),
        offsets=None if fine.offsets is None else fine.offsets[:, groups].contiguous(),
    )


def in_groups_of(weight: QuantizedWeight, size: int) -> QuantizedWeight:
    """Returns the same weight with groups of `size` inputs, a divisor of the present size."""
    repeats = weight.group_size // size
    if repeats == 1:
        return weight
    scales = weight.scales.repeat_interleave(repeats, dim=1)
    offsets = None if weight.offsets is None else weight.offsets.repeat_interleave(repeats, dim=1)
    return dataclasses.replace(weight, scales=scales, offsets=offsets)


def stack(parts: Sequence[QuantizedWeight | torch.Tensor], dtype: torch.dtype) -> QuantizedWeight | torch.Tensor:
    """Returns one weight with the outputs of all parts. Parts without a common form become a plain weight in `dtype`:
    one is not quantised, or only one is of floats, or their act-orders differ.
    """
    if len(parts) == 1:
        return parts[0]
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    if len(quantized) < len(parts) or len({part.is_float8 for part in quantized}) > 1 or not _have_one_order(quantized):
        return torch.cat([_dense(part, dtype) for part in parts])
    size = math.gcd(*(part.group_size for part in quantized))
    fine = [in_groups_of(part, size) for part in quantized]
    offsets = None
    if any(part.offsets is not None for part in fine):
        offsets = torch.cat([torch.zeros_like(part.scales) if part.offsets is None else part.offsets for part in fine])
    return QuantizedWeight(
        torch.cat([part.values for part in fine]),
        torch.cat([part.scales for part in fine]),
        max(part.bits for part in fine),
        offsets,
        fine[0].input_order,
        has_int8_activations=all(part.has_int8_activations for part in fine),
    )


def _have_one_order(parts: Sequence[QuantizedWeight]) -> bool:
    first, *others = (part.input_order for part in parts)
    if first is None:
        return all(order is None for order in others)
    return all(order is not None and torch.equal(first, order) for order in others)


def _dense(part: QuantizedWeight | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return part.to(dtype) if isinstance(part, torch.Tensor) else part.dequantized(dtype)
