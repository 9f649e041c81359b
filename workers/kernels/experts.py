"""The experts of a layer, one after the other: the plain form of a mixture of experts, on every device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from manta.workers.kernels.weights import GatedMlpWeights


class LoopedExperts:
    """Gathers the rows that chose an expert, runs it, and adds its weighted results. The others' weights are not
    read.
    """

    def __init__(self, experts: Sequence[GatedMlpWeights]) -> None:
        self._experts = experts

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for index in chosen.unique().tolist():
            rows, places = torch.where(chosen == index)
            expert = self._experts[index]
            result = expert.down.forward(expert.gated.forward(x[rows]))
            total.index_add_(0, rows, result.float() * shares[rows, places].unsqueeze(-1))
        return total.to(x.dtype)
