"""Helpers of the integer readers: bits in words, groups of inputs, zero points and act-order."""

from __future__ import annotations

import math

import torch

from manta.workers.checkpoints.formats.stored_part import StoredPart
from manta.workers.kernels.quantized_weight import QuantizedWeight
from manta.workers.models.model_config import ModelError

IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)


def unpack(words: torch.Tensor, bits: int, count: int, order: tuple[int, ...] = IN_ORDER) -> torch.Tensor:
    """Unpacks unsigned numbers of `bits` bits from int32 [rows, num_words], lowest bits first, to int16 [rows, count].

    `order[i]` is the place of a word's i-th number among the numbers of that word.
    """
    per_word = 32 // bits
    numbers = torch.empty((words.shape[0], words.shape[1] * per_word), dtype=torch.int16, device=words.device)
    for place in range(per_word):
        numbers[:, order[place] :: per_word] = (words >> (bits * place)) & ((1 << bits) - 1)
    return numbers[:, :count]


def signed(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Moves unsigned numbers to the range of `QuantizedWeight.values`, int8."""
    return (numbers - (1 << (bits - 1))).to(torch.int8)


def num_words(count: int, bits: int) -> int:
    """Returns how many int32 words hold `count` numbers."""
    return -(-count * bits // 32)


def group_index(part: StoredPart, name: str) -> torch.Tensor | None:
    """Returns the group of each input, int32 [in_features], from the tensor `name`; None if the inputs are in order.
    Raises `ModelError` for groups that do not exist or differ in size.
    """
    if not part.has(name):
        return None
    index = part.stored(name, (part.in_features,), torch.int32)
    if index.is_meta or bool((index == -1).all()):  # tools write -1 where the order was never set
        return None
    size = part.format.group_size or part.in_features
    if torch.equal(index, torch.arange(part.in_features, dtype=torch.int32) // size):
        return None
    least, most = int(index.min()), int(index.max())
    if least < 0 or most >= part.num_groups:
        raise ModelError(f"{part.name}.{name} has groups {least} to {most}, and there are {part.num_groups}")
    counts = index.bincount(minlength=part.num_groups)
    if not bool((counts == size).all()):
        sizes = f"{int(counts.min())} to {int(counts.max())}"
        raise ModelError(f"{part.name}.{name} has groups of {sizes} inputs; all must have {size}")
    return index


def in_groups(
    part: StoredPart,
    values: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    index: torch.Tensor | None = None,
) -> QuantizedWeight:
    """Returns a `QuantizedWeight` of int8 values [out_features, in_features], and scales and zero points [out_features,
    num_groups]. `index` has the group of each input if they are not in order.
    """
    scales = scales.float()
    offsets = None if zero_points is None else -scales * zero_points.to(scales.device).float()
    order = None
    if index is not None:
        order = index.argsort(stable=True)
        values = values[:, order.to(values.device)]
    size = part.format.group_size or part.in_features
    common = math.gcd(size, part.in_features)  # a smaller last group cuts all groups into parts of one size
    if common != size:
        groups = torch.arange(part.in_features // common, device=scales.device) * common // size
        scales, offsets = scales[:, groups], None if offsets is None else offsets[:, groups]
    return QuantizedWeight(
        values.contiguous(),
        scales.contiguous(),
        part.format.bits,
        None if offsets is None else offsets.contiguous(),
        order,
        has_int8_activations=part.format.has_int8_activations,
    )
