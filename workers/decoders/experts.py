"""A mixture of experts: the router chooses experts for each token. Called by the decoder."""

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
    return experts.join(experts.experts.forward(x, chosen, shares))
