"""Experts of a layer, one after the other: the plain form of a mixture of experts, on every device.

A step gathers the rows of each chosen expert, runs it, and adds its weighted result. Called by the decoder.
"""

from __future__ import annotations

import torch

from manta.workers.kernels.weights import ExpertsWeights


def run_experts(experts: ExpertsWeights, x: torch.Tensor) -> torch.Tensor:
    """Returns the weighted sum of the chosen experts' results, [num_tokens, hidden], in the dtype of x.

    The weights are the softmax over the logits of all experts, or over those of the chosen ones (`normalises_choice`).
    """
    logits = experts.router.forward(x).float()
    if experts.normalises_choice:
        best, chosen = logits.topk(experts.num_chosen, dim=-1)
        shares = best.softmax(-1)
    else:
        shares, chosen = logits.softmax(-1).topk(experts.num_chosen, dim=-1)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for index in chosen.unique().tolist():
        rows, places = torch.where(chosen == index)
        expert = experts.experts[index]
        result = expert.down.forward(expert.gated.forward(x[rows]))
        total.index_add_(0, rows, result.float() * shares[rows, places].unsqueeze(-1))
    return experts.join(total.to(x.dtype))
