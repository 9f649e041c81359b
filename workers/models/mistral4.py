"""Mistral Small 4 (Mistral AI, 2026): latent attention whose queries grow with their position, and experts that a
router with a softmax chooses. One expert computes every token.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import latent, llama
from manta.workers.models.deepseek_v3 import with_experts
from manta.workers.models.experts import experts, read_dense_layers, read_groups, read_num_experts
from manta.workers.models.model_config import ExpertsConfig, LatentShape, ModelConfig, QueryGrowth
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.specs import DecoderSpec, LayerSpec

ARCHITECTURE = "Mistral4ForCausalLM"

_USUAL = LatentShape(query_rank=1024, kv_rank=256, plain_dim=64, rope_dim=64, value_dim=128)


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_latent` does, and for a model without a rope."""
    rope = raw["rope_parameters"].object()
    if not len(rope):
        raise raw["rope_parameters"].refused("an object with the model's rope")
    is_interleaved = raw["rope_interleave"].flag(True)
    config = latent.read_latent(raw, _USUAL, is_interleaved=is_interleaved, ropes_whole_queries=True)
    num_experts = read_num_experts(raw, 128, "n_routed_experts", "num_local_experts")
    num_groups, num_chosen_groups = read_groups(raw, num_experts, (1, 1))
    inner = raw["moe_intermediate_size"].whole(2048)
    sizes = ExpertsConfig(
        num_experts=num_experts,
        num_chosen=raw["num_experts_per_tok"].whole(4, most=num_experts),
        intermediate_size=inner,
        normalises=raw["norm_topk_prob"].flag(True),
        scale=raw["routed_scaling_factor"].number(1.0),
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        ranks_groups_by=min(2, num_experts // num_groups),
        shared_intermediate_size=inner * raw["n_shared_experts"].whole(1, least=0),
        dense_layers=read_dense_layers(raw, config.num_layers, raw["first_k_dense_replace"], 0),
    )
    growth = QueryGrowth(
        rate=rope["llama_4_scaling_beta"].number(0.0, least=0),
        period=rope["original_max_position_embeddings"].whole(config.max_position_embeddings),
    )
    rope.ignore("max_position_embeddings")
    return msgspec.structs.replace(with_experts(raw, config, sizes), query_growth=growth if growth.rate else None)


def describe(config: ModelConfig) -> DecoderSpec:
    return llama.decoder(config, [_layer(config, index) for index in range(config.num_layers)])


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    assert config.experts is not None
    layer = latent.layer(config, index)
    if index in config.experts.dense_layers:
        return layer
    return layer._replace(mlp=experts(config, f"model.layers.{index}.mlp", are_stacked=True))
