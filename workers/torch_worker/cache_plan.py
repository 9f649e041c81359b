"""The size of a rank's KV cache, for which the largest steps run once. Called by the worker after loading."""

from __future__ import annotations

from typing import NamedTuple

import torch

from manta.workers.checkpoints.memory import (
    CacheSizes,
    block_needs,
    choose_groups,
    plan_kv_cache,
    plan_max_model_len,
)
from manta.workers.kv_groups import LayerGroups, one_group
from manta.workers.model_options import ModelOptions
from manta.workers.models.model_config import ModelError
from manta.workers.parallel.group import Group
from manta.workers.platforms import Platform
from manta.workers.torch_worker.largest_step import run_largest_step
from manta.workers.torch_worker.rank_models import ModelSource, RankModels, kept_weight_bytes


class CachePlan(NamedTuple):
    sizes: CacheSizes
    """The sizes of every rank's cache, those of a draft model included."""
    max_model_len: int
    """Longest sequence in tokens."""
    layers: LayerGroups


def plan_cache(
    models: RankModels,
    source: ModelSource,
    options: ModelOptions,
    platform: Platform,
    group: Group,
    max_draft_tokens: int,
) -> CachePlan:
    """Plans the KV cache of all ranks. `source` is the target's checkpoint, and a step verifies `max_draft_tokens` of
    each sequence.

    Raises `ModelError` if a step or a block has no room, or if the configured length does not fit.
    """
    draft = None if models.draft is None else models.draft.config
    target = models.target.config
    layers = choose_groups(target, draft) if platform.groups_layers else one_group(target.attends)
    free = _free_memory(models, options, platform, max_draft_tokens, draws=group.rank == 0)
    if models.bank is not None and options.adapter_roots and not platform.shares_memory:
        free = max(0, free - models.bank.num_bytes_left)  # for adapters that are loaded while requests run
    sizes = plan_kv_cache(
        target,
        models.dtype,
        options,
        free_bytes=free // group.num_sharing_memory,
        weight_bytes=kept_weight_bytes(source, models.dtype, platform, options.weights) // group.num_ranks,
        draft=draft,
        layers=layers,
        shares_memory=platform.shares_memory,
        most_of_free=platform.kv_share,
        is_asynchronous=platform.runs_ahead,
        has_drafts=max_draft_tokens > 0,
    )
    num_blocks, num_slots = group.least(sizes.num_blocks), group.least(sizes.num_state_slots)
    longest = block_needs(layers.groups, options).longest(num_blocks, source.config.max_position_embeddings)
    max_model_len = plan_max_model_len(source.config, options.max_model_len, longest)
    sizes = sizes._replace(num_blocks=num_blocks, num_state_slots=num_slots)
    return CachePlan(sizes, max_model_len, layers)


def _free_memory(
    models: RankModels, options: ModelOptions, platform: Platform, max_draft_tokens: int, draws: bool
) -> int:
    """Returns the free bytes beside the largest steps of both models."""
    sizes = options.block_size, options.max_num_batched_tokens
    num_rows = options.max_num_sequences

    def run_largest_steps() -> None:
        run_largest_step(models.target, platform, *sizes, num_rows * (1 + max_draft_tokens), draws=draws)
        if models.draft is not None:
            run_largest_step(models.draft, platform, *sizes, num_rows, draws=True)

    try:
        return platform.free_memory(run_largest_steps)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"beside its weights there is no memory for its largest step ({error}); "
            "lower max_num_batched_tokens or max_num_sequences"
        ) from error
