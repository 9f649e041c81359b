"""DeepSeek-V3 and R1 (DeepSeek-AI, 2024), and Kimi K2 (Moonshot AI, 2025): latent attention, and experts in groups,
which a router with sigmoids and a bias chooses. One expert computes every token. The first layers have one MLP.
Sarvam-105B has the same layers.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import latent, llama, sarvam_mla
from manta.workers.models.dense import trial_layers
from manta.workers.models.experts import experts, read_dense_layers, read_groups, read_num_experts
from manta.workers.models.model_config import ExpertsConfig, LatentShape, ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.specs import DecoderSpec, LayerSpec

ARCHITECTURE = "DeepseekV3ForCausalLM"

USUAL = LatentShape(query_rank=1536, kv_rank=512, plain_dim=128, rope_dim=64, value_dim=128)
USUAL_EXPERTS = ExpertsConfig(
    num_experts=256,
    num_chosen=8,
    intermediate_size=2048,
    scale=2.5,
    num_groups=8,
    num_chosen_groups=4,
    dense_layers=(0, 1, 2),
)


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_latent` and `read_sigmoid_experts` do."""
    if raw["model_type"].value == sarvam_mla.MODEL_TYPE:
        raw = sarvam_mla.as_deepseek(raw)
    config = latent.read_latent(raw, USUAL, is_interleaved=raw["rope_interleave"].flag(True))
    return read_sigmoid_experts(raw, config, USUAL_EXPERTS)


def read_sigmoid_experts(raw: RawConfig, config: ModelConfig, usual: ExpertsConfig) -> ModelConfig:
    """Returns the model with experts, of which `usual` has the numbers that a configuration leaves out."""
    raw["scoring_func"].one_of("sigmoid", default="sigmoid")
    raw["topk_method"].one_of("noaux_tc", default="noaux_tc")
    raw["moe_layer_freq"].whole(1, most=1)
    num_experts = read_num_experts(raw, usual.num_experts, "n_routed_experts", "num_local_experts")
    num_groups, num_chosen_groups = read_groups(raw, num_experts, (usual.num_groups, usual.num_chosen_groups))
    inner = raw["moe_intermediate_size"].whole(usual.intermediate_size)
    sizes = ExpertsConfig(
        num_experts=num_experts,
        num_chosen=raw["num_experts_per_tok"].whole(usual.num_chosen, most=num_experts),
        intermediate_size=inner,
        scores="sigmoid",
        normalises=raw["norm_topk_prob"].flag(True),
        scale=raw["routed_scaling_factor"].number(usual.scale),
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        ranks_groups_by=min(2, num_experts // num_groups),
        shared_intermediate_size=inner * raw["n_shared_experts"].whole(1, least=0),
        dense_layers=read_dense_layers(raw, config.num_layers, raw["first_k_dense_replace"], len(usual.dense_layers)),
    )
    return with_experts(raw, config, sizes)


def with_experts(raw: RawConfig, config: ModelConfig, sizes: ExpertsConfig) -> ModelConfig:
    """Returns the model with these experts, and perhaps with layers after its last that are not served."""
    return msgspec.structs.replace(
        config,
        experts=sizes,
        num_unused_layers=raw["num_nextn_predict_layers"].whole(0, least=0),
        num_trial_layers=trial_layers([layer in sizes.dense_layers for layer in range(config.num_layers)]),
    )


def describe(config: ModelConfig) -> DecoderSpec:
    return llama.decoder(config, [_layer(config, index) for index in range(config.num_layers)])


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    return with_sigmoid_experts(config, latent.layer(config, index), index)


def with_sigmoid_experts(
    config: ModelConfig, layer: LayerSpec, index: int, choice_bias: str = "gate.e_score_correction_bias"
) -> LayerSpec:
    """Returns the layer with experts, unless it is one of the first that have one MLP. `choice_bias` is the name of the
    bias for the choice.
    """
    assert config.experts is not None
    if index in config.experts.dense_layers:
        return layer
    return layer._replace(mlp=experts(config, f"model.layers.{index}.mlp", choice_bias=choice_bias))
