"""The experts of a layer, one after the other: the plain form of a mixture of experts, on every device."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from manta.workers.kernels.weights import GatedMlpWeights


class LoopedExperts:
    """Gathers the rows that chose an expert, runs it, and adds its weighted results. The others' weights are not
    read.
    """

    def __init__(self, experts: Iterable[GatedMlpWeights], scales_inputs: bool = False) -> None:
        """With `scales_inputs`, the weights multiply what the experts get, instead of their results (Llama 4)."""
        self._experts = tuple(experts)
        self._scales_inputs = scales_inputs

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for index in chosen.unique().tolist():
            if index not in range(len(self._experts)):
                continue
            rows, places = torch.where(chosen == index)
            expert, share = self._experts[index], shares[rows, places].unsqueeze(-1)
            inputs = (x[rows].float() * share).to(x.dtype) if self._scales_inputs else x[rows]
            result = expert.down.forward(expert.gated.forward(inputs)).float()
            total.index_add_(0, rows, result if self._scales_inputs else result * share)
        return total
