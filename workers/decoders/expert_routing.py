"""A mixture of experts: the router chooses experts for each token. Called by the decoder."""

from __future__ import annotations

import functools

import torch

from manta.workers.kernels.adapted_experts import AdaptedExperts
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.protocol import Kernels
from manta.workers.kernels.weights import DeepRouterWeights, ExpertsWeights


def routed_rows(
    router: DeepRouterWeights, x: torch.Tensor, previous: torch.Tensor | None, eps: float, kernels: Kernels
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what the last linear of a router behind an MLP reads, and what the router of the next layer gets, both
    float32 [num_tokens, width]. `previous` is that of the layer before; None in the first layer.
    """
    rows = router.down.forward(x.float())
    if router.previous_scale is not None:
        assert previous is not None
        rows = rows + previous * router.previous_scale
    hidden = kernels.rms_norm(rows, router.norm, eps)
    for linear in router.hidden:
        gates = linear.forward(hidden)
        hidden = kernels.gate("gelu", torch.cat((gates, torch.ones_like(gates)), dim=-1))
    return hidden, rows


def run_experts(
    experts: ExpertsWeights,
    x: torch.Tensor,
    kernels: Kernels,
    step: AttentionMetadata | None = None,
    routed: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the weighted sum of the chosen experts' results, [num_tokens, hidden], in the dtype of x. The router
    reads x, or `routed` [num_tokens, width]. It chooses the experts, or gives shares to those of `chosen`, int64
    [num_tokens, num_chosen].
    """
    if experts.in_one_call is not None and routed is None:
        return experts.in_one_call.forward(x)
    logits = experts.router.forward((x if routed is None else routed).float())
    if chosen is None:
        shares, chosen = kernels.route(logits, experts.choice_bias, experts.config, step)
    else:  # their own scores alone decide, so the router ranks no others
        shares, order = kernels.route(logits.gather(-1, chosen), None, experts.config, step)
        chosen = chosen.gather(-1, order)
    if experts.config.may_skip:
        is_skipped = chosen == experts.config.num_experts
        shares, chosen = shares.masked_fill(is_skipped, 0), chosen.masked_fill(is_skipped, 0)
    if experts.share_scales is not None:
        shares = shares * experts.share_scales[chosen]
    if isinstance(experts.experts, AdaptedExperts) and step is not None:
        total = experts.experts.forward_adapted(x, chosen, shares, step)
    else:
        total = experts.experts.forward(x, chosen, shares)
    if experts.shared is not None:
        result = experts.shared.down.forward(experts.shared.gated.forward(x, step), step).float()
        if experts.shared_gate is not None:
            result = result * kernels.recurrent.sigmoid(experts.shared_gate.forward(x.float(), step))
        total += result
    joined = total.to(x.dtype)
    if experts.join is not None:
        joined = experts.join(joined)
    if not experts.config.num_identity:
        return joined
    kept = functools.reduce(torch.add, (shares * (chosen >= experts.config.num_computing)).split(1, dim=-1))
    return joined + (x.float() * kept).to(x.dtype)
