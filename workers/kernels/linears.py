"""Linears that every device has: torch's own, and what is computed around another linear."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.linear_protocol import Linear


class TorchLinear:
    """`x @ weight.T + bias` by torch, on the device of the weight [out_features, in_features]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def forward(self, x: torch.Tensor, step: AttentionMetadata | None = None) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class GatedLinear:
    """A function of the first half of a linear's outputs times the second half (Shazeer, 2020), such as
    `reference.silu_and_mul`.
    """

    def __init__(self, linear: Linear, gate: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.linear = linear
        self._gate = gate

    def around(self, linear: Linear) -> GatedLinear:
        """Returns the same function of another linear."""
        return GatedLinear(linear, self._gate)

    def forward(self, x: torch.Tensor, step: AttentionMetadata | None = None) -> torch.Tensor:
        return self._gate(self.linear.forward(x, step))


class LowRankLinear:
    """A linear, to each part of whose outputs the product of two narrow ones is added."""

    def __init__(self, linear: Linear, down: Linear, ups: Sequence[Linear]) -> None:
        self._linear = linear
        self._down = down
        self._ups = ups

    def forward(self, x: torch.Tensor, step: AttentionMetadata | None = None) -> torch.Tensor:
        narrow = self._down.forward(x, step).chunk(len(self._ups), dim=-1)
        added = [up.forward(each.contiguous(), step) for up, each in zip(self._ups, narrow, strict=True)]
        return self._linear.forward(x, step) + torch.cat(added, dim=-1)


class SummedLinear:
    """The sum over ranks of what their linears make of their shares of the inputs."""

    def __init__(self, linear: Linear, all_reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.linear = linear
        self.all_reduce = all_reduce

    def forward(self, x: torch.Tensor, step: AttentionMetadata | None = None) -> torch.Tensor:
        return self.all_reduce(self.linear.forward(x, step))


class GatheringLinear:
    """The outputs of all ranks, each of which computes some of them from the inputs of all ranks.

    `all_gather` takes a rank's [num_rows, width] and returns all ranks' [num_rows, num_ranks * width].
    """

    def __init__(self, linear: Linear, all_gather: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._linear = linear
        self._all_gather = all_gather

    def forward(self, x: torch.Tensor, step: AttentionMetadata | None = None) -> torch.Tensor:
        return self._all_gather(self._linear.forward(self._all_gather(x), step))
