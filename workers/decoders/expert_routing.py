"""A mixture of experts: the router chooses experts for each token. Called by the decoder."""

from __future__ import annotations

import torch

from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.protocol import Kernels
from manta.workers.kernels.weights import ExpertsWeights


def run_experts(
    experts: ExpertsWeights,
    x: torch.Tensor,
    kernels: Kernels,
    step: AttentionMetadata | None = None,
    routed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the weighted sum of the chosen experts' results, [num_tokens, hidden], in the dtype of x. The router
    reads x, or `routed` of the same shape.
    """
    logits = experts.router.forward((x if routed is None else routed).float())
    shares, chosen = kernels.route(logits, experts.choice_bias, experts.config, step)
    if experts.share_scales is not None:
        shares = shares * experts.share_scales[chosen]
    total = experts.experts.forward(x, chosen, shares)
    if experts.shared is not None:
        result = experts.shared.down.forward(experts.shared.gated.forward(x, step), step).float()
        if experts.shared_gate is not None:
            result = result * kernels.recurrent.sigmoid(experts.shared_gate.forward(x.float()))
        total += result
    joined = experts.join(total.to(x.dtype))
    if not experts.config.num_identity:
        return joined
    kept = (shares * (chosen >= experts.config.num_computing)).cumsum(-1)[:, -1:]
    return joined + (x.float() * kept).to(x.dtype)
