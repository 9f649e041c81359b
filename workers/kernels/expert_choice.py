"""The choice of experts for each token, in plain torch. `workers/decoders/expert_routing.py` calls it by `Kernels`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.models.model_config import LEAST_SUM, ExpertsConfig


def route(
    logits: torch.Tensor,
    choice_bias: torch.Tensor | None,
    config: ExpertsConfig,
    step: AttentionMetadata | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weights of the chosen experts and their indices, float32 and int64 [num_tokens, num_chosen], from
    float32 logits [num_tokens, num_experts] and a bias of the choice [num_experts].

    Tokens after the last one of the step, which fill it up to the size of a captured graph, may choose none: -1.
    """
    return choose(_SCORES[config.scores](logits), choice_bias, config)


_SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softmax": lambda logits: logits.softmax(-1),
    "sqrtsoftplus": lambda logits: F.softplus(logits).sqrt(),
}
"""The scores of logits, by the names of `ExpertsConfig.scores`."""


def choose(
    scores: torch.Tensor, choice_bias: torch.Tensor | None, config: ExpertsConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what `route` does, from the experts' scores [num_tokens, num_experts]. Scores are added one after the
    other, which a sum in torch's vectors would not do.
    """
    ranked = scores if choice_bias is None else scores + choice_bias
    if config.num_groups > 1:
        ranked = _of_best_groups(ranked, config)
    chosen = ranked.topk(config.num_chosen, dim=-1).indices
    shares = scores.gather(-1, chosen)
    if config.normalises:
        shares = shares / (shares.cumsum(-1)[..., -1:] + LEAST_SUM)
    return shares * config.scale, chosen


def _of_best_groups(ranked: torch.Tensor, config: ExpertsConfig) -> torch.Tensor:
    """Returns the scores, those of the groups that are not searched as minus infinity (DeepSeek-V2, 2024), or as 0."""
    by_group = ranked.unflatten(-1, (config.num_groups, -1))
    best = by_group.topk(config.ranks_groups_by, dim=-1).values.sum(-1).topk(config.num_chosen_groups, dim=-1).indices
    is_left_out = torch.ones(by_group.shape[:-1], dtype=torch.bool, device=ranked.device).scatter_(-1, best, False)
    others = 0.0 if config.scores_others_zero else -torch.inf
    return by_group.masked_fill(is_left_out.unsqueeze(-1), others).flatten(-2)
