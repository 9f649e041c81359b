"""One rank's share of whole weights: the only place that cuts them.

The descriptions in `workers/models/` say how ranks split each part: by heads, by the MLP's inner width, by outputs, or
by rows of the vocabulary. Other tensors are whole on every rank. A cut is exact: the end of a share cuts its group, and
the scale is repeated. Shares of plain weights are views, so only they are read from the file.
"""

from __future__ import annotations

import dataclasses
import math
from typing import overload

import torch
import torch.nn.functional as F

from manta.workers.kernels.quantized_weight import QuantizedWeight
from manta.workers.models.model_config import ModelError
from manta.workers.models.weight_specs import Split, WeightPart


class Shard:
    """One rank's share of the weights of a model with `num_kv_heads`, of at least two ranks."""

    def __init__(self, rank: int, num_ranks: int, num_kv_heads: int) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._num_kv_heads = num_kv_heads

    @overload
    def take(self, part: WeightPart, splits_inputs: bool, weight: torch.Tensor) -> torch.Tensor: ...

    @overload
    def take(
        self, part: WeightPart, splits_inputs: bool, weight: QuantizedWeight | torch.Tensor
    ) -> QuantizedWeight | torch.Tensor: ...

    def take(
        self, part: WeightPart, splits_inputs: bool, weight: QuantizedWeight | torch.Tensor
    ) -> QuantizedWeight | torch.Tensor:
        """Returns the rank's outputs or inputs of the whole weight of a part. Rows after the vocabulary are zeros.

        Raises `ModelError` if the inputs cannot be divided, because act-order has mixed them.
        """
        if part.split is Split.VOCABULARY:
            rows = -(-part.out_features // self._num_ranks)
            return take_rows(weight, self._rank * rows, (self._rank + 1) * rows)
        if part.split is Split.KV_HEADS:
            num_parts = min(self._num_kv_heads, self._num_ranks)
            return take_rows(weight, *_share(part.out_features, self._rank * num_parts // self._num_ranks, num_parts))
        if part.split is not Split.NOTHING:
            return take_rows(weight, *_share(part.out_features, self._rank, self._num_ranks))
        if splits_inputs:
            in_features = (weight if isinstance(weight, torch.Tensor) else weight.values).shape[1]
            return take_inputs(part.name, weight, *_share(in_features, self._rank, self._num_ranks))
        return weight

    def take_bias(self, part: WeightPart, splits_inputs: bool, bias: torch.Tensor) -> torch.Tensor:
        """Returns the rank's share of a bias. Where inputs are split, the sum over ranks adds rank 0's bias once."""
        return torch.zeros_like(bias) if splits_inputs and self._rank > 0 else self.take(part, False, bias)


def take_piece(part: WeightPart, stored: QuantizedWeight | torch.Tensor) -> QuantizedWeight | torch.Tensor:
    """Returns the rows of a part, if the checkpoint stores several parts as one tensor."""
    if part.stored_rows is None:
        return stored
    if part.piece is not None:
        return _picked(stored, part.piece.rows(part.out_features))
    return take_rows(stored, part.first_row, part.first_row + part.out_features)


def in_order(part: WeightPart, weight: QuantizedWeight | torch.Tensor) -> QuantizedWeight | torch.Tensor:
    """Returns whole heads of a part, or of its bias, with their rows in the order that the kernels rotate."""
    if part.order is None:
        return weight
    num_rows = len(weight if isinstance(weight, torch.Tensor) else weight.values)
    return _picked(weight, part.order.rows(num_rows))


def _picked(weight: QuantizedWeight | torch.Tensor, numbers: list[int]) -> QuantizedWeight | torch.Tensor:
    """Returns some rows in an order."""
    rows = torch.tensor(numbers)
    if isinstance(weight, torch.Tensor):
        return weight[rows.to(weight.device)]
    return dataclasses.replace(
        weight,
        values=weight.values[rows],
        scales=weight.scales[rows],
        offsets=None if weight.offsets is None else weight.offsets[rows],
    )


def scaled(weight: QuantizedWeight | torch.Tensor, factor: float) -> QuantizedWeight | torch.Tensor:
    """Returns the weight times a factor. Of integers, that is on their scales and offsets."""
    if isinstance(weight, torch.Tensor):
        return weight.float() * factor
    offsets = None if weight.offsets is None else weight.offsets * factor
    return dataclasses.replace(weight, scales=weight.scales * factor, offsets=offsets, has_half_scales=False)


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
    fine = weight.in_groups_of(math.gcd(weight.group_size, start, stop))
    groups = slice(start // fine.group_size, stop // fine.group_size)
    return dataclasses.replace(
        fine,
        values=fine.values[:, start:stop].contiguous(),
        scales=fine.scales[:, groups].contiguous(),
        offsets=None if fine.offsets is None else fine.offsets[:, groups].contiguous(),
    )


def _rows(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    rows = tensor[start:stop]
    return rows if len(rows) == stop - start else F.pad(rows, (0, 0, 0, stop - start - len(rows)))


def _share(size: int, part: int, num_parts: int) -> tuple[int, int]:
    """Returns the start and the stop of one of several equal shares."""
    share = size // num_parts
    return part * share, (part + 1) * share
