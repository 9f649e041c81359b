"""Quantised linears by torch alone: the numbers of `native/quantized_linear.h`, bit for bit, on any device of torch.

Used on a CPU without a C++ compiler, and by tests. Every float operation is one of torch's, rounded by itself, in the
order of the kernels; integer sums are exact because a float holds them. It is slow: a group of weights is widened at
each call.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from manta.workers.kept_weights import GROUPS
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.linears import GatedLinear
from manta.workers.kernels.quantized_weight import QuantizedWeight
from manta.workers.kernels.weights import Linear

INPUT_GROUP = GROUPS[8]
"""Inputs whose activations share a scale where all inputs of the weight do and the checkpoint does not ask for one
scale a row. It is the group of weights that are rounded to 8 bits, so that one group alone is no other case.
"""
MOST_INT8, MOST_FLOAT8 = 127.0, 448.0
LEAST_LARGEST = 1e-30
"""Activations whose group has no larger magnitude are taken for zero, so that `127 / largest` is finite."""
_EXACT_INPUTS = 1024
"""A float32 holds the sum of this many products of int8 exactly; a float64 holds any."""
EXP2 = (
    0.00967554133065924,
    0.055507132749638484,
    0.24022119723934343,
    0.6931469670638635,
    1.0000000716546553,
)
"""The kernels' polynomial of 2^fraction, after its leading coefficient."""
EXP2_FIRST = 0.0013276471518576605
"""The polynomial's leading coefficient."""
LOG2_E = 1.44269504088896340736


class RoundedActivations(NamedTuple):
    """Activations [num_rows, in_features] as `scales * values`, the last group padded with zeros."""

    values: torch.Tensor
    """Whole numbers from -127 to 127, or numbers of E4M3: float32 [num_rows, num_groups, group]."""
    scales: torch.Tensor
    """float32 [num_rows, num_groups]; NaN where a value of the group is not finite."""

    def dequantized(self, in_features: int) -> torch.Tensor:
        """Returns the activations that the values stand for, float64 [num_rows, in_features]."""
        return (self.values.double() * self.scales.double()[..., None]).flatten(1)[:, :in_features]


def input_group(weight: QuantizedWeight) -> int:
    """Returns the number of inputs whose products are summed with one scale of the activations."""
    in_features = weight.values.shape[1]
    if weight.scales.shape[1] > 1 or weight.has_int8_activations or weight.is_float8:
        return weight.group_size
    return min(in_features, INPUT_GROUP)


def round_activations(x: torch.Tensor, group: int, one_scale: bool) -> RoundedActivations:
    """Rounds x [num_rows, in_features] to int8, each group by its largest magnitude, or with `one_scale` each row."""
    num_rows, in_features = x.shape
    num_groups = -(-in_features // group)
    padded = torch.nn.functional.pad(x.float(), (0, num_groups * group - in_features))
    grouped = padded.view(num_rows, num_groups, group)
    largest = grouped.abs().amax(-1)
    if one_scale:
        largest = largest.amax(-1, keepdim=True).expand(-1, num_groups)
    is_rounded = largest.isfinite() & (largest >= LEAST_LARGEST)
    inverses = torch.full_like(largest, MOST_INT8) / largest  # torch computes `127.0 / largest` by a reciprocal
    values = (grouped * inverses[..., None]).round()
    values = torch.where(is_rounded[..., None], values, 0.0)
    scales = torch.where(is_rounded, largest / MOST_INT8, torch.where(largest.isfinite(), 0.0, torch.nan))
    return RoundedActivations(values, scales)


def round_to_float8(x: torch.Tensor, group: int) -> RoundedActivations:
    """Rounds x [num_rows, in_features] to E4M3, each group by its largest magnitude; `values` are numbers of E4M3."""
    num_rows, in_features = x.shape
    num_groups = -(-in_features // group)
    grouped = torch.nn.functional.pad(x.float(), (0, num_groups * group - in_features)).view(num_rows, -1, group)
    largest = grouped.abs().amax(-1)
    is_rounded = largest.isfinite() & (largest >= LEAST_LARGEST)
    scaled = grouped * (torch.full_like(largest, MOST_FLOAT8) / largest)[..., None]
    values = torch.where(is_rounded[..., None], scaled, 0.0).to(torch.float8_e4m3fn).float()
    scales = torch.where(largest.isfinite(), 0.0, torch.nan)
    return RoundedActivations(values, torch.where(is_rounded, largest / MOST_FLOAT8, scales))


class TorchQuantizedLinear:
    """`x @ weight.T + bias` for x [..., in_features] in float32 or bfloat16; `silu` of the first half of the outputs
    times the second half if `gated`.
    """

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None, gated: bool = False) -> None:
        self._values = weight.values.clone()
        self._weight = weight
        self._bias = bias
        self._gated = gated
        self._group = input_group(weight)

    def with_gate_apart(self) -> Linear:
        """Returns the same function as a linear and its gate; itself if it has none."""
        if not self._gated:
            return self
        return GatedLinear(TorchQuantizedLinear(self._weight, self._bias), _silu_and_mul)

    def forward(self, x: torch.Tensor, step: AttentionMetadata | None = None) -> torch.Tensor:
        weight, in_features = self._weight, x.shape[-1]
        rows = x.reshape(-1, in_features)
        if weight.input_order is not None:
            rows = rows[:, weight.input_order]
        rounded = round_activations(rows, self._group, weight.has_int8_activations)
        sums = torch.zeros(len(rows), len(self._values), device=x.device)
        exact = torch.float32 if self._group <= _EXACT_INPUTS else torch.float64
        for g, values in enumerate(self._values.split(self._group, dim=1)):
            of_weight = g if weight.scales.shape[1] > 1 else 0
            inputs, scales = rounded.values[:, g, : values.shape[1]], rounded.scales[:, g, None]
            products = (inputs.to(exact) @ values.to(exact).T).float()
            sums += products * weight.scales[:, of_weight] * scales
            if weight.offsets is not None:
                sums += weight.offsets[:, of_weight] * (scales * inputs.sum(1, keepdim=True))
        if self._bias is not None:
            sums += self._bias.float()
        if self._gated:
            gate, up = sums.chunk(2, dim=-1)
            sums = _silu(gate) * up
        return sums.to(x.dtype).view(*x.shape[:-1], -1)


def _silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (_silu(gate) * up).to(x.dtype)


def _silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x) by the kernels' operations. NaN stays NaN."""
    exponent = -(x * LOG2_E).clamp(-126.0, 126.0)
    whole = exponent.round()
    fraction = exponent - whole
    result = torch.full_like(x, EXP2_FIRST)
    for coefficient in EXP2:
        result = result * fraction + coefficient
    power = ((whole.nan_to_num().int() + 127) << 23).view(torch.float32)
    return x / (1.0 + result * power)
