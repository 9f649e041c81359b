"""The experts of a layer, one after the other: the plain form of a mixture of experts, on every device."""

from __future__ import annotations

from collections.abc import Callable, Iterable

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
        return run_each(self._run, len(self._experts), x, chosen, shares, self._scales_inputs)

    def _run(self, expert: int, inputs: torch.Tensor) -> torch.Tensor:
        return self._experts[expert].down.forward(self._experts[expert].gated.forward(inputs))


def run_each(
    run: Callable[[int, torch.Tensor], torch.Tensor],
    num_experts: int,
    x: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
    scales_inputs: bool,
) -> torch.Tensor:
    """Returns what `Experts.forward` does. `run` computes an expert, given its number and its rows."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in chosen.unique().tolist():
        if expert not in range(num_experts):
            continue
        rows, places = torch.where(chosen == expert)
        share = shares[rows, places].unsqueeze(-1)
        inputs = (x[rows].float() * share).to(x.dtype) if scales_inputs else x[rows]
        result = run(expert, inputs).float()
        total.index_add_(0, rows, result if scales_inputs else result * share)
    return total
