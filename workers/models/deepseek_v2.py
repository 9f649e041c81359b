"""DeepSeek-V2 (DeepSeek-AI, 2024): latent attention, and experts that a router with a softmax chooses, perhaps from the
best groups. Some experts compute every token. The first layers may have one MLP.
"""

from __future__ import annotations

from manta.workers.models import latent, llama
from manta.workers.models.deepseek_v3 import with_experts
from manta.workers.models.experts import experts, read_dense_layers, read_groups, read_num_experts
from manta.workers.models.model_config import ExpertsConfig, LatentShape, ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.specs import DecoderSpec, LayerSpec

ARCHITECTURE = "DeepseekV2ForCausalLM"

_USUAL = LatentShape(query_rank=1536, kv_rank=512, plain_dim=128, rope_dim=64, value_dim=128)
_GREEDY, _IN_GROUPS = "greedy", "group_limited_greedy"


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_latent` does, and for another choice of experts."""
    config = latent.read_latent(raw, _USUAL)
    raw["mlp_bias"].only(False)
    raw["norm_topk_prob"].only(False)  # transformers does not compute it, and no published model has it
    raw["scoring_func"].one_of("softmax", default="softmax")
    raw["moe_layer_freq"].whole(1, most=1)
    num_experts = read_num_experts(raw, 64, "n_routed_experts", "num_experts")
    num_groups = num_chosen_groups = 1
    if raw["topk_method"].one_of(_GREEDY, _IN_GROUPS, default=_GREEDY) == _IN_GROUPS:
        num_groups, num_chosen_groups = read_groups(raw, num_experts, (1, 1))
    raw.ignore("n_group", "topk_group")
    inner = raw["moe_intermediate_size"].whole(1407)
    sizes = ExpertsConfig(
        num_experts=num_experts,
        num_chosen=raw["num_experts_per_tok"].whole(6, most=num_experts),
        intermediate_size=inner,
        scale=raw["routed_scaling_factor"].number(1.0),
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        shared_intermediate_size=inner * raw["n_shared_experts"].whole(2, least=0),
        dense_layers=read_dense_layers(raw, config.num_layers, raw["first_k_dense_replace"], 0),
    )
    return with_experts(raw, config, sizes)


def describe(config: ModelConfig) -> DecoderSpec:
    return llama.decoder(config, [_layer(config, index) for index in range(config.num_layers)])


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    assert config.experts is not None
    layer = latent.layer(config, index)
    if index in config.experts.dense_layers:
        return layer
    return layer._replace(mlp=experts(config, f"model.layers.{index}.mlp"))
