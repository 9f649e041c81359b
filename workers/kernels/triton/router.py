"""The choice of experts in one kernel: scores, groups, the best experts of each row, and their shares.

`workers/kernels/expert_choice.py` defines the results, but for the order of equal scores: here the lower index is
chosen first. A row of NaN chooses experts too, with shares of NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.triton.launch import padded_size
from manta.workers.models.model_config import LEAST_SUM, ExpertsConfig


def route(
    logits: torch.Tensor,
    choice_bias: torch.Tensor | None,
    config: ExpertsConfig,
    step: AttentionMetadata | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weights of the chosen experts and their indices, as `expert_choice.route` does. Tokens that fill the
    step up choose none.
    """
    logits = logits.contiguous()
    query_start = logits if step is None else step.query_start[-1:]
    shape = (len(logits), config.num_chosen)
    shares = torch.empty(shape, device=logits.device)
    chosen = torch.empty(shape, dtype=torch.int64, device=logits.device)
    of_group = config.num_experts // config.num_groups
    elements = padded_size(config.num_groups) * padded_size(of_group)
    _route[(len(logits),)](
        logits, logits if choice_bias is None else choice_bias, query_start, shares, chosen, config.scale, LEAST_SUM,
        NUM_GROUPS=config.num_groups, OF_GROUP=of_group, NUM_CHOSEN=config.num_chosen,
        NUM_CHOSEN_GROUPS=config.num_chosen_groups, RANKS_BY=config.ranks_groups_by,
        HAS_STEP=step is not None, HAS_BIAS=choice_bias is not None,
        IS_SIGMOID=config.scores == "sigmoid", NORMALISES=config.normalises,
        GROUPS=padded_size(config.num_groups), EXPERTS=padded_size(of_group), CHOICES=padded_size(config.num_chosen),
        num_warps=min(8, max(1, elements // 256)), enable_fp_fusion=False,
    )  # fmt: skip
    return shares, chosen


@triton.jit
def _route(
    logits, bias, end, shares, chosen, scale, least_sum,
    NUM_GROUPS: tl.constexpr, OF_GROUP: tl.constexpr, NUM_CHOSEN: tl.constexpr, NUM_CHOSEN_GROUPS: tl.constexpr,
    RANKS_BY: tl.constexpr, HAS_STEP: tl.constexpr, HAS_BIAS: tl.constexpr, IS_SIGMOID: tl.constexpr,
    NORMALISES: tl.constexpr, GROUPS: tl.constexpr, EXPERTS: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """Chooses the experts of one row. Experts are [GROUPS, EXPERTS], padded to powers of two."""
    row = tl.program_id(0).to(tl.int64)
    group, inside = tl.arange(0, GROUPS), tl.arange(0, EXPERTS)
    index = group[:, None] * OF_GROUP + inside[None, :]
    is_expert = (group < NUM_GROUPS)[:, None] & (inside < OF_GROUP)[None, :]
    x = tl.load(logits + row * (NUM_GROUPS * OF_GROUP) + index, mask=is_expert, other=-float("inf"))
    if IS_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-x))
    else:
        largest = tl.max(tl.max(x, axis=1), axis=0)
        exponentials = tl.where(is_expert, tl.exp(x - largest), 0.0)
        scores = exponentials / tl.sum(tl.sum(exponentials, axis=1), axis=0)
    ranked = scores
    if HAS_BIAS:
        ranked += tl.load(bias + index, mask=is_expert, other=0.0)
    ranked = tl.where(ranked == ranked, ranked, -float("inf"))  # of a row of NaN the first experts
    is_left = is_expert
    if NUM_GROUPS > 1:
        rank = tl.zeros((GROUPS,), tl.float32)
        is_unranked = is_expert
        for _ in tl.static_range(RANKS_BY):
            best = tl.max(tl.where(is_unranked, ranked, -float("inf")), axis=1)
            is_best = is_unranked & (ranked == best[:, None])
            first = tl.min(tl.where(is_best, inside[None, :], EXPERTS), axis=1)
            is_unranked = is_unranked & (inside[None, :] != first[:, None])
            rank += best
        is_searched = group < 0
        for _ in tl.static_range(NUM_CHOSEN_GROUPS):
            is_free = (group < NUM_GROUPS) & (is_searched == 0)
            best_rank = tl.max(tl.where(is_free, rank, -float("inf")), axis=0)
            first_group = tl.min(tl.where(is_free & (rank == best_rank), group, GROUPS), axis=0)
            is_searched = is_searched | (group == first_group)
        ranked = tl.where(is_searched[:, None], ranked, -float("inf"))
    choice = tl.arange(0, CHOICES)
    best_scores, experts = tl.zeros((CHOICES,), tl.float32), tl.zeros((CHOICES,), tl.int64)
    for number in tl.static_range(NUM_CHOSEN):
        best_of = tl.max(tl.max(tl.where(is_left, ranked, -float("inf")), axis=1), axis=0)
        is_candidate = is_left & (ranked == best_of)
        own = tl.min(tl.min(tl.where(is_candidate, index, GROUPS * OF_GROUP), axis=1), axis=0)
        is_own = index == own
        score = tl.sum(tl.sum(tl.where(is_own & is_expert, scores, 0.0), axis=1), axis=0)
        best_scores = tl.where(choice == number, score, best_scores)
        experts = tl.where(choice == number, own, experts)
        is_left = is_left & (index != own)
    if NORMALISES:
        best_scores = best_scores / (tl.sum(best_scores, axis=0) + least_sum)
    if HAS_STEP:
        experts = tl.where(row < tl.load(end), experts, -1)
    place = row * NUM_CHOSEN + choice
    tl.store(shares + place, best_scores * scale, mask=choice < NUM_CHOSEN)
    tl.store(chosen + place, experts.to(tl.int64), mask=choice < NUM_CHOSEN)
