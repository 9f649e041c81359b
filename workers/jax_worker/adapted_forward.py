"""The forward pass of steps in which some sequence has an adapter."""

from __future__ import annotations

from typing import Any

import jax

from manta.workers.jax_worker.attention import AttentionForm
from manta.workers.jax_worker.batch import BatchShape
from manta.workers.jax_worker.decoder import forward
from manta.workers.jax_worker.layer_arrays import Parameters
from manta.workers.jax_worker.low_rank import RankPools, with_adapters
from manta.workers.kv_groups import LayerPlace
from manta.workers.models.families import describe
from manta.workers.models.model_config import ModelConfig


def forward_with_adapters(
    config: ModelConfig,
    places: tuple[LayerPlace | None, ...],
    form: AttentionForm,
    shape: BatchShape,
    pools: RankPools,
    packed_adapters: jax.Array,
    parameters: Parameters,
    *others: Any,
) -> Any:
    """Returns what `decoder.forward` does, whose further arguments are `others`, with the adapters of
    `low_rank.pack_adapters`.
    """
    adapted = with_adapters(describe(config), parameters, pools, packed_adapters, shape.num_tokens)
    return forward(config, places, form, shape, adapted, *others)
